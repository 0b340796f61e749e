"""Measures what Forebay costs an engine that finds nothing to reuse: `.venv/bin/python bench/no_reuse.py [--pairs 40]`.

One real vLLM engine on CPU gets waves of prompts, each prompt once. For every second wave the connector is taken out of
its scheduler and worker, in alternating order: two processes of one program differ by more than what is to be
measured. With the connector, every block is looked up in vain and stored. Reports pair by pair the ratio, with over
without, of the engine's processor time (all its threads, until stores are over) and of the time to the last answer;
1.0 is no cost. `step` is a whole step of the engine, `schedule` the scheduler's part, `connector` Forebay's part of it.
A copy runs beside the next step, so the processor time says more than the time on a machine with few cores.

Then looks up 1,024 unknown keys a call, 200 times a second, beside an idle and a busy engine. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import forebay
from rig import models
from rig.daemon import Daemon
from rig.engine import Engine, EngineConfig, Request
from rig.models import FIRST_PLAIN_TOKEN, VOCABULARY
from rig.scenario import external_hits, join

LOOKUP_KEYS, LOOKUP_PAUSE = 1024, 0.005
SETTLING_STEPS, SETTLING_PAUSE = 2, 0.1  # after the last answer, with and without the connector
STORES_SECONDS = 60


@dataclass(frozen=True)
class Shape:
    """A wave: so many requests at once, of so many tokens."""

    requests: int
    prompt_tokens: int
    max_tokens: int

    def wave(self, number: int) -> list[Request]:
        chosen = random.Random(f"no reuse {self} {number}")
        prompts = [
            tuple(chosen.randrange(FIRST_PLAIN_TOKEN, VOCABULARY) for _ in range(self.prompt_tokens))
            for _ in range(self.requests)
        ]
        return [Request(f"{self.requests}-{number}-{at}", prompt, self.max_tokens) for at, prompt in enumerate(prompts)]


SHAPES = [Shape(1, 2000, 64), Shape(16, 500, 32), Shape(256, 96, 12)]


def spent(pid: int) -> float:
    """Seconds of processor time of all threads of the process."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


@dataclass(frozen=True)
class Row:
    """One wave."""

    cpu_s: float
    took_s: float
    times: dict[str, tuple[float, float]]  # p50 and p99 in milliseconds, by name


def run(engine: Engine, requests: Sequence[Request], *, is_on: bool) -> Row:
    engine.connect(is_on=is_on)
    engine.durations()
    pid = engine.ready().pids[0]
    cpu, begun = spent(pid), time.perf_counter()
    engine.generate(requests)
    took = time.perf_counter() - begun
    for at in range(SETTLING_STEPS):
        settle(engine, f"settle-{requests[0].id}-{at}")
    cpu = spent(pid) - cpu
    deadline = time.monotonic() + STORES_SECONDS
    while is_on and engine.stores_under_way():
        if time.monotonic() > deadline:
            sys.exit(f"error: stores were not over {STORES_SECONDS} s after the last answer")
        settle(engine, f"wait-{requests[0].id}-{time.monotonic()}")
    durations = engine.durations()
    names = {"step": "step", "schedule": "schedule", "connector": "connector in a step"}
    times = {name: (seen.p50_ms, seen.p99_ms) for name, key in names.items() if (seen := durations.get(key))}
    return Row(cpu, took, times)


def settle(engine: Engine, name: str) -> None:
    """A request shorter than a block: with its steps the connector commits what was copied meanwhile."""
    time.sleep(SETTLING_PAUSE)
    engine.generate([Request(name, (FIRST_PLAIN_TOKEN,) * 4, 1)])


