"""Measures what LoRA requests cost vLLM's scheduler: `.venv/bin/python bench/adapters.py [--tokens 131072] [--rounds 30]`.

The scheduler's side of the connector runs on its own, with the native session and no daemon: what is measured is
the time on the calling thread, to which an answer adds nothing. Medians and worst of the rounds, in microseconds,
with an adapter and without one. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from forebay import EngineSession
from forebay.vllm.adapters import Adapters
from forebay.vllm.guard import Breaker
from forebay.vllm.lookup import Lookup
from forebay.vllm.manager import ForebayManager
from forebay.vllm.settings import Settings
from forebay.vllm.stores import Shape
from vllm.config import LoRAConfig
from vllm.lora.request import LoRARequest

BLOCK_TOKENS = 16
QUEUE = 64


def new_manager(session: EngineSession) -> ForebayManager:
    settings, _ = Settings.parse({})
    manager = ForebayManager(settings, workers=1)
    adapters = Adapters(LoRAConfig(), can_hear=True)
    no_identity: Any = None
    manager.open(session, [Shape(0, True, BLOCK_TOKENS, 1, False)], no_identity, adapters, 64, Breaker())
    return manager


def requests(hashes: list[bytes], adapter: LoRARequest | None, count: int, name: str) -> list[Any]:
    return [
        SimpleNamespace(request_id=f"{name}-{at}", lora_request=adapter, block_hashes=hashes, num_tokens=len(hashes))
        for at in range(count)
    ]


def microseconds(call: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    call()
    return (time.perf_counter() - begun) * 1e6


def summary(taken: list[float]) -> dict[str, float]:
    return {"median_us": round(statistics.median(taken), 1), "worst_us": round(max(taken), 1)}


def save(directory: Path, size: int, seed: int) -> None:
    directory.mkdir()
    (directory / "adapter_config.json").write_text('{"r": 16}')
    (directory / "adapter_model.safetensors").write_bytes(random.Random(seed).randbytes(size))


def measure(session: EngineSession, hashes: list[bytes], rounds: int, adapter_bytes: int) -> dict[str, Any]:
    rows: dict[str, dict[str, list[float]]] = {}
    manager = new_manager(session)
    with tempfile.TemporaryDirectory(prefix="forebay-bench-") as directory:
        for at in range(rounds + 1):
            save(Path(directory) / str(at), adapter_bytes, at)
        time.sleep(0.1)  # the files shall be older than the requests
        known = LoRARequest("known", 1, f"{directory}/0")
        manager.new_request(requests(hashes, known, 1, "first")[0])
        while manager._requests["first-0"].adapter.mask is None:  # type: ignore[union-attr]
            time.sleep(0.001)
        mask = manager._requests["first-0"].adapter.mask  # type: ignore[union-attr]
        for at in range(rounds):
            for name, adapter, one_mask in (("plain", None, None), ("adapted", known, mask)):
                row = rows.setdefault(name, {})

                def took(what: str, call: Callable[[], Any], row: dict[str, list[float]] = row) -> None:
                    row.setdefault(what, []).append(microseconds(call))

                [request] = requests(hashes, adapter, 1, f"{name}-{at}")
                took("on_new_request", lambda request=request: manager.new_request(request))
                groups: list[tuple[int, list[bytes]]] = [(0, hashes)]
                lookup: list[Lookup] = []
                took("lookup", lambda m=one_mask, g=groups, k=lookup: k.append(Lookup(session, g, m, 1.0)))
                keys = [hash_ + bytes(4) for hash_ in hashes]
                took("answers", lambda k=lookup[0], keys=keys: [k.result(key) for key in keys])
                queue = new_manager(session)
                for waiting in requests(hashes, adapter, QUEUE, name):
                    queue.new_request(waiting)
                for asked in queue._requests.values():
                    asked.adapter = manager._requests["first-0"].adapter if adapter else None
                took("tell_who_waits", queue._tell_who_waits)
                queue.shutdown()
            unknown = LoRARequest(f"unknown-{at}", at + 2, f"{directory}/{at + 1}")
            [request] = requests(hashes, unknown, 1, f"unknown-{at}")
            row = rows.setdefault("unknown adapter", {})
            row.setdefault("on_new_request", []).append(microseconds(lambda r=request: manager.new_request(r)))
            while manager._requests[f"unknown-{at}-0"].adapter.mask is None:  # type: ignore[union-attr]
                time.sleep(0.001)
    return {name: {what: summary(taken) for what, taken in row.items()} for name, row in rows.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--adapter-bytes", type=int, default=20 << 20)
    arguments = parser.parse_args()
    hashes = [os.urandom(32) for _ in range(arguments.tokens // BLOCK_TOKENS)]
    session = EngineSession("/nowhere", "bench", 1)
    measured = measure(session, hashes, arguments.rounds, arguments.adapter_bytes)
    machine = {"cpus": os.cpu_count(), "python": platform.python_version(), "machine": platform.machine()}
    print(json.dumps({"op": "adapters", **vars(arguments), "machine": machine, "measured": measured}, indent=1))


if __name__ == "__main__":
    main()
