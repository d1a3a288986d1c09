# SPDX-License-Identifier: Apache-2.0
"""Horizontal bars in HTML, not SVG, so that their labels stay readable on a phone."""

from __future__ import annotations

from collections.abc import Iterable

from qualify.report.markup import Markup, element


def bars(rows: Iterable[Markup]) -> Markup:
    return element("div", list(rows), class_="bars")


def bar(
    label: str, value: str, *, begin: float = 0.0, share: float, mark: float | None = None, good: bool = True
) -> Markup:
    """One labelled bar. `begin`, `share` and `mark` are fractions of the full width, cut to 0 … 1."""
    position = f"left:{_percent(begin)};width:{_percent(share)}"
    tick = None if mark is None else element("span", class_="mark", style=f"left:calc({_percent(mark)} - 1px)")
    track = element("span", element("span", class_="bar" if good else "bar bad", style=position), tick, class_="track")
    return element("div", element("span", label, class_="label"), track, element("span", value, class_="value"))


def _percent(fraction: float) -> str:
    return f"{100 * min(max(fraction, 0.0), 1.0):.2f}%"
