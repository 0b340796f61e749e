"""Time to first token by where the prompt's KV is: computed, in the pool, or on each lower tier, over the input's length
and the number of requests at once.

`python bench/ttft_by_tier.py [--lengths N,N,...] [--concurrency N,N,...] [--repeats N] [--json FILE] [--plot FILE.svg]`, with
PYTHONPATH=python:tests, a built `forebay` and the servers of `make servers`.

For each tier an engine computes prompts of each length ("computed"). When all is written, the engine forgets its own
cache, and, for a lower tier, the daemon is killed and its pool removed. Then the same prompts are asked in another order:
what is not a hit fails the run. Each round has prompts of all lengths, so that drift of the machine meets all of them.
Requests at once are of one length; each has prompts of its own.
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
# By where the KV was, how long the prompt is and how many were asked at once: TTFT of each request in ms.
Times = dict[tuple[str, int, int], list[float]]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lengths", default="512,1024,2048,4096,8064", help="tokens of a prompt")
    parser.add_argument("--concurrency", default="1", help="requests at once")
    parser.add_argument("--tiers", default=",".join(TIERS), help="of these")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    lengths, at_once = ([int(part) for part in each.split(",")] for each in (options.lengths, options.concurrency))
    times: Times = {}
    for tier in options.tiers.split(","):
        for where, length, concurrency, ttft_ms in measure(tier, lengths, at_once, options.repeats):
            times.setdefault((where, length, concurrency), []).append(ttft_ms)
    for concurrency in at_once:
        show(times, lengths, concurrency)
    if options.json:
        raw = [
            {"where": where, "tokens": tokens, "concurrency": concurrency, "ttft_ms": ms}
            for (where, tokens, concurrency), ms in times.items()
        ]
        options.json.write_text(json.dumps(raw, indent=1) + "\n")
    if options.plot:
        options.plot.write_text(plot(times, lengths, at_once))
    return 0


def measure(
    tier: str, lengths: Sequence[int], at_once: Sequence[int], repeats: int
) -> Iterator[tuple[str, int, int, float]]:
    """Where the KV was, the prompt's length, how many were asked at once, and the time."""
    waves = [
        [request(f"{tier} {number} {concurrency} {each}", length) for each in range(concurrency)]
        for number in range(repeats)
        for length in lengths
        for concurrency in at_once
    ]
    with store(tier) as shared, daemon_of(tier, shared) as daemon, tempfile.TemporaryDirectory() as directory:
        connector = daemon.start().patient_connector()
        with Engine(CONFIG, Path(directory), connector=connector, name=tier) as engine:
            join(daemon, engine)
            warm_up(engine, lengths)
            for concurrency, answer in ask(engine, waves):
                assert answer.hit_tokens == 0
                yield "computed", answer.prompt_tokens, concurrency, answer.ttft_ms
            settle(engine)
            if tier != "pool":
                lose_pool(daemon, engine)
            engine.reset_prefix_cache()
            warm_up(engine, lengths)
            engine.reset_prefix_cache()
            for concurrency, answer in ask(engine, random.Random(tier).sample(waves, len(waves))):
                assert answer.hit_tokens >= answer.prompt_tokens - CONFIG.block_size, (
                    f"{tier}: {answer.hit_tokens} hits"
                )
                yield tier, answer.prompt_tokens, concurrency, answer.ttft_ms


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


def ask(engine: Engine, waves: Sequence[Sequence[Request]]) -> Iterator[tuple[int, Answer]]:
    """One wave at a time."""
    for wave in waves:
        yield from ((len(wave), answer) for answer in engine.generate(wave))


def request(name: str, tokens: int) -> Request:
    chosen = random.Random(f"{name} {tokens}")
    return Request(
        f"{name} {tokens}", tuple(chosen.choices(range(models.FIRST_PLAIN_TOKEN, models.VOCABULARY), k=tokens))
    )


def show(times: Times, lengths: Sequence[int], concurrency: int) -> None:
    places = list(dict.fromkeys(where for where, _, _ in times))
    print(f"\n{concurrency} at once: median TTFT in ms (least to largest)\n")
    print("| input tokens | " + " | ".join(places) + " |")
    print("|---" * (1 + len(places)) + "|")
    for length in lengths:
        cells = [times[where, length, concurrency] for where in places]
        texts = [f"{statistics.median(ms):.1f} ({min(ms):.1f} to {max(ms):.1f})" for ms in cells]
        print(f"| {length:,} | " + " | ".join(texts) + " |")


def plot(times: Times, lengths: Sequence[int], at_once: Sequence[int]) -> str:
    """A row for each number of requests at once: all times, and those of loads alone."""
    return chart.draw("time to first token by tier", [_panels(times, lengths, concurrency) for concurrency in at_once])


def _panels(times: Times, lengths: Sequence[int], concurrency: int) -> list[chart.Panel]:
    places = list(dict.fromkeys(where for where, _, _ in times))
    lines = tuple(
        chart.Line(
            where,
            style,
            tuple((length, statistics.median(times[where, length, concurrency])) for length in lengths),
        )
        for style, where in enumerate(places)
    )
    highest = max(y for line in lines for _, y in line.points)
    x, y = chart.Axis("input tokens", max(lengths)), chart.Axis("median TTFT, ms", highest)
    lower = tuple(line for line in lines if line.label != "computed")
    near = chart.Axis("median TTFT, ms", max(y for line in lower for _, y in line.points))
    together = f"{concurrency} at once"
    return [
        chart.Panel(f"computed and loaded, {together}", x, y, lines),
        chart.Panel(f"loaded, {together}", x, near, lower),
    ]


if __name__ == "__main__":
    sys.exit(main())
