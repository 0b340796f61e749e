"""A server that streams as vLLM does, over a prefix cache that is exact: blocks of 16 tokens, least recently used first out.

Holds true: it computes nothing and answers at once, so a test of it is about counts, never about times.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

BLOCK = 16
MODEL = "fake"


@dataclass
class Fake:
    """Use as a context manager. `wrong` names what this server does otherwise than it should."""

    name: str = "fake"
    wrong: str = ""
    port: int = 0  # any
    key: str | None = None
    has_details: bool = True
    has_metrics: bool = True
    has_forebay: bool = True
    tells_whole_prompts: bool = False  # as hits, as vLLM does of what its connector has
    ready_after: int = 0  # requests
    capacity_blocks: int = 1 << 20
    hold_seconds: float = 0.0
    models: tuple[str, ...] = (MODEL,)
    log: list[tuple[str, list[int]]] = field(default_factory=list)  # may be shared by several servers
    in_flight: list[int] = field(default_factory=list)  # seen by each request, itself included

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self._flying = 0
        self.hits = {"engine": 0, "external": 0}
        self.requests: list[dict[str, Any]] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), type("Handler", (_Handler,), {"fake": self}))
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def look_up(self, prompt: list[int]) -> int:
        """Hit tokens; then the prompt is known. vLLM's own cache leaves the last block, as one token is computed."""
        blocks = [hash(tuple(prompt[: end + BLOCK])) for end in range(0, len(prompt) - BLOCK + 1, BLOCK)]
        most = (len(prompt) if self.tells_whole_prompts else len(prompt) - 1) // BLOCK
        known = 0
        with self._lock:
            while known < most and blocks[known] in self._blocks:
                known += 1
            for block in reversed(blocks):
                self._blocks[block] = None
                self._blocks.move_to_end(block)
            while len(self._blocks) > self.capacity_blocks:
                self._blocks.popitem(last=False)
            self.hits["external" if self.has_forebay else "engine"] += known * BLOCK
        return known * BLOCK

    def enter(self, body: dict[str, Any]) -> None:
        with self._lock:
            self._flying += 1
            self.in_flight.append(self._flying)
            self.requests.append(body)
            self.log.append((self.name, body["prompt"]))
        time.sleep(self.hold_seconds)

    def leave(self) -> None:
        with self._lock:
            self._flying -= 1

    def metrics(self) -> str:
        lines = [
            "# HELP vllm:prefix_cache_hits_total Cached tokens.",
            f'vllm:prefix_cache_hits_total{{engine="0",model_name="{MODEL}"}} {self.hits["engine"]}.0',
            f'vllm:external_prefix_cache_hits_total{{engine="0"}} {self.hits["external"]}.0',
            f'vllm:cache_config_info{{block_size="{BLOCK}",num_gpu_blocks="{self.capacity_blocks}"}} 1.0',
        ]
        if self.has_forebay:
            lines.append(f'forebay:is_ready{{engine="0"}} {float(len(self.requests) > self.ready_after)}')
        return "\n".join(lines) + "\n"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fake: Fake

    def do_GET(self) -> None:
        if not self._is_allowed():
            return
        if self.path == "/metrics" and self.fake.has_metrics:
            return self._send(200, self.fake.metrics(), "text/plain")
        if self.path != "/v1/models" or self.fake.wrong == "no list of models":
            return self._send(404, '{"detail": "Not Found"}')
        if self.fake.wrong == "a page of HTML":
            return self._send(200, "<html>welcome</html>", "text/html")
        if self.fake.wrong == "a redirect":
            return self._send(307, "")
        listed = [{"id": name, "root": f"/models/{name}", "max_model_len": 8192} for name in self.fake.models]
        return self._send(200, json.dumps({"object": "list", "data": listed}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._is_allowed():
            return
        if self.path != "/v1/completions" or self.fake.wrong == "chat only":
            return self._send(404, '{"detail": "Not Found"}')
        if self.fake.wrong == "busy":
            return self._send(503, '{"error": {"message": "no room", "code": 503}}')
        if self.fake.wrong == "no stream":
            return self._send(200, json.dumps({"choices": [{"text": "w1"}]}))
        self.fake.enter(body)
        try:
            self._stream(body)
        except OSError:
            self.close_connection = True
        finally:
            self.fake.leave()

    def _stream(self, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for text in self._events(body):
            self.wfile.write(f"{len(text.encode()):x}\r\n{text}\r\n".encode())
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")

    def _events(self, body: dict[str, Any]) -> Iterator[str]:
        hits = self.fake.look_up(body["prompt"])
        while self.fake.wrong == "never ends":
            yield ": still here\n\n"
            time.sleep(0.01)
        if self.fake.wrong == "no token":
            yield "data: [DONE]\n\n"
            return
        for number in range(body["max_tokens"]):
            word = f"w{(sum(body['prompt']) + number) % 97} "
            yield f"data: {json.dumps({'choices': [{'index': 0, 'text': word}], 'usage': None})}\n\n"
            if self.fake.wrong == "ends early":
                return
            if self.fake.wrong == "breaks off":
                yield 'data: {"error": {"message": "EngineCore died", "code": 500}}\n\n'
        if self.fake.wrong == "strange objects":
            yield 'data: {"choices": ["a word"]}\n\n'
        if self.fake.wrong == "no JSON":
            yield "data: a word\n\n"
        usage: dict[str, Any] = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
        if self.fake.has_details:
            usage["prompt_tokens_details"] = {"cached_tokens": hits}
        yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n"
        yield "data: [DONE]\n\n"

    def _is_allowed(self) -> bool:
        if self.fake.key is None or self.headers.get("Authorization") == f"Bearer {self.fake.key}":
            return True
        self._send(401, '{"error": "Unauthorized"}')
        return False

    def _send(self, status: int, text: str, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Location", "http://127.0.0.1:1/")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # the client had enough
            super().handle()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""
