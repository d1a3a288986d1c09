# SPDX-License-Identifier: Apache-2.0
"""Every receipt in this repository is reviewed again, for as long as it is here."""

from __future__ import annotations

from pathlib import Path

import pytest
from qualify.receipt.model import STATEMENT
from qualify.receipt.verify import review

RECEIPTS = Path(__file__).parents[2] / "receipts"


@pytest.mark.parametrize(
    "statement", sorted(RECEIPTS.rglob(STATEMENT)), ids=lambda path: path.parent.relative_to(RECEIPTS).as_posix()
)
def test_a_committed_receipt_still_verifies(statement: Path) -> None:
    """A judge that now gives other claims for the same evidence breaks a promise that was published."""
    reviewed = review(statement.parent)
    assert reviewed.verified, [step.detail for step in reviewed.steps if step.detail]
