"""Sends a workload's phases to the endpoints, and notes what came back.

Holds true: each request goes to every endpoint in the same order of requests; requests that are sent together (a wave)
go to one endpoint at a time, and the endpoints take turns in being first. So a machine that grows slower or faster
meanwhile does so for both. The first request that fails ends the comparison.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from forebay.compare.endpoint import Endpoint, Model, Reply, completion
from forebay.compare.workload import Part, Phase, Request, longest

# Warm-ups as long as the longest request: kernels are built and memory is touched by the first ones.
WARM_UPS = 2
# A new namespace is ready when the weights have been read, at 1 to 2 GB/s.
READY_SECONDS = 120.0
READY_POLL_SECONDS = 0.5
# Shorter than any block, so that it neither stores nor hits.
SETTLE = Request("settle", (Part("settle", 8),), max_tokens=4)

IS_READY = "forebay:is_ready"

Say = Callable[[str], None]


@dataclass(frozen=True)
class Side:
    """One endpoint, and what it said of itself."""

    endpoint: Endpoint
    model: Model
    has_forebay: bool | None  # None: its metrics page cannot be read
    is_ready: bool
    cache_tokens: int | None  # what the engine's own cache keeps

    @property
    def name(self) -> str:
        return self.endpoint.name


@dataclass(frozen=True)
class Sample:
    """One request at one endpoint."""

    side: str
    group: str
    request: str
    prompt_tokens: int
    hit_tokens: int | None
    output_tokens: int | None
    ttft_ms: float
    total_ms: float
    text: str


@dataclass(frozen=True)
class PageHits:
    """What the metrics page counted during a phase, for everybody who asked."""

    engine_tokens: int  # from the engine's own cache
    loaded_tokens: int  # from its connector


@dataclass(frozen=True)
class Run:
    """A phase at one endpoint."""

    side: str
    phase: Phase
    samples: tuple[Sample, ...]
    busy_seconds: float  # from each wave's first request to its last answer
    page: PageHits | None


@dataclass
class _Tally:
    """A phase at one endpoint while it runs."""

    side: Side
    samples: list[Sample]
    busy_seconds: float
    before: Mapping[str, float]

    def finish(self, phase: Phase, page: Mapping[str, float]) -> Run:
        return Run(self.side.name, phase, tuple(self.samples), self.busy_seconds, _hits(self.before, page))


def warm_up(endpoint: Endpoint, model: Model, phases: Sequence[Phase], concurrency: int, say: Say) -> Side:
    """Makes the endpoint ready to be measured; learns what its metrics page says."""
    tokens = longest(phases).tokens
    count = max(WARM_UPS, concurrency)
    requests = [Request(f"warm-up {n}", (Part(f"warm-up {n}", tokens),), max_tokens=4) for n in range(count)]
    say(f"warming up {endpoint.name}")
    seed = time.time_ns()  # another one each time, so that they are computed
    for wave in _waves(requests, concurrency):
        _send(endpoint, model, wave, seed)
    page = _wait_for_forebay(endpoint, model, say)
    has_forebay = IS_READY in page if page else None
    return Side(endpoint, model, has_forebay, page.get(IS_READY, 0.0) > 0, _cache_tokens(page))


def run(sides: Sequence[Side], phases: Sequence[Phase], seed: int, concurrency: int, say: Say) -> list[Run]:
    """All phases, one after another."""
    runs: list[Run] = []
    for number, phase in enumerate(phases, start=1):
        say(f"phase {number} of {len(phases)}: {_describe(phase)}")
        runs += _run_phase(sides, phase, seed, concurrency)
    return runs


def _run_phase(sides: Sequence[Side], phase: Phase, seed: int, concurrency: int) -> list[Run]:
    tallies = [_Tally(side, [], 0.0, side.endpoint.metrics()) for side in sides]
    for number, wave in enumerate(_waves(phase.requests, concurrency)):
        for tally in tallies if number % 2 == 0 else reversed(tallies):
            start = time.perf_counter()
            replies = _send(tally.side.endpoint, tally.side.model, wave, seed)
            tally.busy_seconds += time.perf_counter() - start
            tally.samples += [_sample(tally.side, phase, *pair) for pair in zip(wave, replies, strict=True)]
    for tally in tallies:
        # vLLM hands the last stores to its workers in a later step, and counts in one.
        _send(tally.side.endpoint, tally.side.model, [SETTLE], seed)
    return [tally.finish(phase, tally.side.endpoint.metrics()) for tally in tallies]


def _send(endpoint: Endpoint, model: Model, wave: Sequence[Request], seed: int) -> list[Reply]:
    """Sends the requests together; waits for all."""
    # Made before any is sent: making one would slow the clock of another.
    bodies = [completion(model.name, request.prompt(seed), request.max_tokens) for request in wave]
    if len(bodies) == 1:
        return [endpoint.complete(bodies[0])]
    with ThreadPoolExecutor(len(bodies)) as threads:
        return list(threads.map(endpoint.complete, bodies))


def _sample(side: Side, phase: Phase, request: Request, reply: Reply) -> Sample:
    usage = reply.usage
    prompt_tokens = request.tokens if usage.prompt_tokens is None else usage.prompt_tokens
    return Sample(
        side=side.name,
        group=phase.group,
        request=request.id,
        prompt_tokens=prompt_tokens,
        hit_tokens=None if usage.hit_tokens is None else min(usage.hit_tokens, most_hits(prompt_tokens)),
        output_tokens=usage.output_tokens,
        ttft_ms=reply.ttft_ms,
        total_ms=reply.total_ms,
        text=reply.text,
    )


def most_hits(prompt_tokens: int) -> int:
    """An engine computes the last token of each prompt, also if all of it was found and it says so."""
    return max(0, prompt_tokens - 1)


def _wait_for_forebay(endpoint: Endpoint, model: Model, say: Say) -> Mapping[str, float]:
    """Until its session is ready, if it has one: before, it neither stores nor loads. The last metrics page."""
    deadline = time.monotonic() + READY_SECONDS
    while (page := endpoint.metrics()).get(IS_READY) == 0 and time.monotonic() < deadline:
        say(f"waiting until Forebay is ready in {endpoint.name}")
        time.sleep(READY_POLL_SECONDS)
        # The page shows the state at the engine's last step.
        _send(endpoint, model, [SETTLE], seed=0)
    return page


def _hits(before: Mapping[str, float], after: Mapping[str, float]) -> PageHits | None:
    engine, loaded = "vllm:prefix_cache_hits_total", "vllm:external_prefix_cache_hits_total"
    if engine not in before or engine not in after:
        return None
    return PageHits(
        int(after[engine] - before[engine]),
        int(after.get(loaded, 0.0) - before.get(loaded, 0.0)),
    )


def _cache_tokens(page: Mapping[str, float]) -> int | None:
    """What the cache of one engine keeps, from the labels of vLLM's `cache_config_info`."""
    for name in page:
        if name.startswith("vllm:cache_config_info{"):
            labels = dict(re.findall(r'(\w+)="([^"]*)"', name))
            counts = [labels.get("num_gpu_blocks", ""), labels.get("block_size", "")]
            if all(count.isdecimal() for count in counts):
                return int(counts[0]) * int(counts[1])
    return None


def _waves(requests: Sequence[Request], size: int) -> Iterator[Sequence[Request]]:
    return (requests[at : at + size] for at in range(0, len(requests), size))


def _describe(phase: Phase) -> str:
    where = f"{phase.point.order}, {phase.point.documents} documents, " if phase.point else ""
    return f"{where}{phase.group}, {len(phase.requests)} requests"