def measure(engine: Engine, shape: Shape, pairs: int) -> dict[str, Any]:
    without: list[Row] = []
    with_it: list[Row] = []
    for pair in range(-2, pairs):
        order = (False, True) if pair % 2 else (True, False)
        both = {is_on: run(engine, shape.wave(2 * pair + is_on), is_on=is_on) for is_on in order}
        if pair >= 0:  # the first ones warm the engine up
            without.append(both[False])
            with_it.append(both[True])
    return {
        "requests": shape.requests,
        "prompt_tokens": shape.prompt_tokens,
        "max_tokens": shape.max_tokens,
        "cpu": ratios([row.cpu_s for row in with_it], [row.cpu_s for row in without]),
        "time": ratios([row.took_s for row in with_it], [row.took_s for row in without]),
        "ms_with": middle(with_it),
        "ms_without": middle(without),
        "rows": [[a.cpu_s, b.cpu_s, a.took_s, b.took_s] for a, b in zip(with_it, without, strict=True)],
    }


def ratios(over: Sequence[float], under: Sequence[float]) -> dict[str, Any]:
    """Median and quartiles of the pairs' ratios, and the interval in which the median lies with 95 % (bootstrap)."""
    pairs = [a / b for a, b in zip(over, under, strict=True)]
    chosen = random.Random(0)
    again = sorted(statistics.median(chosen.choices(pairs, k=len(pairs))) for _ in range(2000))
    return {
        "median": statistics.median(pairs),
        "quartiles": statistics.quantiles(pairs, n=4),
        "median_95": [again[50], again[-51]],
    }


def middle(rows: Sequence[Row]) -> dict[str, list[float]]:
    """Of each name's p50 and p99, the median over the waves."""
    return {name: [statistics.median(row.times[name][at] for row in rows) for at in (0, 1)] for name in rows[0].times}


class Asker:
    """Looks unknown keys up at a steady pace, in a thread."""

    def __init__(self, daemon: Daemon):
        self._client = forebay.Client(str(daemon.socket.parent))
        self._space = self._client.open_namespace({"model": "no reuse"}, {0: 4096})

    def beside(self, seconds: float) -> dict[str, float]:
        taken = []
        chosen = random.Random(1)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            keys = [chosen.randbytes(32) for _ in range(LOOKUP_KEYS)]
            begun = time.perf_counter()
            self._client.lookup(self._space, 0, keys)
            taken.append((time.perf_counter() - begun) * 1e3)
            time.sleep(LOOKUP_PAUSE)
        taken.sort()
        return {"calls": len(taken), "p50_ms": taken[len(taken) // 2], "p99_ms": taken[int(len(taken) * 0.99)]}


def lookups(daemon: Daemon, engine: Engine, seconds: float) -> dict[str, Any]:
    asker = Asker(daemon)
    asker.beside(0.5)
    idle = asker.beside(seconds)
    over = threading.Event()

    def keep_busy() -> None:
        number = 1000
        while not over.is_set():
            engine.generate(SHAPES[1].wave(number))
            number += 1

    engine.connect(is_on=True)
    busy = threading.Thread(target=keep_busy)
    busy.start()
    beside = asker.beside(seconds)
    over.set()
    busy.join()
    return {"engine idle": idle, "engine busy": beside}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--lookup-seconds", type=float, default=10)
    arguments = parser.parse_args()
    config = EngineConfig(models.LLAMA, max_requests=256)
    with ExitStack() as stack:
        run_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="forebay-bench-")))
        daemon = stack.enter_context(Daemon(capacity_bytes=512 << 20)).start()
        engine = stack.enter_context(Engine(config, run_dir, connector=daemon.connector()))
        join(daemon, engine)
        shapes = [measure(engine, shape, arguments.pairs) for shape in SHAPES]
        hits, stored = external_hits(engine), daemon.metrics()["forebay_stored_blocks_total"]
        beside = lookups(daemon, engine, arguments.lookup_seconds)
    print(
        json.dumps(
            {
                "bench": "no_reuse",
                "version": forebay.__version__,
                "command": " ".join(sys.argv),
                "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.release()}",
                "external_hit_tokens": hits,
                "stored_blocks": stored,
                "shapes": shapes,
                "lookups": beside,
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
