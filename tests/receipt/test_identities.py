# SPDX-License-Identifier: Apache-2.0
"""The reviewer's own arithmetic over the figures of a receipt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from qualify.claims.model import Claim, ClaimId, Status
from qualify.receipt.canonical import parse
from qualify.receipt.identities import broken_identity
from qualify.receipt.model import STATEMENT, Qualification, Receipt


@pytest.fixture
def predicate(pristine: Path) -> Qualification:
    return Receipt.model_validate(parse((pristine / STATEMENT).read_bytes(), STATEMENT)).predicate


def having(predicate: Qualification, name: ClaimId, **update: Any) -> Qualification:
    def changed(claim: Claim) -> Claim:
        return claim.model_copy(update=update) if claim.id is name else claim

    return predicate.model_copy(update={"claims": tuple(changed(claim) for claim in predicate.claims)})


def restored(tokens: int, supplied: int, byte_count: int = 64, groups: int = 2) -> dict[str, Any]:
    rows = [{"rank": 0, "group": group, "blocks": 4, "bytes": 32} for group in range(groups)]
    row = {"arm": "disk", "promptTokens": tokens, "externalTokens": supplied, "bytes": byte_count, "groups": rows}
    return {"chunkTokens": 256, "restores": [row]}


def test_an_honest_receipt_has_none_broken(predicate: Qualification) -> None:
    """And something was checked."""
    broken, checked = broken_identity(predicate)
    assert (broken, checked > 0) == (None, True)


def test_a_figure_lies_within_its_interval(predicate: Qualification) -> None:
    """Otherwise point and interval are of different data."""
    claim = next(claim for claim in predicate.claims if claim.estimates)
    outside = claim.estimates[0].model_copy(update={"point": 99.0})
    broken, _ = broken_identity(having(predicate, claim.id, estimates=(outside,)))
    assert "outside its own interval" in (broken or "")


def test_reason_codes_are_those_of_the_checks(predicate: Qualification) -> None:
    """A claim cannot give a reason that no check found."""
    broken, _ = broken_identity(having(predicate, ClaimId.THROUGHPUT_SUSTAINED, reason_codes=("crashed",)))
    assert "not those of its checks" in (broken or "")


@pytest.mark.parametrize(
    ("observed", "why"),
    [
        (restored(1023, 768), None),
        (restored(1024, 1023), None),
        (restored(1025, 1024), None),
        (restored(1024, 1024), "not 1023 external tokens"),
        (restored(1025, 768), "not 1024 external tokens"),
        (restored(1023, 768, byte_count=65), "not the sum"),
        (restored(1023, 768, byte_count=0, groups=0), "without a compared block"),
    ],
)
def test_a_passed_restore_adds_up(predicate: Qualification, observed: dict[str, Any], why: str | None) -> None:
    """Whole chunks but never the last token; bytes of all ranks and groups; no empty group."""
    passed = having(predicate, ClaimId.KV_RESTORE, status=Status.PASSED, reason_codes=(), observed=observed)
    broken, _ = broken_identity(passed)
    assert (broken is None) if why is None else (why in (broken or ""))
