# SPDX-License-Identifier: Apache-2.0
"""Comparing two receipts: what may be compared, and what counts as a change."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from qualify.claims.model import Claim, Estimate, Status
from qualify.errors import EvidenceError
from qualify.reasons import ReasonCode
from qualify.receipt.build import Derive
from qualify.receipt.canonical import parse
from qualify.receipt.diff import Change, Difference, compare, diff, ratio_interval, render
from qualify.receipt.model import STATEMENT, Receipt


@pytest.fixture
def receipt(pristine: Path) -> Receipt:
    return Receipt.model_validate(parse((pristine / STATEMENT).read_bytes(), STATEMENT))


def estimate(point: float, half: float | None, unit: str = "{token}/s", name: str = "rate") -> Estimate:
    return Estimate(
        name=name,
        unit=unit,
        scope="concurrency 1",
        point=point,
        low=None if half is None else point - half,
        high=None if half is None else point + half,
        method="batchMeans/v1",
        replicates=10,
        replicate_unit="batch",
        reason=ReasonCode.INSUFFICIENT_SAMPLES if half is None else None,
    )


def having(receipt: Receipt, *estimates: Estimate, **predicate: object) -> Receipt:
    """The receipt with other figures in its measured claim, and other fields of its predicate."""

    def replaced(claim: Claim) -> Claim:
        return claim.model_copy(update={"estimates": estimates}) if claim.estimates else claim

    claims = tuple(replaced(claim) for claim in receipt.predicate.claims)
    update = {"claims": claims, **predicate}
    return receipt.model_copy(update={"predicate": receipt.predicate.model_copy(update=update)})


def changes(difference: Difference) -> dict[str, Change]:
    return {figure.name: figure.change for figure in difference.figures}


def test_a_receipt_equals_itself(pristine: Path, derive: Derive) -> None:
    """Nothing differs, and the exit status is 0."""
    difference = diff(pristine, pristine, derive=derive)
    assert (difference.identities, difference.comparable, difference.exit_code) == ((), True, 0)
    assert {claim.change for claim in difference.claims} == {Change.SAME}
    assert set(changes(difference).values()) == {Change.SAME}


def test_a_receipt_that_is_not_verified_is_not_compared(pristine: Path, tmp_path: Path, derive: Derive) -> None:
    """A comparison of figures that nobody derived again would prove nothing."""
    broken = Path(shutil.copytree(pristine, tmp_path / "broken"))
    (broken / "evidence/run.json").write_text("{}")
    with pytest.raises(EvidenceError, match="not verified: step 2"):
        diff(pristine, broken, derive=derive)


@pytest.mark.parametrize(
    ("left", "right", "unit", "change"),
    [
        ((100, 0.5), (100.5, 0.5), "{token}/s", Change.SAME),
        ((100, 0.5), (90, 0.5), "{token}/s", Change.WORSE),
        ((100, 0.5), (110, 0.5), "{token}/s", Change.BETTER),
        ((100, 0.5), (110, 0.5), "s", Change.WORSE),
        ((100, 0.5), (90, 0.5), "ms", Change.BETTER),
        ((100, 5.0), (97, 5.0), "{token}/s", Change.UNRESOLVED),
        ((100, None), (50, 1.0), "{token}/s", Change.UNRESOLVED),
        ((100, 0.5), (0, 0.5), "{token}/s", Change.UNRESOLVED),
    ],
)
def test_figures_are_judged_by_the_interval_of_their_ratio(
    receipt: Receipt, left: tuple[float, float], right: tuple[float, float], unit: str, change: Change
) -> None:
    """Inside 1 ± margin the same, wholly outside better or worse by the unit's direction, else unresolved."""
    difference = compare(having(receipt, estimate(*left, unit)), having(receipt, estimate(*right, unit)))
    assert changes(difference) == {"rate": change}
    assert difference.exit_code == (1 if change is Change.WORSE else 0)


def test_the_ratio_interval_adds_relative_errors_in_quadrature() -> None:
    """3 % and 4 % give 5 %, to first order."""
    low, high = ratio_interval(estimate(100, 3), estimate(100, 4)) or (0, 0)
    assert (low, high) == (pytest.approx(0.951, abs=1e-3), pytest.approx(1.0513, abs=1e-3))


@pytest.mark.parametrize("field", ["profile", "model", "host", "target"])
def test_other_profile_model_or_hardware_makes_speed_incomparable(receipt: Receipt, field: str) -> None:
    """A figure ten times lower on another machine is no regression."""
    predicate = receipt.predicate
    other: Callable[[], object] = {
        "profile": lambda: predicate.profile.model_copy(update={"digest": receipt.subject[0].digest}),
        "model": lambda: None,
        "host": lambda: predicate.host and predicate.host.model_copy(update={"cores": 64}),
        "target": lambda: "url:http://127.0.0.1:1",
    }[field]
    slower = having(receipt, estimate(10, 0.1), **{field: other()})
    difference = compare(having(receipt, estimate(100, 1)), slower)
    assert (difference.comparable, changes(difference)) == (False, {"rate": Change.INCOMPARABLE})
    assert difference.exit_code == 0


def test_tokens_that_move_without_steps_are_unresolved(receipt: Receipt) -> None:
    """Acceptance belongs to prompts and drafter; unless its own interval moved, tok/s alone accuses nobody."""
    steps = estimate(50, 0.1, "{step}/s", "steps")
    length = estimate(2.0, 0.2, "1", "acceptance")
    before = having(receipt, steps, length, estimate(100, 0.5))
    after = having(receipt, steps, length.model_copy(update={"point": 1.9}), estimate(92, 0.5))
    assert changes(compare(before, after))["rate"] is Change.UNRESOLVED
    slower_steps = having(receipt, estimate(46, 0.1, "{step}/s", "steps"), length, estimate(92, 0.5))
    assert changes(compare(before, slower_steps))["rate"] is Change.WORSE


def test_a_proof_that_is_gone_is_worse(pristine: Path, receipt: Receipt) -> None:
    """Passed before and not measured now exits 1: dropping a claim must not look like a pass."""
    claims = tuple(
        claim.model_copy(update={"status": Status.NOT_RUN, "estimates": ()}) if claim.status is Status.PASSED else claim
        for claim in receipt.predicate.claims
    )
    fewer = receipt.model_copy(update={"predicate": receipt.predicate.model_copy(update={"claims": claims})})
    assert compare(receipt, fewer).exit_code == 1
    assert compare(fewer, receipt).change is Change.BETTER


def test_the_text_names_what_moved(pristine: Path, other: Path, derive: Derive) -> None:
    """Observed scalars that differ are shown with their relative change; the last line is the whole in one word."""
    text = render(diff(pristine, other, derive=derive))
    assert "throughput.sustained" in text
    assert text.splitlines()[-1] in set(Change)
