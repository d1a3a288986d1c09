# SPDX-License-Identifier: Apache-2.0
"""The HTML report: whole, self-contained, safe, and never in the way of a receipt."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from qualify.claims.model import ClaimId, Status
from qualify.receipt.model import Receipt
from qualify.report.html import render_html
from qualify.report.markup import VOID, Markup, element
from qualify.report.svg import Band, line_plot, nice_ceiling

HOSTILE = "<img src=x>"

CELL = "evidence/boots/01-control/throughput/c2.json"

Make = Callable[..., Receipt]


class Page(HTMLParser):
    """Collects tags, links and text, and holds opening against closing tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src", "srcset", "xlink:href")]
        assert not any(name.startswith("on") for name, _ in attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text += data


def test_the_page_is_whole(bundle: Path, receipt_of: Make) -> None:
    """Every tag closes, and every claim with its status is on it."""
    page = Page(render_html(receipt_of(), bundle))
    assert page.open == []
    assert all(name in page.text for name in ClaimId)
    assert all(status in page.text for status in Status)
    assert page.tags.count("svg") == 1


def test_the_page_loads_nothing(bundle: Path, receipt_of: Make) -> None:
    """No script, no style sheet, font or picture from elsewhere; links lead into the evidence only."""
    text = render_html(receipt_of(), bundle)
    page = Page(text)
    assert {"script", "link", "img", "iframe", "object", "base", "form"}.isdisjoint(page.tags)
    assert all(link.startswith("evidence/") for link in page.links)
    assert re.search(r"url\(|@import|https?://", text) is None
    assert "default-src 'none'" in unescape(text)


def test_hostile_text_stays_text(bundle: Path, receipt_of: Make) -> None:
    """What an engine or a forger wrote is shown, never obeyed; control and direction marks are gone."""
    text = render_html(receipt_of(), bundle)
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert not {"\x1b", "\x00", "\u202e"} & set(text)


def test_the_page_is_a_pure_function(bundle: Path, receipt_of: Make) -> None:
    """The manifest lists the report, so the same receipt must give the same bytes, and may show no manifest."""
    receipt = receipt_of()
    assert render_html(receipt, bundle) == render_html(receipt, bundle)
    other = receipt.predicate.manifest.model_copy(update={"file_count": 99, "total_bytes": 123_456_789})
    rebound = receipt.model_copy(update={"predicate": receipt.predicate.model_copy(update={"manifest": other})})
    assert render_html(rebound, bundle) == render_html(receipt, bundle)


@pytest.mark.parametrize("content", [None, b"", b"{}", b"[1]", b"\xff"])
def test_a_plot_without_evidence_is_left_out(bundle: Path, receipt_of: Make, content: bytes | None) -> None:
    """Missing or broken evidence costs its plot, not the page."""
    if content is None:
        (bundle / CELL).unlink()
    else:
        (bundle / CELL).write_bytes(content)
    page = Page(render_html(receipt_of(), bundle))
    assert "svg" not in page.tags
    assert "throughput.sustained" in page.text


NUMBERS = st.none() | st.floats(allow_nan=False, allow_infinity=False)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(st.tuples(NUMBERS.filter(lambda at: at is not None), NUMBERS), max_size=6))
def test_any_series_gives_a_page(bundle: Path, receipt_of: Make, series: list[tuple[float, float | None]]) -> None:
    """A report must never cost a receipt: falling counters, gaps, times that stand still, huge values."""
    cell: Any = json.loads((bundle / CELL).read_bytes())
    template = cell["samples"][0]
    cell["samples"] = [{**template, "at": at, "generationTokens": value} for at, value in series]
    broken = bundle / CELL
    before = broken.read_bytes()
    broken.write_text(json.dumps(cell))
    text = render_html(receipt_of(), bundle)
    broken.write_bytes(before)
    assert Page(text).open == []
    assert re.search(r"\b(nan|inf)\b", "".join(re.findall(r'(?:points|x|y|height)="([^"]*)"', text))) is None


@given(st.floats(min_value=1e-300, max_value=1e300))
def test_an_axis_reaches_its_largest_value(value: float) -> None:
    """And leaves at most half of it empty, give or take rounding."""
    top = nice_ceiling(value)
    assert value <= top <= 2.0000001 * value


def test_points_lie_inside_the_plot() -> None:
    """The highest value and both ends of the time axis are within the view box."""
    plot = line_plot("t", [0.0, 1.0, 2.0], [0.0, 7.0, 10.0], unit="tok/s", band=Band(6.0, 5.0, 7.0))
    points = re.search(r'points="([^"]*)"', plot)
    assert points is not None
    pairs = [tuple(map(float, pair.split(","))) for pair in points[1].split()]
    assert all(0 <= x <= 400 and 0 <= y <= 190 for x, y in pairs)
    assert [y for _, y in pairs] == sorted((y for _, y in pairs), reverse=True)


def test_markup_escapes_by_default() -> None:
    """Only what is marked as markup is one; attributes are escaped too."""
    made = element("p", "<b>", Markup("<i></i>"), None, ["&", 1], title='"')
    assert made == '<p title="&quot;">&lt;b&gt;<i></i>&amp;1</p>'


def restore(tokens: int | None, mismatches: int) -> dict[str, Any]:
    group = {
        "rank": 0,
        "group": 1,
        "specs": [HOSTILE],
        "window": 512,
        "tokensPerBlock": 16,
        "blocks": 48,
        "bytes": 4096,
        "mismatches": mismatches,
    }
    return {
        "arm": "disk",
        "promptTokens": 1023,
        "externalTokens": tokens,
        "seconds": None,
        "coldSeconds": 1.0,
        "bytes": 4096,
        "mismatches": mismatches,
        "groups": [group],
    }


@pytest.mark.parametrize(
    ("tokens", "mismatches", "good"), [(768, 0, True), (768, 1, False), (512, 0, False), (None, 0, False)]
)
def test_a_restore_is_shown_against_its_prediction(
    bundle: Path, receipt_of: Make, tokens: int | None, mismatches: int, good: bool
) -> None:
    """A bar is good only if the tokens are those predicted and no block differs; unknown is said, never 0."""
    receipt = receipt_of()
    update = {"observed": {"restores": [restore(tokens, mismatches)]}, "expected": {"externalTokens": {"1023": 768}}}
    claims = tuple(
        claim.model_copy(update=update) if claim.id is ClaimId.KV_RESTORE else claim
        for claim in receipt.predicate.claims
    )
    changed = receipt.model_copy(update={"predicate": receipt.predicate.model_copy(update={"claims": claims})})
    text = render_html(changed, bundle)
    assert ('class="bar bad"' in text) is not good
    assert (">unknown</span>" in text) == (tokens is None)
    assert HOSTILE not in text
