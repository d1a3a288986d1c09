# SPDX-License-Identifier: Apache-2.0
"""What a fault is, and what a verdict on it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from qualify.claims.model import Claim, ClaimId, Status
from qualify.reasons import ReasonCode

from faults.lab import Lab


class Group(StrEnum):
    ENGINE = "engine"
    GRAPHS = "graphs"
    PLUGIN = "plugin"
    KV = "KV"
    THROUGHPUT = "throughput"
    MEMORY = "memory"
    RECEIPTS = "receipts"


class Verdict(NamedTuple):
    """A status and its reasons: a claim's reason codes, or the step at which a review ended."""

    status: str
    reasons: frozenset[str]

    def __str__(self) -> str:
        return f"{self.status} ({', '.join(sorted(self.reasons))})"


Verdicts = Mapping[str, Verdict]
"""By claim id, `review` or `run`: everything that does not pass."""


@dataclass(frozen=True)
class Fault:
    """`expected` names all that must not pass, the thing under test first; everything else must pass as before."""

    group: Group
    name: str
    act: Callable[[Lab], Verdicts]
    expected: Verdicts

    @property
    def target(self) -> str:
        return next(iter(self.expected))


def failed(*codes: ReasonCode) -> Verdict:
    return Verdict(Status.FAILED, frozenset(codes))


def inconclusive(*codes: ReasonCode) -> Verdict:
    return Verdict(Status.INCONCLUSIVE, frozenset(codes))


def invalid(*codes: ReasonCode) -> Verdict:
    return Verdict(Status.INVALID, frozenset(codes))


def error(*codes: ReasonCode) -> Verdict:
    return Verdict(Status.ERROR, frozenset(codes))


def not_run(*codes: ReasonCode) -> Verdict:
    return Verdict(Status.NOT_RUN, frozenset(codes))


def refused(step: str) -> Verdict:
    return Verdict("refused", frozenset({step}))


def verdicts(claims: Iterable[Claim], only: ClaimId | None = None) -> Verdicts:
    """All claims of the profile that do not pass, or one of them."""
    return {
        claim.id: Verdict(claim.status, frozenset(claim.reason_codes))
        for claim in claims
        if claim.status is not Status.PASSED
        and claim.reason_codes != (ReasonCode.NOT_IN_PROFILE,)
        and only in (None, claim.id)
    }
