"""One vLLM engine in a process of its own, driven over pipes by one JSON object a line.

Holds true: what an engine computes depends on its `EngineConfig` and the requests alone; the process sees no GPU, no
network and no `PYTHONHASHSEED`, so that the hash root is the one users get. Answers come in the order of the commands.
The process's half is `engine_main.py`.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from rig import models
from rig.paths import CACHE, CHECKOUT
from rig.process import Child, RigError, is_stopped, wait_until

START_SECONDS = 300.0  # 8 s on a quiet machine; a loaded one was seen to need 100 s, and 314 s for four processes
ANSWER_SECONDS = 180.0


@dataclass(frozen=True)
class EngineConfig:
    """What an engine is, apart from its connector."""

    model: models.Recipe
    tensor_parallel: int = 1
    attention: str | None = None  # vLLM's backend, where it should not be the machine that decides
    block_size: int = 32
    prefix_caching: bool = True
    blocks: int | None = None  # few blocks force preemption
    kv_cache_bytes: int = 256 << 20
    max_model_len: int = 4096
    max_batched_tokens: int = 2048
    max_requests: int = 16

    def vllm_arguments(self) -> dict[str, Any]:
        arguments: dict[str, Any] = {
            "model": str(models.directory(self.model)),
            "dtype": "float32",
            "enforce_eager": True,
            "disable_log_stats": False,
            "tensor_parallel_size": self.tensor_parallel,
            "block_size": self.block_size,
            "enable_prefix_caching": self.prefix_caching,
            "kv_cache_memory_bytes": self.kv_cache_bytes,
            "max_model_len": self.max_model_len,
            "max_num_batched_tokens": self.max_batched_tokens,
            "max_num_seqs": self.max_requests,
        }
        if self.tensor_parallel > 1:
            arguments["distributed_executor_backend"] = "mp"
        if self.attention is not None:
            arguments["attention_backend"] = self.attention
        if self.blocks is not None:
            arguments["num_gpu_blocks_override"] = self.blocks
        return arguments


@dataclass(frozen=True)
class Request:
    """A prompt of token ids; greedy, and never ended early."""

    id: str
    prompt: tuple[int, ...]
    max_tokens: int = 12


@dataclass(frozen=True)
class Answer:
    """What the engine made of a request."""

    id: str
    tokens: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int
    hit_tokens: int  # local and external together
    ttft_ms: float
    gaps: tuple[float, ...] = ()  # per token, log-probability of the best over the second best; only where asked for
    # Per group and block position, a digest of the block's bytes over the group's layers and all ranks; only where
    # asked for. None stands for a block the engine no longer holds.
    pages: tuple[tuple[str | None, ...], ...] = ()


@dataclass(frozen=True)
class Duration:
    """How long one kind of call took, in milliseconds."""

    calls: int
    p50_ms: float
    p99_ms: float
    max_ms: float


@dataclass
class Engine:
    """A running engine. Use as a context manager: leaving it kills the process group."""

    config: EngineConfig
    run_dir: Path
    connector: Mapping[str, Any] | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    name: str = "engine"

    def __post_init__(self) -> None:
        self.run_dir.mkdir(parents=True, exist_ok=True)
        arguments = self.config.vllm_arguments()
        if self.connector is not None:
            arguments["kv_transfer_config"] = dict(self.connector)
        reply_out, reply_in = os.pipe()
        command_out, command_in = os.pipe()
        self._commands = os.fdopen(command_in, "wb", buffering=0)
        self._replies = _Lines(reply_out)
        log = self.run_dir / f"{self.name}.log"
        argv = [sys.executable, "-m", "rig.engine_main", str(reply_in), json.dumps(arguments)]
        self.child = Child(
            self.name, argv, log, env=engine_env() | dict(self.env), pass_fds=[reply_in], stdin=command_out
        )
        os.close(reply_in)
        os.close(command_out)
        self._asked = 0
        self.started_at = time.monotonic()
        self._is_ready = False

    def ready(self) -> Self:
        """Waits until the engine can take requests."""
        if not self._is_ready:
            seconds = START_SECONDS - (time.monotonic() - self.started_at)
            greeting = self._reply(0, seconds)
            self.pids: list[int] = greeting["pids"]  # of the workers, by rank
            self.id: str = greeting["id"]  # what the daemon knows it by
            self._is_ready = True
        return self

    def generate(self, requests: Sequence[Request], *, gaps: bool = False, pages: bool = False) -> list[Answer]:
        """Runs the requests as one batch, in their order."""
        self.begin(requests, gaps=gaps, pages=pages)
        return self.finish()

    def begin(self, requests: Sequence[Request], *, gaps: bool = False, pages: bool = False) -> None:
        """Starts a batch; `finish` waits for it. In between the test may harm whom it likes."""
        self.ready()
        listed = [asdict(request) for request in requests]
        self._begun = self._command("generate", requests=listed, gaps=gaps, pages=pages)

    def finish(self, seconds: float = ANSWER_SECONDS) -> list[Answer]:
        """The answers to the batch that was begun."""
        return [_answer(reply) for reply in self._reply(self._begun, seconds)["answers"]]

    def reset_prefix_cache(self, *, reset_connector: bool = False) -> None:
        """Forgets the engine's own cached prefixes; with `reset_connector`, as on a weight swap, Forebay's too."""
        if not self.call("reset_prefix_cache", reset_connector=reset_connector)["done"]:
            raise self.child.failure("refused to reset its prefix cache")

    def sleep_and_wake(self) -> None:
        """Sleep level 1 and wake-up, whose scheduler half (pause, reset of cache and connector) runs on a CPU too."""
        self.call("sleep_and_wake")

    def reload_weights(self, recipe: models.Recipe) -> None:
        """Gives the running engine the weights of another model of its shape, by vLLM's own call."""
        self.call("reload_weights", path=str(models.directory(recipe)))

    def scale_embeddings(self, factor: float, *, is_called: bool) -> None:
        """Writes other weights into memory, by a call of the engine or behind its back."""
        self.call("scale_embeddings", factor=factor, is_called=is_called)

    def connect(self, *, is_on: bool) -> None:
        """Takes the connector out of scheduler and workers, or puts it back, while no request runs: one process then
        shows what the connector costs, where two processes of one program differ by more than that."""
        self.call("connect", is_on=is_on)

    def fields(self) -> dict[str, str]:
        """The namespace's fields that hold from the start on."""
        fields: dict[str, str] = self.call("fields")["fields"]
        return fields

    def poison(self) -> None:
        """Overwrites all KV memory, so that what is not loaded anew gives other tokens."""
        self.call("poison")

    def metrics(self) -> dict[str, float]:
        """vLLM's counters and gauges, summed over their labels; by `source` too, as `name:source`."""
        metrics: dict[str, float] = self.call("metrics")["metrics"]
        return metrics

    def stores_under_way(self) -> int:
        """Stores that are not over: slots that wait for workers, and what the daemon has not acknowledged."""
        under_way: int = self.call("stores")["under_way"]
        return under_way

    def durations(self) -> dict[str, Duration]:
        """Time spent in the scheduler's step and in each connector call since the last asking."""
        return {name: Duration(**times) for name, times in self.call("durations")["durations"].items()}

    def stop_at(self, call: str, nth: int, when: str, rank: int = 0) -> None:
        """Arms a trap: that worker stops itself (SIGSTOP) at its nth `submit_store` or `submit_load` from now.

        `when` is "before" the copy was handed over, or "after", when it has begun. Takes the place of an earlier trap
        at the same call.
        """
        self.call("stop_at", call=call, nth=nth, when=when, rank=rank)

    def wait_stopped(self, rank: int = 0, seconds: float = 60) -> None:
        """Waits until the trap has shut."""
        pid = self.ready().pids[rank]
        try:
            wait_until(f"pid {pid} stops itself", lambda: is_stopped(pid) or self._died(), seconds)
        except RigError as error:
            raise self.child.failure(str(error)) from None
        self._check_alive()

    def resume(self) -> None:
        """Lets every worker go on, stopped or not."""
        self.child.signal(signal.SIGCONT)

    def kill(self) -> None:
        self.child.kill()

    def call(self, command: str, **arguments: Any) -> dict[str, Any]:
        self.ready()
        return self._reply(self._command(command, **arguments), ANSWER_SECONDS)

    def _command(self, command: str, **arguments: Any) -> int:
        """Sends it; the number its reply will have."""
        self._asked += 1
        line = json.dumps({"number": self._asked, "command": command} | arguments)
        try:
            self._commands.write(line.encode() + b"\n")
        except BrokenPipeError:
            raise self.child.failure("has ended") from None
        return self._asked

    def _reply(self, number: int, seconds: float) -> dict[str, Any]:
        """The reply of this number. Earlier ones belong to a test that failed before it read them."""
        deadline = time.monotonic() + seconds
        while (reply := self._next_reply(deadline - time.monotonic()))["number"] < number:
            pass
        if "error" in reply:
            raise self.child.failure(f"answered {reply['error']}")
        return reply

    def _next_reply(self, seconds: float) -> dict[str, Any]:
        line = self._replies.next(seconds)
        if line is None:
            raise self.child.failure(f"did not answer within {seconds:g} s")
        if line == b"":
            self.child.wait(10)
            raise self.child.failure(f"ended with status {self.child.status}")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _died(self) -> bool:
        return not self.child.is_running()

    def _check_alive(self) -> None:
        if self._died():
            raise self.child.failure(f"ended with status {self.child.status}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._commands.close()
        self._replies.close()


def engine_env() -> dict[str, str]:
    """The environment every engine runs in: no network, no telemetry, caches inside the checkout."""
    return clean_env() | {
        "PYTHONPATH": str(CHECKOUT / "tests"),
        "PYTHONUNBUFFERED": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_CACHE_ROOT": str(CACHE / "vllm"),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        # Eager mode does not keep the log-probability path from compiling C++ for 30 s at the first request.
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


def clean_env() -> dict[str, str]:
    """The caller's environment without what would configure vLLM or Forebay behind a test's back."""
    foreign = ("VLLM_", "FOREBAY_", "PYTHONHASHSEED")
    return {name: value for name, value in os.environ.items() if not name.startswith(foreign)}


def _answer(reply: dict[str, Any]) -> Answer:
    reply["tokens"] = tuple(reply["tokens"])
    reply["gaps"] = tuple(reply["gaps"])
    reply["pages"] = tuple(tuple(group) for group in reply["pages"])
    return Answer(**reply)


class _Lines:
    """Lines from a pipe, each within a deadline."""

    def __init__(self, fd: int):
        self._pipe = os.fdopen(fd, "rb", buffering=0)
        self._buffer = b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._pipe, selectors.EVENT_READ)

    def next(self, seconds: float) -> bytes | None:
        """The next line; empty at the end of the pipe, None at the deadline."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            if not self._selector.select(max(0.0, deadline - time.monotonic())):
                return None
            chunk = self._pipe.read(1 << 20)
            if not chunk:
                return b""
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def close(self) -> None:
        self._selector.close()
        self._pipe.close()
