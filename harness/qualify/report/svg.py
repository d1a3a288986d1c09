# SPDX-License-Identifier: Apache-2.0
"""Small plots as inline SVG; colours come from the page's style sheet, so that they follow light and dark."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from qualify.report.markup import Markup, element

WIDTH, HEIGHT = 400, 190
LEFT, RIGHT, TOP, BOTTOM = 44, 8, 10, 26
"""Margins in units of the view box: the left one holds the labels of the y axis."""

ANCHORS = ((0.0, "start"), (0.5, "middle"), (1.0, "end"))
"""Where the x axis is labelled, as a share of its length, and how the label is set there."""


class Band(NamedTuple):
    """A figure with its interval, drawn over the whole width."""

    point: float
    low: float
    high: float


def line_plot(
    title: str, times: Sequence[float], values: Sequence[float], *, unit: str, band: Band | None = None
) -> Markup:
    """Values over seconds, the y axis from 0, with the interval of the mean behind it."""
    top = nice_ceiling(max([*values, band.high if band else 0.0]))
    begin, end = times[0], times[-1]

    def x(time: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (time - begin) / ((end - begin) or 1.0)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / top

    points = " ".join(f"{x(time):.1f},{y(value):.1f}" for time, value in zip(times, values, strict=True))
    return element(
        "svg",
        element("title", title),
        [_grid_line(y(top * share), f"{top * share:g}") for share in (0, 0.25, 0.5, 0.75, 1)],
        _band(band, y) if band else None,
        element("polyline", points=points, class_="line"),
        [_second(x(begin + share * (end - begin)), share * (end - begin), anchor) for share, anchor in ANCHORS],
        element("text", unit, x=LEFT + 4, y=TOP + 10, class_="unit"),
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label=title,
    )


def _second(x: float, seconds: float, anchor: str) -> Markup:
    return element("text", f"{seconds:.3g} s", x=f"{x:.1f}", y=HEIGHT - 8, class_=anchor)


def _grid_line(y: float, label: str) -> Markup:
    return element(
        "g",
        element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=f"{y:.1f}", y2=f"{y:.1f}", class_="grid"),
        element("text", label, x=LEFT - 5, y=f"{y + 4:.1f}", class_="end"),
    )


def _band(band: Band, y: Callable[[float], float]) -> Markup:
    upper, lower, middle = y(band.high), y(band.low), y(band.point)
    return element(
        "g",
        element(
            "rect",
            x=LEFT,
            width=WIDTH - LEFT - RIGHT,
            y=f"{upper:.1f}",
            height=f"{max(lower - upper, 1):.1f}",
            class_="band",
        ),
        element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=f"{middle:.1f}", y2=f"{middle:.1f}", class_="mean"),
    )


def nice_ceiling(value: float) -> float:
    """The next 1, 2, 2.5, 4, 5 or 8 times a power of ten at or above `value`; 1 for 0, so that a scale exists."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next((step * power for step in (1, 2, 2.5, 4, 5, 8) if step * power >= value), 10 * power)
