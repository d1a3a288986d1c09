# SPDX-License-Identifier: Apache-2.0
"""What a claim is: one judged statement with its checks, figures and evidence."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field, model_validator

from qualify.model import Record
from qualify.reasons import ReasonCode


class ClaimId(StrEnum):
    PINS = "pins"
    OP_CONTRACT = "op.contract"
    PLUGIN_ACTIVE = "plugin.active"
    SERVE_TP = "serve.tp"
    GRAPHS_CAPTURE = "graphs.capture"
    MEMORY_ADMISSION = "memory.admission"
    KV_RESTORE = "kv.restore"
    THROUGHPUT_SUSTAINED = "throughput.sustained"
    SERVICE_ERRORS = "service.errors"


class Status(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    INCONCLUSIVE = "inconclusive"
    INVALID = "invalid"
    ERROR = "error"
    SKIPPED = "skipped"
    NOT_RUN = "notRun"


# From worst to best: a claim takes the worst status among its checks. `failed` leads, because a broken rule
# that was measured stays broken, whatever else could not be measured.
SEVERITY = (Status.FAILED, Status.ERROR, Status.INVALID, Status.INCONCLUSIVE, Status.PASSED)

OBSERVED = frozenset({Status.PASSED, Status.FAILED, Status.INCONCLUSIVE})
"""The statuses that come from a measurement; all others carry no observed value."""


class Check(Record):
    """One rule that was applied to evidence. Its name says the rule; `where` says to what."""

    name: str
    status: Status
    reason_code: ReasonCode | None = None
    where: str = ""
    observed: Any = None
    expected: Any = None

    @model_validator(mode="after")
    def _reason_unless_passed(self) -> Check:
        if (self.status is Status.PASSED) == (self.reason_code is not None):
            raise ValueError(f"check {self.name!r}: a reason code is given if and only if it did not pass")
        return self


class Estimate(Record):
    """A figure with its interval. `low` and `high` are null when no interval can be formed; `reason` says why."""

    name: str
    unit: str
    scope: str = ""
    point: float
    low: float | None
    high: float | None
    level: float = 0.95
    method: str
    replicates: int
    replicate_unit: str
    reason: ReasonCode | None = None


class EvidenceRef(Record):
    path: str
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Claim(Record):
    id: ClaimId
    required: bool
    status: Status
    reason_codes: tuple[ReasonCode, ...] = ()
    summary: str
    observed: dict[str, Any] | None = None
    expected: dict[str, Any] | None = None
    estimates: tuple[Estimate, ...] = ()
    checks: tuple[Check, ...] = ()
    evidence: tuple[EvidenceRef, ...] = ()

    @model_validator(mode="after")
    def _presence(self) -> Claim:
        """The presence table: which fields a status demands and which it forbids."""
        if (self.status is Status.PASSED) == bool(self.reason_codes):
            raise ValueError(f"{self.id}: reason codes are given if and only if the claim did not pass")
        if (self.status in OBSERVED) != (self.observed is not None):
            raise ValueError(
                f"{self.id}: a {self.status} claim {'needs' if self.status in OBSERVED else 'has no'} observed"
            )
        if self.status in OBSERVED and not self.evidence:
            raise ValueError(f"{self.id}: a {self.status} claim names its evidence")
        if self.status is Status.PASSED and not self.checks:
            raise ValueError(f"{self.id}: a claim without a single check cannot pass")
        return self


class Judgement(Record):
    """What a claim function returns; `derive` adds the id, whether it is required, and the evidence it read."""

    checks: tuple[Check, ...]
    summary: str
    observed: dict[str, Any] = Field(default_factory=dict)
    expected: dict[str, Any] = Field(default_factory=dict)
    estimates: tuple[Estimate, ...] = ()


def passed(name: str, *, where: str = "", observed: Any = None, expected: Any = None) -> Check:
    return Check(name=name, status=Status.PASSED, where=where, observed=observed, expected=expected)


def check(
    name: str,
    holds: bool,
    code: ReasonCode,
    *,
    where: str = "",
    observed: Any = None,
    expected: Any = None,
    otherwise: Status = Status.FAILED,
) -> Check:
    """A check that passes if `holds`, else has the status `otherwise` with this reason code."""
    return Check(
        name=name,
        status=Status.PASSED if holds else otherwise,
        reason_code=None if holds else code,
        where=where,
        observed=observed,
        expected=expected,
    )


def equal(name: str, observed: Any, expected: Any, code: ReasonCode, *, where: str = "") -> Check:
    """A check of equality. An observed None is unknown, and unknown is never equal."""
    holds = observed is not None and observed == expected
    return check(name, holds, code, where=where, observed=observed, expected=expected)


def worst(statuses: Iterable[Status]) -> Status:
    """The worst status; no status at all is an error, because nothing was compared."""
    found = set(statuses)
    return next((status for status in SEVERITY if status in found), Status.ERROR)
