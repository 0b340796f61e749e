"""The report as a figure: of documents the curves, of conversations how the times to first token are spread."""

from __future__ import annotations

from collections.abc import Sequence

from forebay.compare import chart
from forebay.compare.chart import Axis, Line, Panel
from forebay.compare.report import ENDPOINT, LATER, Place, Report
from forebay.compare.workload import FIRST, ORDERS


def plot(report: Report) -> str:
    """The text of an SVG file."""
    models = dict.fromkeys(side.model.name for side in report.sides)
    title = f"{', '.join(models)}: {report.workload.describe()}"
    curve = report.curve()
    return chart.draw(title, _curves(curve) if curve else [_spreads(report)])


def _curves(curve: Sequence[Place]) -> list[list[Panel]]:
    """A column for each order: time to first token above, hit rate below."""
    slowest = max(place.ttft_mean_ms for place in curve)
    widest = max(place.working_set for place in curve)
    x = Axis("working set, multiple of the capacity", widest)
    times = Axis("mean TTFT, ms", slowest)
    hits = Axis("hit rate of later rounds", 1.0, is_share=True)
    columns = [[place for place in curve if place.order == order] for order in ORDERS]
    above = [Panel(order, x, times, _times(column), CAPACITY) for order, column in zip(ORDERS, columns, strict=True)]
    below = [Panel(order, x, hits, _rates(column), CAPACITY) for order, column in zip(ORDERS, columns, strict=True)]
    return [above, below]


CAPACITY = (1.0, "capacity")


def _times(places: Sequence[Place]) -> tuple[Line, ...]:
    """A line for each endpoint and kind of round."""
    return tuple(
        Line(
            f"{side}, {rounds}",
            _style(side, rounds),
            tuple((place.working_set, place.ttft_mean_ms) for place in _of(places, side, rounds)),
        )
        for side, rounds in dict.fromkeys((place.side, place.rounds) for place in places)
    )


def _rates(places: Sequence[Place]) -> tuple[Line, ...]:
    """A line for each endpoint whose hits are known."""
    return tuple(
        Line(f"{side}, {LATER}", _style(side, LATER), tuple(points))
        for side in dict.fromkeys(place.side for place in places)
        if (
            points := [
                (place.working_set, place.hit_ratio)
                for place in _of(places, side, LATER)
                if place.hit_ratio is not None
            ]
        )
    )


def _of(places: Sequence[Place], side: str, rounds: str) -> list[Place]:
    return [place for place in places if (place.side, place.rounds) == (side, rounds)]


def _style(side: str, rounds: str) -> int:
    return 2 * (rounds == FIRST) + (side != ENDPOINT)


def _spreads(report: Report) -> list[Panel]:
    """For each group, which share of its requests had their first token by when."""
    rows = report.rows()
    times = {(row.group, row.side): sorted(report.times(row.group, row.side)) for row in rows}
    slowest = max(max(values) for values in times.values())
    return [
        Panel(
            group,
            Axis("TTFT, ms", slowest),
            Axis("share of the requests", 1.0, is_share=True),
            tuple(
                Line(side.name, _style(side.name, LATER), _steps(times[group, side.name]), has_marks=False)
                for side in report.sides
            ),
        )
        for group in dict.fromkeys(row.group for row in rows)
    ]


def _steps(ordered: Sequence[float]) -> tuple[tuple[float, float], ...]:
    """The line rises by one request at each request's time."""
    count = len(ordered)
    return tuple((ms, (number + up) / count) for number, ms in enumerate(ordered) for up in (0, 1))
