# SPDX-License-Identifier: Apache-2.0
"""Identities between figures of a receipt, checked again by arithmetic of the reviewer's own."""

from __future__ import annotations

from collections.abc import Iterator

from qualify.receipt.model import Qualification


def broken_identity(predicate: Qualification) -> tuple[str | None, str]:
    """The first identity that does not hold, or None; and how many were checked, in words."""
    checked = 0
    for problem in _identities(predicate):
        checked += 1
        if problem is not None:
            return problem, f"{checked} identities"
    return None, f"{checked} identities"


def _identities(predicate: Qualification) -> Iterator[str | None]:
    """One item an identity: None where it holds, else what is wrong."""
    for claim in predicate.claims:
        for estimate in claim.estimates:
            low, high = estimate.low, estimate.high
            if low is not None and high is not None:
                holds = low <= estimate.point <= high
                yield None if holds else f"{claim.id}: {estimate.name} lies outside its own interval"
