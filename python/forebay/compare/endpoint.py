"""An OpenAI-compatible endpoint, asked with the standard library alone.

Holds true: connecting has a deadline, and so has what follows; the clock of a request starts when the connection is
there, so it counts no handshake. Redirects are not followed, and no message shows the key.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit

from forebay.compare.failure import CompareError

MAX_PAGE_BYTES = 16 << 20
MAX_LINE_BYTES = 1 << 20
KEY_HINT = "give the key in `OPENAI_API_KEY`, or a file with it: `--api-key-file`"
OPENAI_HINT = "name the address of an OpenAI server such as `vllm serve`, for example `http://localhost:8000`"


@dataclass(frozen=True)
class Url:
    """Where the endpoint is; `path` comes before `/v1`."""

    is_tls: bool
    host: str
    port: int
    path: str

    @classmethod
    def parse(cls, text: str) -> Self:
        hint = "write it like `http://localhost:8000`"
        try:
            parts = urlsplit(text)
            port = parts.port
        except ValueError as error:
            raise CompareError(f"`{text}` is not an address: {error}", hint) from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise CompareError(f"`{text}` is not an address", hint)
        if parts.username is not None:
            raise CompareError("the address contains credentials", KEY_HINT)
        if parts.query or parts.fragment:
            raise CompareError(f"`{text}` has more than host, port and path", hint)
        is_tls = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
        return cls(is_tls, parts.hostname, port or (443 if is_tls else 80), path)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.is_tls else 'http'}://{host}:{self.port}{self.path}"


@dataclass(frozen=True)
class Model:
    name: str
    root: str | None  # the model's path or repository, where the endpoint says it
    max_tokens: int | None  # of prompt and answer together


@dataclass(frozen=True)
class Usage:
    """What the endpoint says of a request's tokens; `None` where it says nothing."""

    prompt_tokens: int | None = None
    hit_tokens: int | None = None
    output_tokens: int | None = None

    @classmethod
    def parse(cls, usage: Mapping[str, Any]) -> Self:
        details = usage.get("prompt_tokens_details") or {}
        return cls(usage.get("prompt_tokens"), details.get("cached_tokens"), usage.get("completion_tokens"))


@dataclass(frozen=True)
class Reply:
    ttft_ms: float
    total_ms: float
    text: str
    usage: Usage


