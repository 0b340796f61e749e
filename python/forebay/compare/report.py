"""What the comparison found: rows, savings, notes; as text and as JSON.

Holds true: a figure that an endpoint did not give is said to be unknown; text and JSON have the same facts.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from forebay.compare.measure import Run, Sample, Side, most_hits
from forebay.compare.workload import FIRST, Workload

ENDPOINT = "endpoint"
BASELINE = "baseline"
LATER = "later rounds"


@dataclass(frozen=True)
class Row:
    """All requests of one group at one endpoint."""

    group: str
    side: str
    requests: int
    ttft_mean_ms: float
    ttft_median_ms: float
    ttft_p90_ms: float
    ttft_p99_ms: float
    prompt_tokens_per_second: float
    prompt_tokens: int
    hit_tokens: int | None
    loaded_tokens: int | None  # of them through the engine's connector; from its metrics page

    @property
    def hit_ratio(self) -> float | None:
        return None if self.hit_tokens is None else self.hit_tokens / self.prompt_tokens


@dataclass(frozen=True)
class Saving:
    """A row beside the one that it is compared with, request by request."""

    group: str
    than: str
    # Ratio of the means: where half of the requests are hits, a median says all or nothing.
    times_sooner: float
    pairs: int  # requests that both rows have
    sooner: int  # of the pairs
    same_text: int  # of the pairs
    saved_tokens: int | None  # hits beyond those of the other row
    prompt_tokens: int


@dataclass(frozen=True)
class Place:
    """One point of the curve."""

    order: str
    documents: int
    working_set: float
    side: str
    rounds: str  # FIRST or LATER
    ttft_mean_ms: float
    hit_ratio: float | None


@dataclass(frozen=True)
class Report:
    workload: Workload
    seed: int
    concurrency: int
    sides: Sequence[Side]
    runs: Sequence[Run]

    def rows(self) -> list[Row]:
        groups = list(dict.fromkeys(run.phase.group for run in self.runs))
        return [summarize(group, side.name, self._of(group, side.name)) for group in groups for side in self.sides]

    def savings(self) -> list[Saving]:
        """Each group beside the baseline's, or, if there is one endpoint, beside its first sight."""
        return [saving for row in self.rows() if row.side == ENDPOINT for saving in self._savings(row)]

    def curve(self) -> list[Place]:
        """TTFT and hit rate of each working set, at each endpoint: of its first round and of the later ones."""
        return [
            Place(
                run.phase.point.order,
                run.phase.point.documents,
                run.phase.point.working_set,
                run.side,
                FIRST if run.phase.group == FIRST else LATER,
                row.ttft_mean_ms,
                row.hit_ratio,
            )
            for run in self.runs
            if run.phase.point is not None
            for row in [summarize(run.phase.group, run.side, [run])]
        ]

    def times(self, group: str, side: str) -> list[float]:
        """The time to first token of each request, in ms."""
        return [sample.ttft_ms for sample in self._samples(group, side)]

    def notes(self) -> list[str]:
        """What the figures do not say by themselves."""
        return [*(note for side in self.sides for note in self._notes(side)), *self._general_notes()]

    def _notes(self, side: Side) -> Iterator[str]:
        runs = [run for run in self.runs if run.side == side.name]
        if hit_tokens(runs) is None:
            yield f"hit tokens of the {side.name} are unknown: start vLLM with `--enable-prompt-tokens-details`"
        elif None in [sample.hit_tokens for run in runs for sample in run.samples]:
            yield f"hit tokens of the {side.name} are from its metrics page, which counts the requests of all clients"
        if runs[0].samples[0].hit_tokens:
            yield f"the {side.name} knew the first prompt already: another `--seed` gives a first sight"
        if side.name == ENDPOINT and side.has_forebay is False:
            yield "the endpoint's metrics page shows no Forebay: it may run without"
        if side.has_forebay and not side.is_ready:
            yield f"Forebay is not ready in the {side.name}: its log says why"
        if side.name == BASELINE and side.has_forebay:
            yield "the baseline runs Forebay too"

    def _general_notes(self) -> Iterator[str]:
        roots = [f"`{side.model.root}`" for side in self.sides]
        if len(roots) == 1:
            yield "one endpoint: the second sight came later, so the saving includes any change of the machine's speed"
        elif roots[0] != roots[1]:
            yield f"the endpoints serve different models: {roots[0]} and {roots[1]}"
        last, tokens = self.sides[-1], self.workload.distinct_tokens
        if last.cache_tokens is not None and tokens <= last.cache_tokens:
            yield (
                f"all {tokens:,} different tokens fit into the {last.name}'s own cache of {last.cache_tokens:,}: "
                "until it restarts, it has them without Forebay too"
            )

    def as_json(self) -> dict[str, Any]:
        return {
            "workload": type(self.workload).__name__.lower(),
            "settings": asdict(self.workload),
            "seed": self.seed,
            "concurrency": self.concurrency,
            "endpoints": [
                {"name": side.name, "url": str(side.endpoint.url), "model": side.model.name, "root": side.model.root}
                for side in self.sides
            ],
            "rows": [asdict(row) for row in self.rows()],
            "savings": [asdict(saving) for saving in self.savings()],
            "curve": [asdict(place) for place in self.curve()],
            "notes": self.notes(),
            "samples": [asdict(sample) for run in self.runs for sample in run.samples],
        }

    def _savings(self, row: Row) -> Iterator[Saving]:
        if len(self.sides) == 2:
            yield self._saving(row, (row.group, BASELINE))
        elif row.group != FIRST:
            yield self._saving(row, (FIRST, ENDPOINT))

    def _saving(self, row: Row, other: tuple[str, str]) -> Saving:
        without = summarize(*other, self._of(*other))
        theirs = {sample.request: sample for sample in self._samples(*other)}
        ours = self._samples(row.group, row.side)
        pairs = [(our, theirs[our.request]) for our in ours if our.request in theirs]
        # Questions that were not asked at first sight have nothing to be hits without it.
        hits_anyway = without.hit_tokens if pairs else 0
        is_known = row.hit_tokens is not None and hits_anyway is not None
        return Saving(
            group=row.group,
            than="with the baseline" if other[1] == BASELINE else "at first sight",
            times_sooner=without.ttft_mean_ms / row.ttft_mean_ms,
            pairs=len(pairs),
            sooner=sum(our.ttft_ms < their.ttft_ms for our, their in pairs),
            same_text=sum(our.text == their.text for our, their in pairs),
            saved_tokens=(row.hit_tokens or 0) - (hits_anyway or 0) if is_known else None,
            prompt_tokens=row.prompt_tokens,
        )

    def _samples(self, group: str, side: str) -> list[Sample]:
        return [sample for run in self._of(group, side) for sample in run.samples]

    def _of(self, group: str, side: str) -> list[Run]:
        return [run for run in self.runs if (run.phase.group, run.side) == (group, side)]


