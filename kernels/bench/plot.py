# SPDX-License-Identifier: Apache-2.0
"""The plot of a bench result: our time over the stock time, by rows, one line for each head count."""

from __future__ import annotations

import math
from typing import Any

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 760, 420, 60, 50, 130, 50
COLOURS = ("#1b6ca8", "#c8553d", "#3a7d44", "#7b4fa3", "#a67c00", "#444444")
CEILING = 1.1


def _x(rows: int, most: int) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * math.log2(rows) / math.log2(most)


def _y(ratio: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * min(ratio, CEILING) / CEILING


def _text(x: float, y: float, words: str, anchor: str = "middle", colour: str = "#222") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{words}</text>'


def _line(y: float, colour: str, dash: str = "") -> str:
    style = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="{colour}"{style}/>'


def ratio_plot(results: dict[str, Any]) -> str:
    """An SVG document; lower is faster, 1.0 is the stock operator."""
    rows = [row for row in results["rows"] if row["slots"] == "all" and row["op"].startswith("fused")]
    most = max(row["n"] for row in rows)
    title = f"fused operator, time relative to vLLM 0.32.0 ({results['machine']['gpu']}, {results['date']})"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(LEFT, 25, title, "start"),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, "rows (tokens)"),
    ]
    for tenth in range(0, 11, 2):
        y = _y(tenth / 10)
        parts += [_line(y, "#ddd"), _text(LEFT - 8, y + 4, f"{tenth / 10:.1f}", "end")]
    parts += [_line(_y(1.0), "#222", "5 4"), _text(WIDTH - RIGHT + 8, _y(1.0) + 4, "stock", "start")]
    parts += [_text(_x(n, most), HEIGHT - BOTTOM + 18, str(n)) for n in sorted({row["n"] for row in rows})]
    heads = sorted({(row["local_heads"], row["padded_heads"]) for row in rows})
    for index, (local, padded) in enumerate(heads):
        line = [row for row in rows if (row["local_heads"], row["padded_heads"]) == (local, padded)]
        points = " ".join(f"{_x(row['n'], most):.1f},{_y(row['ratio']):.1f}" for row in line)
        colour = COLOURS[index % len(COLOURS)]
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        label = f"{local} of {padded} heads"
        parts.append(_text(WIDTH - RIGHT + 8, TOP + 90 + 18 * index, label, "start", colour))
    return "\n".join([*parts, "</svg>"]) + "\n"
