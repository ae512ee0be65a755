"""Draws curves as SVG, for pages without scripts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from math import isfinite

WIDTH, HEIGHT = 560, 200
LEFT, RIGHT, TOP, BOTTOM = 58, 10, 10, 24
"""Margins."""
MOST_POINTS = 400
"""Points of a curve; more are averaged."""
COLOURS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#6b7280")


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    x: float
    y: float
    low: float | None = None
    high: float | None = None
    """The ends of its interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    label: str
    points: Sequence[Point]


def draw_chart(title: str, curves: Sequence[Curve]) -> str:
    """A titled chart with a legend; empty if no curve has a point."""
    thinned = [Curve(label=curve.label, points=_thinned(curve.points)) for curve in curves if curve.points]
    points = [point for curve in thinned for point in curve.points]
    if not points:
        return ""
    low = min(point.y if point.low is None else point.low for point in points)
    high = max(point.y if point.high is None else point.high for point in points)
    if high == low:
        low, high = low - 0.5, high + 0.5
    first, last = min(point.x for point in points), max(point.x for point in points)
    place = _Place(first=first, last=max(last, first + 1), low=low, high=high)
    drawn = "".join(_curve(curve, COLOURS[index % len(COLOURS)], place) for index, curve in enumerate(thinned))
    legend = "".join(
        f'<span><i style="background:{COLOURS[index % len(COLOURS)]}"></i>{escape(curve.label)}</span>'
        for index, curve in enumerate(thinned)
    )
    return (
        f'<figure><figcaption>{escape(title)} <span class="legend">{legend}</span></figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{_axes(place)}{drawn}</svg></figure>'
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Maps values to the picture."""

    first: float
    last: float
    low: float
    high: float

    def x(self, value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (value - self.first) / (self.last - self.first)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - self.low) / (self.high - self.low)


def _axes(place: _Place) -> str:
    parts: list[str] = []
    for share in (0.0, 0.5, 1.0):
        value = place.low + share * (place.high - place.low)
        y = place.y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.4g}</text>')
    for value, anchor in ((place.first, "start"), (place.last, "end")):
        parts.append(f'<text x="{place.x(value):.1f}" y="{HEIGHT - 6}" text-anchor="{anchor}">{value:g}</text>')
    return "".join(parts)


def _curve(curve: Curve, colour: str, place: _Place) -> str:
    line = " ".join(f"{place.x(point.x):.1f},{place.y(point.y):.1f}" for point in curve.points)
    bars = "".join(
        f'<line x1="{place.x(point.x):.1f}" x2="{place.x(point.x):.1f}" y1="{place.y(point.low):.1f}" '
        f'y2="{place.y(point.high):.1f}" stroke="{colour}"/>'
        for point in curve.points
        if point.low is not None and point.high is not None
    )
    dots = "".join(
        f'<circle cx="{place.x(point.x):.1f}" cy="{place.y(point.y):.1f}" r="2.5" fill="{colour}"/>'
        for point in (curve.points if bars or len(curve.points) == 1 else ())
    )
    return f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>{bars}{dots}'


def _thinned(points: Sequence[Point]) -> list[Point]:
    """At most MOST_POINTS finite points; each stands for an equal share of them, with its mean. Few points stay as they are."""
    finite = [point for point in points if isfinite(point.y)]
    if len(finite) <= MOST_POINTS:
        return finite
    edges = [round(index * len(finite) / MOST_POINTS) for index in range(MOST_POINTS + 1)]
    shares = [finite[start:stop] for start, stop in pairwise(edges)]
    return [Point(x=share[-1].x, y=sum(point.y for point in share) / len(share)) for share in shares]