def summarize(group: str, side: str, runs: Sequence[Run]) -> Row:
    samples = [sample for run in runs for sample in run.samples]
    times = sorted(sample.ttft_ms for sample in samples)
    prompt_tokens = sum(sample.prompt_tokens for sample in samples)
    pages = [run.page for run in runs]
    loaded = None if None in pages else sum(page.loaded_tokens for page in pages if page)
    return Row(
        group=group,
        side=side,
        requests=len(samples),
        ttft_mean_ms=statistics.fmean(times),
        ttft_median_ms=statistics.median(times),
        ttft_p90_ms=percentile(times, 0.90),
        ttft_p99_ms=percentile(times, 0.99),
        prompt_tokens_per_second=prompt_tokens / sum(run.busy_seconds for run in runs),
        prompt_tokens=prompt_tokens,
        hit_tokens=hit_tokens(runs),
        loaded_tokens=loaded,
    )


def hit_tokens(runs: Sequence[Run]) -> int | None:
    """As the answers' usage says; else as the metrics page counted; else unknown."""
    samples = [sample for run in runs for sample in run.samples]
    told = [sample.hit_tokens for sample in samples]
    if None not in told:
        return sum(hits for hits in told if hits is not None)
    pages = [run.page for run in runs]
    if None not in pages:
        hits = sum(page.engine_tokens + page.loaded_tokens for page in pages if page)
        return min(hits, sum(most_hits(sample.prompt_tokens) for sample in samples))
    return None


def percentile(ordered: Sequence[float], share: float) -> float:
    """The least value that `share` of the values do not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
