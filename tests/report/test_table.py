# SPDX-License-Identifier: Apache-2.0
"""The terminal table and the live progress."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from qualify.claims.model import ClaimId, Estimate
from qualify.reasons import ReasonCode
from qualify.receipt.model import Receipt
from qualify.receipt.verify import review
from qualify.records import Outcome
from qualify.report.progress import Progress
from qualify.report.table import figure, render_receipt, render_review
from qualify.report.terminal import wants_colour

Make = Callable[..., Receipt]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_table_is_plain_when_it_is_no_terminal(bundle: Path, receipt_of: Make) -> None:
    """One line begins with each claim, nothing is coloured, and hostile text cannot move the cursor."""
    text = render_receipt(receipt_of(), bundle)
    assert "\x1b" not in text
    starts = [line.split(" ")[0] for line in text.splitlines()]
    assert [start for start in starts if start in set(ClaimId)] == list(ClaimId)


def test_the_last_line_is_the_verdict(bundle: Path, receipt_of: Make) -> None:
    """Result, required claims passed, coverage, subject and place in one sentence."""
    last = render_receipt(receipt_of(), bundle).splitlines()[-1]
    assert last.startswith("FAILED 2 of 9 required claims, coverage smoke, for profile/cpu-smoke, software unverified")
    assert last.endswith(f"→ {bundle}")


def test_a_failed_review_ends_with_the_step(tmp_path: Path) -> None:
    """The last line says that nothing was verified, at which step, and why."""
    last = render_review(review(tmp_path), tmp_path).splitlines()[-1]
    assert last.startswith("NOT VERIFIED at step 1 (read): no receipt.intoto.json")


@pytest.mark.parametrize(
    ("variables", "colour"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"NO_COLOR": ""}, True), ({"TERM": "dumb"}, False)],
)
def test_colour_follows_the_convention(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], colour: bool
) -> None:
    """Only a terminal is coloured, and any NO_COLOR that is not empty switches it off."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert wants_colour(Terminal()) is colour
    assert wants_colour(io.StringIO()) is False


@pytest.mark.parametrize(
    ("point", "half", "expected"),
    [
        (103.4375, 1.8, "103.4 [101.6, 105.2]"),
        (103.4375, 25.0, "103 [78, 128]"),
        (2.7707854, 0.0021, "2.7708 [2.7687, 2.7729]"),
        (1.0, 0.0, "1.000 [1.000, 1.000]"),
        (41234.0, 812.0, "41234 [40422, 42046]"),
    ],
)
def test_no_digits_beyond_the_interval(point: float, half: float, expected: str) -> None:
    """Two digits of the half-width decide how many are shown."""
    estimate = Estimate(
        name="x",
        unit="1",
        point=point,
        low=point - half,
        high=point + half,
        method="m",
        replicates=10,
        replicate_unit="batch",
    )
    assert figure(estimate) == expected
    bare = estimate.model_copy(update={"low": None, "high": None, "reason": ReasonCode.AUTOCORRELATED})
    assert "no interval: autocorrelated" in figure(bare)


def test_progress_without_a_terminal_is_one_plain_line_an_event() -> None:
    """Time of day, phase, text; a repeated note is not an event."""
    stream = io.StringIO()
    progress = Progress(stream)
    progress.phase("boot control: start")
    progress.note("loading weights")
    progress.note("loading weights")
    progress.note("bad\x1b[2J\nnews")
    progress.done(Outcome.COMPLETED)
    lines = [line.split(" ", 1) for line in stream.getvalue().splitlines()]
    assert all(len(clock) == 9 and clock.endswith("Z") for clock, _ in lines)
    assert [text for _, text in lines] == [
        "boot control: start",
        "boot control: start: loading weights",
        "boot control: start: bad [2J news",
        "boot control: start: completed after 0:00",
    ]


def test_progress_on_a_terminal_leaves_one_line_a_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    """The moving line is erased before the final one, so scrollback holds outcomes only."""
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    progress = Progress(stream)
    progress.phase("first")
    progress.note("half way")
    progress.done(Outcome.FAILED)
    last = stream.getvalue().rsplit("\r\x1b[K", 1)[1]
    assert last.endswith("first: failed after 0:00\n")
    assert stream.getvalue().count("\n") == 1


def test_a_phase_without_an_end_stops_drawing() -> None:
    """The next phase takes over the line; no thread is left to draw over it."""
    stream = Terminal()
    progress = Progress(stream)
    progress.phase("first")
    progress.phase("second")
    progress.done(Outcome.COMPLETED)
    after = stream.getvalue().rsplit("second", 1)[0]
    assert "first" not in after.rsplit("\r\x1b[K", 1)[1]


def test_a_reader_that_went_away_does_not_end_the_run() -> None:
    """Progress carries no evidence, so it must not cost any."""
    stream = io.StringIO()
    progress = Progress(stream)
    stream.close()
    progress.phase("first")
    progress.note("x")
    progress.done(Outcome.COMPLETED)
