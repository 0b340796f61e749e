"""Measures what Forebay costs an engine that finds nothing to reuse: `.venv/bin/python bench/no_reuse.py [--pairs 40]`.

Two real vLLM engines on CPU, one without and one with Forebay, get the same prompts, each prompt once, in turn and in
alternating order. Every block is looked up in vain and stored. Reports the ratio of times, with over without, pair by
pair; 1.0 is no cost. Prints one JSON object.
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
import time
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import forebay
from rig import models
from rig.daemon import Daemon
from rig.engine import Engine, EngineConfig, Request
from rig.models import FIRST_PLAIN_TOKEN, VOCABULARY
from rig.scenario import external_hits, join


def wave(number: int, prompts: int, prompt_tokens: int, max_tokens: int) -> list[Request]:
    chosen = random.Random(f"no reuse {number}")
    tokens = [
        tuple(chosen.randrange(FIRST_PLAIN_TOKEN, VOCABULARY) for _ in range(prompt_tokens)) for _ in range(prompts)
    ]
    return [Request(f"wave-{number}-{at}", prompt, max_tokens) for at, prompt in enumerate(tokens)]


def seconds(engine: Engine, requests: list[Request]) -> tuple[float, list[tuple[int, ...]]]:
    begun = time.perf_counter()
    answers = engine.generate(requests)
    return time.perf_counter() - begun, [tuple(answer.tokens) for answer in answers]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=1500)
    parser.add_argument("--max-tokens", type=int, default=32)
    arguments = parser.parse_args()
    config = EngineConfig(models.LLAMA)
    rows = []
    with ExitStack() as stack:
        run_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="forebay-bench-")))
        daemon = stack.enter_context(Daemon(capacity_bytes=512 << 20)).start()
        without = stack.enter_context(Engine(config, run_dir, name="without"))
        with_it = stack.enter_context(Engine(config, run_dir, connector=daemon.connector(), name="with"))
        join(daemon, with_it)
        without.ready()
        for pair in range(-3, arguments.pairs):
            requests = wave(pair, arguments.prompts, arguments.prompt_tokens, arguments.max_tokens)
            order = [without, with_it] if pair % 2 else [with_it, without]
            took = {}
            tokens = {}
            for engine in order:
                took[engine.name], tokens[engine.name] = seconds(engine, requests)
            if tokens["with"] != tokens["without"]:
                sys.exit("error: the engines' tokens differ")
            if pair >= 0:  # the first ones warm both engines up
                rows.append(
                    {"without_s": took["without"], "with_s": took["with"], "ratio": took["with"] / took["without"]}
                )
        hits = external_hits(with_it)
        metrics = daemon.metrics()
    ratios = sorted(row["ratio"] for row in rows)
    print(
        json.dumps(
            {
                "bench": "no_reuse",
                "version": forebay.__version__,
                "command": " ".join(sys.argv),
                "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.release()}",
                "median_ratio": statistics.median(ratios),
                "quartiles": statistics.quantiles(ratios, n=4),
                "external_hit_tokens": hits,
                "stored_blocks": metrics["forebay_stored_blocks_total"],
                "rows": rows,
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
