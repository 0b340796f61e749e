"""The capacity cliff with the real vLLM on this machine's CPU: documents asked in rounds, under each policy of the pool.

`python bench/documents.py [--policies lru,default] [--rounds N] [--pool-documents N] [--json FILE] [--plot FILE.svg]`, with
PYTHONPATH=python:tests and a built `forebay`. For each policy a daemon with an empty pool, a vLLM server whose own cache
holds two documents, and the requests of `forebay-compare --workload documents`, the same ones each time. The capacity is the
pool's bytes, in tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from forebay.compare import chart, measure
from forebay.compare.endpoint import Endpoint, Url
from forebay.compare.measure import Run, Sample
from forebay.compare.workload import ORDERS, Documents
from rig import models
from rig.daemon import Daemon
from rig.engine import EngineConfig
from rig.server import Server

BLOCK = 64
BLOCK_BYTES = BLOCK * 4096  # four layers of keys and values of 128 floats
DOCUMENT = 512
SEED = 17
SETTLED = 5  # rounds after which the aim holds
CONFIG = EngineConfig(
    models.LLAMA,
    block_size=BLOCK,
    blocks=3 * (DOCUMENT + 2 * BLOCK) // BLOCK,
    max_model_len=1024,
    max_batched_tokens=1024,
)


@dataclass(frozen=True)
class Place:
    """One point of a curve."""

    policy: str
    order: str
    working_set: float
    optimum: float  # the pool's share of the documents' tokens
    hit_rates: tuple[float, ...]  # of each round after the first sight, of the documents' tokens
    ttft_ms: float  # mean of these rounds
    ttft_settled_ms: float  # from the sixth round on

    @property
    def hit_rate(self) -> float:
        return fmean(self.hit_rates)

    @property
    def settled(self) -> float:
        return fmean(self.hit_rates[SETTLED - 1 :])


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--policies", default="lru,default")
    parser.add_argument("--working-sets", default="0.9,1.1,1.5")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--pool-documents", type=int, default=16, help="documents that the pool has room for")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    workload = Documents(
        capacity_tokens=options.pool_documents * DOCUMENT,
        document_tokens=DOCUMENT,
        question_tokens=32,
        rounds=options.rounds,
        max_tokens=2,
        working_sets=tuple(float(part) for part in options.working_sets.split(",")),
    )
    print(workload.describe(), flush=True)
    places = [place for policy in options.policies.split(",") for place in ask(policy, workload)]
    print(table(places))
    if options.json:
        options.json.write_text(json.dumps([asdict(place) for place in places], indent=1) + "\n")
    if options.plot:
        options.plot.write_text(plot(places))
    return 0


def ask(policy: str, workload: Documents) -> list[Place]:
    pool_bytes = workload.capacity_tokens // BLOCK * BLOCK_BYTES
    with (
        tempfile.TemporaryDirectory() as directory,
        Daemon(pool_bytes, unit_bytes=2 << 20, pool={"policy": policy}) as daemon,
    ):
        connector = daemon.start().patient_connector(stock_blocks=DOCUMENT // BLOCK)
        with Server(CONFIG, Path(directory), connector, policy) as server:
            endpoint = Endpoint(policy, Url.parse(f"http://127.0.0.1:{server.ready().port}"), None, 120.0)
            phases = workload.phases()
            side = measure.warm_up(endpoint, endpoint.find_model(None), phases, 1, lambda _: None)
            assert side.is_ready, "the engine stores nothing"
            runs = measure.run([side], phases, SEED, 1, lambda what: print(f"{policy}: {what}", file=sys.stderr))
    return [place_of(policy, run, workload) for run in runs if run.phase.group in ORDERS]


def place_of(policy: str, run: Run, workload: Documents) -> Place:
    """Of a phase that asks all rounds after the first."""
    assert run.phase.point is not None
    size = run.phase.point.documents
    rounds = [run.samples[at : at + size] for at in range(0, len(run.samples), size)]
    working_set = run.phase.point.working_set
    return Place(
        policy,
        run.phase.point.order,
        working_set,
        min(1.0, 1 / working_set),
        tuple(hit_rate(samples, workload) for samples in rounds),
        fmean(sample.ttft_ms for sample in run.samples),
        fmean(sample.ttft_ms for samples in rounds[SETTLED - 1 :] for sample in samples),
    )


def hit_rate(samples: Sequence[Sample], workload: Documents) -> float:
    """Of the documents' tokens: the questions are new."""
    return sum(sample.hit_tokens or 0 for sample in samples) / (len(samples) * workload.document_tokens)


def table(places: Sequence[Place]) -> str:
    rows = [
        "| order | working set | policy | hit rate | of the optimum | from the sixth round | mean TTFT, ms | from the sixth |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for place in sorted(places, key=lambda place: (ORDERS.index(place.order), place.working_set)):
        share, settled = place.hit_rate / place.optimum, place.settled / place.optimum
        rows.append(
            f"| {place.order} | × {place.working_set:.2f} | {place.policy} | {place.hit_rate:.3f} | {share:.3f} | "
            f"{settled:.3f} | {place.ttft_ms:.1f} | {place.ttft_settled_ms:.1f} |"
        )
    return "\n".join(rows)


def plot(places: Sequence[Place]) -> str:
    widest, slowest = max(place.working_set for place in places), max(place.ttft_ms for place in places)
    x = chart.Axis("working set, multiple of the pool", widest)
    marker = (1.0, "pool")
    hits, times = [], []
    for order in ORDERS:
        here = [place for place in places if place.order == order]
        policies = list(dict.fromkeys(place.policy for place in here))
        optimum = chart.Line(
            "pool's share", 2, tuple((p.working_set, p.optimum) for p in here if p.policy == policies[0])
        )
        rates = [
            chart.Line(policy, style, tuple((p.working_set, p.hit_rate) for p in here if p.policy == policy))
            for style, policy in enumerate(policies)
        ]
        share = chart.Axis("hit rate of later rounds", 1.0, is_share=True)
        hits.append(chart.Panel(order, x, share, (*rates, optimum), marker))
        means = tuple(
            chart.Line(policy, style, tuple((p.working_set, p.ttft_ms) for p in here if p.policy == policy))
            for style, policy in enumerate(policies)
        )
        times.append(chart.Panel(order, x, chart.Axis("mean TTFT, ms", slowest), means, marker))
    return chart.draw("documents in rounds, by policy of the pool", [hits, times])


if __name__ == "__main__":
    sys.exit(main())
