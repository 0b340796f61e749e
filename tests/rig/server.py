"""vLLM as users run it: the OpenAI server over HTTP, in its usual three processes.

Holds true: time to first token is taken at the client, from sending the request to the first streamed token; `stop` is
SIGTERM as a service manager sends it, `kill` is SIGKILL to the whole group.
"""

from __future__ import annotations

import http.client
import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rig.daemon import free_port, parse_metrics
from rig.engine import EngineConfig, Request, engine_env
from rig.process import Child, wait_until

START_SECONDS = 400.0
STOP_SECONDS = 60.0


@dataclass(frozen=True)
class Completion:
    text: str
    ttft_ms: float
    prompt_tokens: int
    hit_tokens: int


class Server:
    """A running server. Use as a context manager: leaving it kills the process group."""

    def __init__(self, config: EngineConfig, run_dir: Path, connector: Mapping[str, Any] | None, name: str = "server"):
        run_dir.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
        argv += ["--port", str(self.port), "--served-model-name", MODEL, "--enable-prompt-tokens-details"]
        argv += _flags(config)
        if connector is not None:
            argv += ["--kv-transfer-config", json.dumps(connector)]
        env = engine_env()
        del env["VLLM_ENABLE_V1_MULTIPROCESSING"]
        self.child = Child(name, argv, run_dir / f"{name}.log", env=env)

    def ready(self) -> Self:
        def is_ready() -> bool:
            if not self.child.is_running():
                raise self.child.failure(f"ended with status {self.child.status}")
            return self._get("/health") is not None

        wait_until("the server is ready", is_ready, START_SECONDS)
        return self

    def complete(self, request: Request) -> Completion:
        """One streamed completion."""
        body = {
            "model": MODEL,
            "prompt": list(request.prompt),
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=180)
        start = time.perf_counter()
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        if reply.status != 200:
            raise self.child.failure(f"answered {reply.status}: {reply.read().decode()}")
        return self._read_stream(reply, start)

    def metrics(self) -> dict[str, float]:
        return parse_metrics(self._get("/metrics") or "")

    def stop(self) -> int:
        return self.child.terminate(STOP_SECONDS)

    def kill(self) -> None:
        self.child.kill()

    def _read_stream(self, reply: http.client.HTTPResponse, start: float) -> Completion:
        pieces: list[str] = []
        first = 0.0
        usage: dict[str, Any] | None = None
        for line in reply:
            data = line.decode().removeprefix("data: ").strip()
            if not data or data == "[DONE]":
                continue
            event = json.loads(data)
            for choice in event.get("choices", []):
                first = first or time.perf_counter()
                pieces.append(choice["text"])
            usage = event.get("usage") or usage
        if usage is None or not pieces:
            raise self.child.failure("ended a stream without text or usage")
        details = usage.get("prompt_tokens_details") or {}
        return Completion(
            "".join(pieces), (first - start) * 1e3, usage["prompt_tokens"], details.get("cached_tokens") or 0
        )

    def _get(self, page: str) -> str | None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{page}", timeout=5) as reply:
                return str(reply.read().decode())
        except (urllib.error.URLError, OSError):
            return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


MODEL = "tiny"


def _flags(config: EngineConfig) -> list[str]:
    """The engine's arguments as the command line spells them."""
    flags: list[str] = []
    for name, value in config.vllm_arguments().items():
        flag = name.replace("_", "-")
        if value is True:
            flags.append(f"--{flag}")
        elif value is False:
            flags += [f"--no-{flag}"] if name == "enable_prefix_caching" else []
        else:
            flags += [f"--{flag}", str(value)]
    return flags
