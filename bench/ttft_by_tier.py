"""Time to first token by where the prompt's KV is: computed, in the pool, or on each lower tier, over the input's length.

`python bench/ttft_by_tier.py [--lengths N,N,...] [--repeats N] [--json FILE] [--plot FILE.svg]`, with PYTHONPATH=python:tests,
a built `forebay` and the servers of `make servers`.

For each tier an engine computes prompts of each length ("computed"). When all is written, the engine forgets its own
cache, and, for a lower tier, the daemon is killed and its pool removed. Then the same prompts are asked in another order:
what is not a hit fails the run. Each round has prompts of all lengths, so that drift of the machine meets all of them.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from forebay.compare import chart
from rig import models
from rig.daemon import Daemon
from rig.engine import Answer, Engine, EngineConfig, Request
from rig.process import wait_until
from rig.scenario import join
from rig.stores import Directory, Valkey
from rig.workload import settle

CONFIG = EngineConfig(
    models.LLAMA, block_size=128, max_model_len=10240, max_batched_tokens=8192, kv_cache_bytes=512 << 20
)
CAPACITY_BYTES = 512 << 20
TIERS = ("pool", "ssd", "redis", "fs")
# By where the KV was and how long the prompt is: TTFT of each request in ms.
Times = dict[tuple[str, int], list[float]]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lengths", default="512,1024,2048,4096,8064", help="tokens of a prompt")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    lengths = [int(length) for length in options.lengths.split(",")]
    times: Times = {}
    for tier in TIERS:
        for where, length, ttft_ms in measure(tier, lengths, options.repeats):
            times.setdefault((where, length), []).append(ttft_ms)
    show(times, lengths)
    if options.json:
        raw = [{"where": where, "tokens": tokens, "ttft_ms": ms} for (where, tokens), ms in times.items()]
        options.json.write_text(json.dumps(raw, indent=1) + "\n")
    if options.plot:
        options.plot.write_text(plot(times, lengths))
    return 0


def measure(tier: str, lengths: Sequence[int], repeats: int) -> Iterator[tuple[str, int, float]]:
    """Where the KV was, the prompt's length, and the time."""
    requests = [request(f"{tier} {number}", length) for number in range(repeats) for length in lengths]
    with store(tier) as shared, daemon_of(tier, shared) as daemon, tempfile.TemporaryDirectory() as directory:
        connector = daemon.start().patient_connector()
        with Engine(CONFIG, Path(directory), connector=connector, name=tier) as engine:
            join(daemon, engine)
            warm_up(engine, lengths)
            for answer in ask(engine, requests):
                assert answer.hit_tokens == 0
                yield "computed", answer.prompt_tokens, answer.ttft_ms
            settle(engine)
            if tier != "pool":
                lose_pool(daemon, engine)
            engine.reset_prefix_cache()
            warm_up(engine, lengths)
            engine.reset_prefix_cache()
            for answer in ask(engine, random.Random(tier).sample(requests, len(requests))):
                assert answer.hit_tokens >= answer.prompt_tokens - CONFIG.block_size, (
                    f"{tier}: {answer.hit_tokens} hits"
                )
                yield tier, answer.prompt_tokens, answer.ttft_ms


def store(tier: str) -> AbstractContextManager[Valkey | Directory | None]:
    if tier == "redis":
        return Valkey().start()
    return Directory().start() if tier == "fs" else nullcontext()


def daemon_of(tier: str, shared: Valkey | Directory | None) -> Daemon:
    tiers: Mapping[str, Mapping[str, Any]] = shared.sections if shared else {}
    return Daemon(
        CAPACITY_BYTES, ssd_bytes=2 * CAPACITY_BYTES if tier == "ssd" else None, ssd_admission="all", tiers=tiers
    )


def lose_pool(daemon: Daemon, engine: Engine) -> None:
    """When all is on the tier: the daemon is killed, and another begins with an empty pool."""

    def is_written() -> bool:
        seen = daemon.metrics()
        return seen["forebay_tier_stored_blocks_total"] >= seen["forebay_stored_blocks_total"] > 0

    wait_until("all is written to the tier", is_written, 120)
    daemon.kill()
    daemon.drop_pool()
    daemon.start()
    join(daemon, engine)


def warm_up(engine: Engine, lengths: Sequence[int]) -> None:
    """Kernels and buffers of the longest prompt."""
    engine.generate([Request("warm-up", tuple(range(16, 32)) * (max(lengths) // 16), max_tokens=1)])


def ask(engine: Engine, requests: Sequence[Request]) -> Iterator[Answer]:
    """One at a time."""
    for each in requests:
        yield from engine.generate([each])


def request(name: str, tokens: int) -> Request:
    chosen = random.Random(f"{name} {tokens}")
    return Request(
        f"{name} {tokens}", tuple(chosen.choices(range(models.FIRST_PLAIN_TOKEN, models.VOCABULARY), k=tokens))
    )


def show(times: Times, lengths: Sequence[int]) -> None:
    print("median TTFT in ms (least to largest)\n")
    print("| input tokens | " + " | ".join(("computed", *TIERS)) + " |")
    print("|---" * (2 + len(TIERS)) + "|")
    for length in lengths:
        cells = [times[where, length] for where in ("computed", *TIERS)]
        texts = [f"{statistics.median(ms):.1f} ({min(ms):.1f} to {max(ms):.1f})" for ms in cells]
        print(f"| {length:,} | " + " | ".join(texts) + " |")


def plot(times: Times, lengths: Sequence[int]) -> str:
    lines = tuple(
        chart.Line(where, style, tuple((length, statistics.median(times[where, length])) for length in lengths))
        for style, where in enumerate(("computed", *TIERS))
    )
    highest = max(y for line in lines for _, y in line.points)
    x, y = chart.Axis("input tokens", max(lengths)), chart.Axis("median TTFT, ms", highest)
    lower = tuple(line for line in lines if line.label != "computed")
    near = chart.Axis("median TTFT, ms", max(y for line in lower for _, y in line.points))
    panels = [chart.Panel("computed and loaded", x, y, lines), chart.Panel("loaded", x, near, lower)]
    return chart.draw("time to first token by tier", [panels])


if __name__ == "__main__":
    sys.exit(main())
