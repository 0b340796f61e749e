"""Measures how soon an engine is ready beside a large pool, or beside many blocks on a disk.

`.venv/bin/python bench/engine_start.py [--gib 1,4,8,16] [--rounds 5] [--disk-blocks 0,1000000]`, with
PYTHONPATH=tests:tests/python and a built `forebay`.

Each engine is a process of its own: it imports `forebay`, opens an `EngineSession` and a `WorkerEngine` on CPU memory,
and waits until both are ready; then it looks up one key. No model is loaded. All times are from the start of that
process. "whole" pools are populated when the engine starts; in "filling" pools the daemon was started a moment before.
Prints one JSON object a line: the medians, and all rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import forebay
from rig.daemon import Daemon
from rig.process import wait_until

GIB = 1 << 30
DEADLINE = 600.0
# Small blocks, as those of models with few layers: a million of them fit a file of some GB.
BLOCK_BYTES = 4096
PUT_BLOCKS = 256

# The measured process. The clock of both processes is the system's.
ENGINE = """
import json, os, sys, time
from pathlib import Path

sockets, begun, deadline = Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])

def passed():
    return time.monotonic() - begun

started = passed()
from harness import Engine, hashes

imported = passed()
with Engine(sockets, engine_id=f"start-{os.getpid()}", deadline=deadline) as engine:
    engine.wait_ready()
    ready = passed()
    engine.look_up(hashes("first", 1))
    looked_up = passed()
print(json.dumps({"python_s": started, "imported_s": imported, "ready_s": ready, "looked_up_s": looked_up}))
"""


def start_engine(daemon: Daemon) -> dict[str, float]:
    command = [sys.executable, "-c", ENGINE, str(daemon.socket.parent), str(time.monotonic()), str(DEADLINE)]
    answer = subprocess.run(command, check=True, capture_output=True, timeout=DEADLINE)
    times: dict[str, float] = json.loads(answer.stdout.splitlines()[-1])
    # What Forebay adds: Python and its imports do not depend on the pool.
    return times | {"engine_s": times["ready_s"] - times["imported_s"]}


def listening(daemon: Daemon) -> None:
    """Started, and asked for nothing but its state."""
    daemon.launch()
    wait_until("the daemon answers", lambda: daemon.status("/livez") == 200, DEADLINE)


def populated_bytes(daemon: Daemon) -> int:
    return int(daemon.metrics()["forebay_pool_populated_bytes"])


def beside_a_pool(gib: int, rounds: int) -> None:
    whole: list[dict[str, float]] = []
    filling: list[dict[str, float]] = []
    for _ in range(rounds):
        # A new pool each time, or there would be nothing to populate.
        with Daemon(capacity_bytes=gib * GIB) as daemon:
            listening(daemon)
            before = populated_bytes(daemon)
            filling.append(start_engine(daemon) | {"populated_before": before / (gib * GIB)})
            wait_until("the pool is whole", lambda: populated_bytes(daemon) == gib * GIB, DEADLINE)
            whole.append(start_engine(daemon))
    tell(f"{gib} GiB, whole", whole)
    tell(f"{gib} GiB, filling", filling)


def beside_a_disk(blocks: int, rounds: int) -> None:
    serving: list[dict[str, float]] = []
    opening: list[dict[str, float]] = []
    with Daemon(capacity_bytes=GIB, ssd_bytes=max(GIB, 3 * blocks * BLOCK_BYTES), ssd_admission="all") as daemon:
        daemon.start()
        fill(daemon, blocks)
        for _ in range(rounds):
            daemon.kill()
            listening(daemon)
            state = disk(daemon)["state"]
            opening.append(start_engine(daemon) | {"was_opening": float(state == "opening")})
            wait_until("the disk serves", lambda: disk(daemon)["state"] == "serving", DEADLINE)
            found = disk(daemon)["blocks"]
            assert found >= blocks, f"{found} of {blocks} blocks are on the disk"
            serving.append(start_engine(daemon))
    tell(f"{blocks} blocks on a disk, serving", serving)
    tell(f"{blocks} blocks on a disk, at the daemon's start", opening)


def disk(daemon: Daemon) -> dict[str, Any]:
    [tier] = daemon.inspect()["tiers"]
    return dict(tier)


def fill(daemon: Daemon, blocks: int) -> None:
    """Writes prompts of `PUT_BLOCKS` until so many blocks are on the disk; those that found its queue full are few."""
    client = forebay.Client(str(daemon.socket.parent))
    namespace = client.open_namespace({"model": "engine start"}, {0: BLOCK_BYTES})
    stored = 0
    while disk(daemon)["blocks"] < blocks:
        for _ in range(64):
            prompt = [((stored + at).to_bytes(8, "little") * 4, os.urandom(BLOCK_BYTES)) for at in range(PUT_BLOCKS)]
            client.put(namespace, 0, prompt)
            stored += PUT_BLOCKS
        wait_until("the queue is empty", lambda: disk(daemon)["waiting_blocks"] == 0, DEADLINE)


def tell(what: str, rows: list[dict[str, float]]) -> None:
    median = {name: round(statistics.median(row[name] for row in rows), 4) for name in rows[0]}
    machine = f"{os.cpu_count()} cores, Linux {os.uname().release}"
    print(json.dumps({"what": what, "machine": machine, "median": median, "rows": rows}), flush=True)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=numbers, default=[1, 4, 8, 16], help="sizes of pools")
    parser.add_argument("--disk-blocks", type=numbers, default=[0, 1_000_000])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    measures: list[tuple[Callable[[int, int], None], list[int]]] = [
        (beside_a_pool, options.gib),
        (beside_a_disk, options.disk_blocks),
    ]
    for measure, sizes in measures:
        for size in sizes:
            measure(size, options.rounds)


if __name__ == "__main__":
    main()
