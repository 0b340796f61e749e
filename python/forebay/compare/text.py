"""The report as text: aligned, without colour, fit for `diff`."""

from __future__ import annotations

from collections.abc import Sequence

from forebay.compare.report import LATER, Place, Report, Row, Saving
from forebay.compare.workload import ORDERS

# The table's head, in two lines, and the widths of its columns.
COLUMNS = (
    ("", "", 14),
    ("", "requests", 9),
    ("TTFT, ms", "mean", 10),
    ("", "median", 10),
    ("", "p90", 10),
    ("", "p99", 10),
    ("prompt", "tokens/s", 12),
    ("prompt", "tokens", 12),
    ("hit", "tokens", 12),
    ("hit", "rate", 9),
    ("loaded", "tokens", 12),
)


def render(report: Report) -> str:
    parts = [_heading(report), _rows(report.rows())]
    curve = report.curve()
    if curve:
        parts += [_curve(order, [place for place in curve if place.order == order]) for order in ORDERS]
    parts.append(_savings(report.savings()))
    parts.append([f"note: {note}" for note in report.notes()])
    return "\n\n".join("\n".join(line.rstrip() for line in part) for part in parts if part) + "\n"


def _heading(report: Report) -> list[str]:
    sides = [f"{side.name + ':':<10}{side.endpoint.url}, model `{side.model.name}`" for side in report.sides]
    together = "one request at a time" if report.concurrency == 1 else f"{report.concurrency} requests at a time"
    return [*sides, f"workload: {report.workload.describe()}", f"seed:     {report.seed}, {together}"]


def _rows(rows: Sequence[Row]) -> list[str]:
    lines = ["".join(f"{column[line]:>{column[2]}}" for column in COLUMNS) for line in (0, 1)]
    for group in dict.fromkeys(row.group for row in rows):
        lines += [group, *(_row(row) for row in rows if row.group == group)]
    return lines


def _row(row: Row) -> str:
    times = [f"{ms:,.1f}" for ms in (row.ttft_mean_ms, row.ttft_median_ms, row.ttft_p90_ms, row.ttft_p99_ms)]
    tokens = [f"{row.prompt_tokens_per_second:,.0f}", f"{row.prompt_tokens:,}", _count(row.hit_tokens)]
    cells = [f"{row.requests:,}", *times, *tokens, _share(row.hit_ratio), _count(row.loaded_tokens)]
    widths = [width for _, _, width in COLUMNS[1:]]
    return f"  {row.side:<12}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))


def _curve(order: str, places: Sequence[Place]) -> list[str]:
    """One line for each working set: TTFT, then hit rates, of each endpoint's first and later rounds."""
    columns = list(dict.fromkeys((place.side, place.rounds) for place in places))
    later = [column for column in columns if column[1] == LATER]
    heads = ["TTFT, mean", *[""] * (len(columns) - 1), "hit rate", *[""] * (len(later) - 1)]
    sides, rounds = zip(*columns, *later, strict=True)
    lines = [
        f"{first:<11}{second:>10}" + "".join(f"{cell:>14}" for cell in cells)
        for first, second, cells in ((order, "", heads), ("", "", sides), ("capacity", "documents", rounds))
    ]
    for documents in dict.fromkeys(place.documents for place in places):
        at = {(place.side, place.rounds): place for place in places if place.documents == documents}
        times = "".join(f"{at[column].ttft_mean_ms:>14,.1f}" for column in columns)
        rates = "".join(f"{_share(at[column].hit_ratio):>14}" for column in later)
        lines.append(f"{f'x {at[columns[0]].working_set:.2f}':<11}{documents:>10,}{times}{rates}")
    return lines


def _savings(savings: Sequence[Saving]) -> list[str]:
    lines = [f"{'saved':<16}{'first token, mean':<40}{'sooner in':<14}{'prompt tokens':<32}{'same text'}"]
    for saving in savings:
        sooner, same = (
            f"{count:,} of {saving.pairs:,}" if saving.pairs else "" for count in (saving.sooner, saving.same_text)
        )
        tokens = "unknown"
        if saving.saved_tokens is not None:
            share = _share(saving.saved_tokens / saving.prompt_tokens)
            tokens = f"{saving.saved_tokens:,} of {saving.prompt_tokens:,}, {share}"
        speed = f"{_speed(saving.times_sooner)} {saving.than}"
        lines.append(f"{saving.group:<16}{speed:<40}{sooner:<14}{tokens:<32}{same}")
    return lines


def _speed(times_sooner: float) -> str:
    """Within a twentieth nothing is claimed."""
    if times_sooner >= 1.05:
        return f"{times_sooner:.1f}x sooner than"
    return "about as soon as" if times_sooner > 0.95 else f"{1 / times_sooner:.1f}x later than"


def _count(count: int | None) -> str:
    return "unknown" if count is None else f"{count:,}"


def _share(share: float | None) -> str:
    """What is not all is never 100 %."""
    if share is None:
        return "unknown"
    return f"{share if share >= 1 else min(share, 0.99):.0%}"