class Endpoint:
    """One server. Safe to use from several threads."""

    def __init__(self, name: str, url: Url, key: str | None, deadline_seconds: float):
        self.name = name
        self.url = url
        self._key = key
        self._deadline_seconds = deadline_seconds

    def find_model(self, wanted: str | None) -> Model:
        """The model of that name, or the only one."""
        models = self._models()
        served = ", ".join(f"`{model.name}`" for model in models)
        if wanted is not None:
            for model in models:
                if model.name == wanted:
                    return model
            raise CompareError(f"{self.url} has no model `{wanted}`", f"it has {served}")
        if len(models) != 1:
            raise CompareError(f"{self.url} has {len(models)} models", f"choose with `--model`: {served}")
        return models[0]

    def complete(self, body: bytes) -> Reply:
        """Sends one prepared request, and reads its stream to the end."""
        with self._exchange("POST", "/v1/completions", body) as (reply, clock):
            self._judge(reply)
            if not (reply.getheader("Content-Type") or "").startswith("text/event-stream"):
                raise CompareError(
                    f"{self.url} does not stream its answers",
                    "time to first token needs a stream: a proxy in between must pass `text/event-stream` on",
                )
            try:
                return self._read_stream(reply, clock)
            except (AttributeError, TypeError):
                raise CompareError(f"{self.url} streams other objects than an OpenAI server's", OPENAI_HINT) from None

    def metrics(self) -> Mapping[str, float]:
        """The metrics page, each sample with its labels and each name's sum; empty if there is none."""
        try:
            with self._exchange("GET", "/metrics") as (reply, _):
                return parse_metrics(reply.read(MAX_PAGE_BYTES).decode()) if reply.status == 200 else {}
        except (CompareError, ValueError):
            return {}

    def _models(self) -> list[Model]:
        with self._exchange("GET", "/v1/models") as (reply, _):
            page = reply.read(MAX_PAGE_BYTES)
            if reply.status == 404:
                raise CompareError(f"{self.url} is not an OpenAI-compatible server: no `/v1/models`", OPENAI_HINT)
            self._judge(reply, page)
        try:
            models = [Model(m["id"], m.get("root"), m.get("max_model_len")) for m in json.loads(page)["data"]]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise CompareError(
                f"{self.url} is not an OpenAI-compatible server: no list of models", OPENAI_HINT
            ) from None
        if not models:
            raise CompareError(f"{self.url} has no model")
        return models

    def _judge(self, reply: http.client.HTTPResponse, page: bytes | None = None) -> None:
        if reply.status == 200:
            return
        said = _message(reply.read(MAX_PAGE_BYTES) if page is None else page)
        if reply.status in (401, 403):
            what = "wants a key" if self._key is None else "refuses the key"
            raise CompareError(f"{self.url} {what}", KEY_HINT)
        raise CompareError(f"{self.url} answered {reply.status}: {said}", STATUS_HINTS.get(reply.status))

    def _read_stream(self, reply: http.client.HTTPResponse, clock: _Clock) -> Reply:
        pieces: list[str] = []
        first_ms: float | None = None
        usage = Usage()
        for event in self._events(reply):
            if "error" in event:
                raise CompareError(f"{self.url} broke an answer off: {_message(json.dumps(event).encode())}")
            if choices := event.get("choices"):
                first_ms = first_ms or clock.elapsed_ms()
                pieces += [str(choice.get("text") or "") for choice in choices]
            if event.get("usage"):
                usage = Usage.parse(event["usage"])
        if first_ms is None:
            raise CompareError(f"{self.url} ended an answer without a token")
        total_ms = clock.elapsed_ms()
        reply.read(MAX_LINE_BYTES)  # an end that is not read looks to the server like a client that went away
        return Reply(first_ms, total_ms, "".join(pieces), usage)

    def _events(self, reply: http.client.HTTPResponse) -> Iterator[Mapping[str, Any]]:
        while line := reply.readline(MAX_LINE_BYTES):
            if not line.startswith(b"data:"):
                continue
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            event = _parse(data)
            if event is None:
                raise CompareError(f"{self.url} streams something else than JSON objects", OPENAI_HINT)
            yield event
        raise CompareError(f"{self.url} ended an answer early", "its log says why")

    @contextlib.contextmanager
    def _exchange(
        self, method: str, path: str, body: bytes | None = None
    ) -> Iterator[tuple[http.client.HTTPResponse, _Clock]]:
        """The reply's head, and the clock that started when the request was sent; every failure as a `CompareError`."""
        kind = http.client.HTTPSConnection if self.url.is_tls else http.client.HTTPConnection
        connection = kind(self.url.host, self.url.port, timeout=self._deadline_seconds)
        try:
            connection.connect()
            with _Clock(connection.sock, self._deadline_seconds) as clock:
                connection.request(method, self.url.path + path, body, self._headers())
                yield connection.getresponse(), clock
        except TimeoutError:
            raise CompareError(
                f"{self.url} did not answer within {self._deadline_seconds:g} s",
                "give it more time with `--deadline`, or shorter prompts",
            ) from None
        except (OSError, http.client.HTTPException) as error:
            raise CompareError(*self._explain(error)) from None
        finally:
            connection.close()

    def _headers(self) -> dict[str, str]:
        key = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        return {"Content-Type": "application/json", "Accept": "text/event-stream, */*"} | key

    def _explain(self, error: Exception) -> tuple[str, str]:
        """What went wrong with the connection, and what to do."""
        if isinstance(error, socket.gaierror):
            return f"the host of {self.url} is not known: {error.strerror}", "is the name right?"
        if isinstance(error, ssl.SSLError):
            return f"no TLS with {self.url}: {error.reason or error}", "is it an `http://` address?"
        if isinstance(error, ConnectionRefusedError):
            return f"nobody listens at {self.url}", "is the server up, and is this its port?"
        if isinstance(error, http.client.RemoteDisconnected | ConnectionResetError | BrokenPipeError):
            return f"{self.url} closed the connection", "is it up? Its log says why; `https://` may be wanted"
        if isinstance(error, http.client.HTTPException):
            return f"{self.url} does not speak HTTP", OPENAI_HINT
        return f"{self.url} cannot be reached: {error}", "is the server up, and can this host reach it?"


STATUS_HINTS = {
    404: "it needs `/v1/completions`; a chat-only gateway does not do",
    429: "it is busy: send less at once with `--concurrency`",
    503: "it is not ready, or busy: send less at once with `--concurrency`",
}


class _Clock:
    """The time since a request was sent. Ends the connection at the deadline, whatever the other side does."""

    def __init__(self, sock: socket.socket, seconds: float):
        self._sock = sock
        self._is_late = False
        self._timer = threading.Timer(seconds, self._cut)
        self._timer.daemon = True

    def elapsed_ms(self) -> float:
        return (time.perf_counter() - self._start) * 1e3

    def __enter__(self) -> Self:
        self._timer.start()
        self._start = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        if self._is_late:
            raise TimeoutError

    def _cut(self) -> None:
        self._is_late = True
        with contextlib.suppress(OSError):  # it ended at this moment
            self._sock.shutdown(socket.SHUT_RDWR)


def completion(model: str, prompt: Sequence[int], max_tokens: int) -> bytes:
    """The body of a request: greedy, of exactly `max_tokens`, as a stream that ends with its usage."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(body).encode()


def parse_metrics(text: str) -> dict[str, float]:
    """Prometheus text as a dictionary."""
    samples: dict[str, float] = {}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        if not name or line.startswith("#"):
            continue
        samples[name] = float(value)
        bare = name.partition("{")[0]
        if bare != name:
            samples[bare] = samples.get(bare, 0.0) + float(value)
    return samples


def _parse(data: bytes) -> Mapping[str, Any] | None:
    try:
        event = json.loads(data)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


def _message(page: bytes) -> str:
    """What an error's page says, on one line."""
    said: Any = _parse(page) or {}
    error = said.get("error")
    text = error.get("message") if isinstance(error, dict) else error or said.get("message")
    return " ".join(str(text or page.decode(errors="replace")).split())[:300] or "nothing more"
