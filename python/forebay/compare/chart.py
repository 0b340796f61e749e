"""Line charts as SVG: panels in rows, one legend below them.

Holds true: axes begin at zero and end at a tick at or above the largest value, so no line and no tick label is cut off;
the legend's entries are as wide as their text, and go on in a new line where the figure ends.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

# The colours of Okabe and Ito, which colour-blind people can tell apart.
COLOURS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00")
DASHES = ("", "6 3", "2 2", "8 2 2 2", "4 1")

FONT = 11
# More than the mean width of a character of a bold sans-serif font.
CHARACTER = 6.6
PLOT_WIDTH, PLOT_HEIGHT = 260.0, 170.0
# Beside the plot there is room for a tick of seven characters, and below its end for half of one of nine.
LEFT, RIGHT, TOP, BOTTOM = 74.0, 30.0, 26.0, 44.0
HEAD = 30.0
LEGEND_LINE = 18.0
TICKS = 5


@dataclass(frozen=True)
class Line:
    label: str
    style: int  # which colour and dash
    points: tuple[tuple[float, float], ...]
    has_marks: bool = True


@dataclass(frozen=True)
class Axis:
    label: str
    largest: float
    is_share: bool = False

    @property
    def step(self) -> float:
        """1, 2 or 5 times a power of ten."""
        if self.is_share:
            return 0.25
        wanted = (self.largest or 1.0) / TICKS
        power = float(10 ** math.floor(math.log10(wanted)))
        return next(power * digit for digit in (1, 2, 5, 10) if power * digit >= wanted * 0.999)

    @property
    def ticks(self) -> list[float]:
        count = 4 if self.is_share else max(1, math.ceil(self.largest / self.step - 1e-9))
        return [number * self.step for number in range(count + 1)]

    def text(self, value: float) -> str:
        return f"{value:.0%}" if self.is_share else f"{value:,.10g}"


@dataclass(frozen=True)
class Panel:
    title: str
    x: Axis
    y: Axis
    lines: tuple[Line, ...]
    # Where a vertical line stands, and what it means.
    marker: tuple[float, str] | None = None


def draw(title: str, rows: Sequence[Sequence[Panel]]) -> str:
    """The figure as the text of an SVG file."""
    across = LEFT + PLOT_WIDTH + RIGHT
    down = TOP + PLOT_HEIGHT + BOTTOM
    width = max(max(len(row) for row in rows) * across, _width(title, 14) + 2 * RIGHT)
    legend = _legend([line for row in rows for panel in row for line in panel.lines], width)
    below = HEAD + len(rows) * down
    height = below + len(legend) * LEGEND_LINE + 8
    elements = [_text(RIGHT, 20, title, size=14, weight="bold")]
    for number, row in enumerate(rows):
        for place, panel in enumerate(row):
            elements += _panel(panel, place * across + LEFT, HEAD + number * down + TOP)
    elements += [
        part for number, line in enumerate(legend) for part in _entries(line, below + number * LEGEND_LINE + 6)
    ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="sans-serif" font-size="{FONT}">'
    )
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *elements, "</svg>"]) + "\n"


def _panel(panel: Panel, left: float, top: float) -> Iterator[str]:
    frame = _Frame(left, top, panel.x.ticks[-1], panel.y.ticks[-1])
    bottom = top + PLOT_HEIGHT
    yield _text(left, top - 9, panel.title, weight="bold")
    for tick in panel.y.ticks:
        yield f'<path d="M{left:.1f} {frame.y(tick):.1f}h{PLOT_WIDTH:.1f}" stroke="#e0e0e0"/>'
        yield _text(left - 6, frame.y(tick) + 4, panel.y.text(tick), anchor="end")
    for tick in panel.x.ticks:
        yield f'<path d="M{frame.x(tick):.1f} {bottom:.1f}v4" stroke="#888888"/>'
        yield _text(frame.x(tick), bottom + 17, panel.x.text(tick), anchor="middle")
    yield f'<path d="M{left:.1f} {top:.1f}V{bottom:.1f}h{PLOT_WIDTH:.1f}" fill="none" stroke="#888888"/>'
    yield _text(left + PLOT_WIDTH / 2, bottom + 33, panel.x.label, anchor="middle")
    middle = top + PLOT_HEIGHT / 2
    turned = f' transform="rotate(-90 {left - 60:.1f} {middle:.1f})"'
    yield _text(left - 60, middle, panel.y.label, anchor="middle", more=turned)
    if panel.marker is not None:
        yield from _marker(frame, panel.marker)
    for line in panel.lines:
        yield from _line(frame, line)


def _marker(frame: _Frame, marker: tuple[float, str]) -> Iterator[str]:
    x, label = frame.x(marker[0]), marker[1]
    yield f'<path d="M{x:.1f} {frame.top:.1f}v{PLOT_HEIGHT:.1f}" stroke="#888888" stroke-dasharray="3 3"/>'
    yield _text(x, frame.top - 9, label, more=' fill="#666666"')


def _line(frame: _Frame, line: Line) -> Iterator[str]:
    places = [(frame.x(x), frame.y(y)) for x, y in line.points]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    yield f'<polyline points="{points}" fill="none" {_stroke(line)}/>'
    if line.has_marks:
        yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{_colour(line)}"/>' for x, y in places)


def _legend(lines: Sequence[Line], width: float) -> list[list[tuple[float, Line]]]:
    """Each label once, with where it begins, in lines of the figure's width."""
    placed: list[list[tuple[float, Line]]] = [[]]
    x = LEFT
    for line in {line.label: line for line in lines}.values():
        needed = 28 + _width(line.label, FONT) + 22
        if placed[-1] and x + needed > width:
            placed.append([])
            x = LEFT
        placed[-1].append((x, line))
        x += needed
    return placed


def _entries(legend: Sequence[tuple[float, Line]], y: float) -> Iterator[str]:
    for x, line in legend:
        yield f'<path d="M{x:.1f} {y:.1f}h22" {_stroke(line)}/>'
        yield _text(x + 28, y + 4, line.label)


@dataclass(frozen=True)
class _Frame:
    """From values to places."""

    left: float
    top: float
    x_end: float
    y_end: float

    def x(self, value: float) -> float:
        return self.left + value / self.x_end * PLOT_WIDTH

    def y(self, value: float) -> float:
        return self.top + PLOT_HEIGHT - value / self.y_end * PLOT_HEIGHT


def _stroke(line: Line) -> str:
    dash = DASHES[line.style % len(DASHES)]
    return f'stroke="{_colour(line)}" stroke-width="1.8"' + (f' stroke-dasharray="{dash}"' if dash else "")


def _colour(line: Line) -> str:
    return COLOURS[line.style % len(COLOURS)]


def _width(text: str, size: int) -> float:
    return len(text) * CHARACTER * size / FONT


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", size: int = FONT, weight: str = "normal", more: str = ""
) -> str:
    style = f' font-size="{size}"' if size != FONT else ""
    style += f' font-weight="{weight}"' if weight != "normal" else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}{more}>{escape(text)}</text>'
