"""A series over commits as SVG: runs, levels and steps, in the page's own colours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

WIDTH = 300
HEIGHT = 92
TOP = 18
SIDE = 6  # room for the texts of steps, and for half a point
LEAST_SPAN = 0.2  # of the middle, up and down: noise must not fill the chart
EDGE = 2  # percent of the runs on either side that may lie beyond the chart, at its edge


@dataclass(frozen=True)
class Point:
    """One run.

    Attributes:
        x: 0 is the first commit of the page, 1 the last.
        label: what a pointer shows.
        link: URL of its commit; may be empty.
        is_hollow: of a changed tree, or void.
    """

    x: float
    value: float
    label: str
    link: str = ""
    is_hollow: bool = False


@dataclass(frozen=True)
class Mark:
    """A step: its place, its label, `worse`, `better` or `changed`, and the URL of its commit."""

    x: float
    text: str
    word: str
    label: str
    link: str = ""


@dataclass(frozen=True)
class Level:
    """A median from one run to another."""

    start: float
    end: float
    value: float


@dataclass(frozen=True)
class Scale:
    """Values to heights; what lies beyond is drawn at the edge."""

    low: float
    high: float
    top: float
    bottom: float

    def y(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(self.bottom - min(1.0, max(0.0, share)) * (self.bottom - self.top), 1)


def scale_of(values: Sequence[float], top: float, bottom: float) -> Scale:
    """Return a scale on which these values have room, but for a few outliers."""
    low, middle, high = (float(value) for value in np.percentile(values, [EDGE, 50, 100 - EDGE]))
    room = LEAST_SPAN * abs(middle) or 1.0
    return Scale(min(low, middle - room), max(high, middle + room), top, bottom)


def plot(
    name: str,
    points: Sequence[Point],
    levels: Sequence[Level],
    marks: Sequence[Mark],
    second: Sequence[Point] = (),
) -> str:
    """Return a chart as wide as its container.

    Args:
        name: what it shows, for who cannot see it.
        second: another series, drawn below the first on a scale of its own.
    """
    bottom = HEIGHT - SIDE
    middle = (TOP + bottom) / 2 if second else bottom
    scale = scale_of([point.value for point in points], TOP, middle - (SIDE if second else 0))
    shapes = [*(_level(level, scale) for level in levels), _trace(points, scale, "trace")]
    if second:
        below = scale_of([point.value for point in second], middle + SIDE, bottom)
        shapes.append(_trace(second, below, "second"))
    shapes += [_point(point, scale) for point in points]
    shapes += [_mark(mark) for mark in marks]
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="group" aria-label="{escape(name)}">'
        f'<path class="floor" d="M0 {HEIGHT - 1}H{WIDTH}"/>{"".join(shapes)}</svg>'
    )


def _trace(points: Sequence[Point], scale: Scale, css: str) -> str:
    corners = " ".join(f"{_x(point.x)},{scale.y(point.value)}" for point in points)
    return f'<polyline class="{css}" points="{corners}"/>'


def spark(values: Sequence[float], steps: Sequence[int], width: int = 120, height: int = 22) -> str:
    """Return a line as high as one of text, with a tick at each step.

    A step is the number of the first run of a new level.
    """
    scale = scale_of(values, 2, height - 2)
    gap = (width - 4) / max(1, len(values) - 1)
    corners = " ".join(f"{2 + gap * i:.0f},{scale.y(value):.0f}" for i, value in enumerate(values))
    ticks = "".join(f'<path class="tick" d="M{2 + gap * i:.0f} 0V{height}"/>' for i in steps)
    return (
        f'<svg class="spark" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'aria-hidden="true">'
        f'{ticks}<polyline class="trace" points="{corners}"/></svg>'
    )


def _x(share: float) -> float:
    return round(SIDE + share * (WIDTH - 2 * SIDE), 1)


def _level(level: Level, scale: Scale) -> str:
    return f'<path class="level" d="M{_x(level.start)} {scale.y(level.value)}H{_x(level.end)}"/>'


def _point(point: Point, scale: Scale) -> str:
    hollow = ' class="hollow"' if point.is_hollow else ""
    circle = f'<circle{hollow} cx="{_x(point.x)}" cy="{scale.y(point.value)}" r="2"/>'
    # Runs are for pointers; the keyboard goes from step to step.
    return _linked(f"{circle}<title>{escape(point.label)}</title>", point.link, ' tabindex="-1"')


def _mark(mark: Mark) -> str:
    x = _x(mark.x)
    anchor = "start" if mark.x < 0.15 else "end" if mark.x > 0.85 else "middle"
    label = escape(mark.label)
    shape = (
        f'<rect x="{x - 8}" y="0" width="16" height="{HEIGHT}"/><path d="M{x} {TOP - 4}V{HEIGHT}"/>'
        f'<text x="{x}" y="{TOP - 7}" text-anchor="{anchor}">{escape(mark.text)}</text>'
        f"<title>{label}</title>"
    )
    attributes = f' aria-label="{label}"'
    return f'<g class="step {mark.word}">{_linked(shape, mark.link, attributes)}</g>'


def _linked(shape: str, link: str, attributes: str) -> str:
    return f'<a href="{link}"{attributes}>{shape}</a>' if link else f"<g>{shape}</g>"
