# SPDX-License-Identifier: Apache-2.0
"""From claims to the result, the coverage and the exit status."""

from __future__ import annotations

from qualify.claims.model import Claim, ClaimId, Status
from qualify.errors import ExitCode
from qualify.reasons import ReasonCode
from qualify.receipt.model import Coverage, Receipt, Result, ResultReason
from qualify.records import Host, Outcome, Run

BROKEN_RULE = frozenset({Status.FAILED, Status.INCONCLUSIVE, Status.SKIPPED})
"""Statuses of a required claim that give FAILED: the promise was put to the test and not shown to hold."""

ENDED_EARLY = {Outcome.FAILED: ReasonCode.CRASHED, Outcome.INTERRUPTED: ReasonCode.INTERRUPTED}


def result(claims: tuple[Claim, ...], run: Run) -> tuple[Result, tuple[ResultReason, ...]]:
    """The result and every reason why it is not PASSED.

    A required claim that is failed, inconclusive or skipped gives FAILED; else one that was not measured, or a run
    that did not complete, gives INVALID; else an optional claim that did not pass, or a harness that is not a clean
    revision, gives WARNED. A claim that the profile does not name has no say.
    """
    open_claims = [claim for claim in claims if claim.status is not Status.PASSED and in_profile(claim)]
    required = [claim for claim in open_claims if claim.required]
    reasons = [ResultReason(claim=claim.id, reason_code=code) for claim in open_claims for code in claim.reason_codes]
    if run.outcome in ENDED_EARLY:
        reasons.append(ResultReason(claim=None, reason_code=ENDED_EARLY[run.outcome]))
    if run.harness.clean is not True:
        reasons.append(ResultReason(claim=None, reason_code=ReasonCode.DIRTY_HARNESS))
    if any(claim.status in BROKEN_RULE for claim in required):
        return Result.FAILED, tuple(reasons)
    if required or run.outcome is not Outcome.COMPLETED or not any(claim.required for claim in claims):
        return Result.INVALID, tuple(reasons)
    return (Result.WARNED if reasons else Result.PASSED), tuple(reasons)


def in_profile(claim: Claim) -> bool:
    """Whether the profile names the claim, as required or as optional."""
    return claim.reason_codes != (ReasonCode.NOT_IN_PROFILE,)


def coverage(claims: tuple[Claim, ...], run: Run, host: Host | None) -> Coverage:
    """How much was shown, on what hardware. The GPUs of this host say nothing about a server elsewhere."""
    passed = {claim.id for claim in claims if claim.status is Status.PASSED}
    if not passed:
        return Coverage.NONE
    on_gpu = host is not None and bool(host.gpus) and not run.target.startswith("url:")
    if not on_gpu or not {ClaimId.PINS, ClaimId.SERVE_TP} <= passed:
        return Coverage.SMOKE
    return Coverage.FULL if passed == set(ClaimId) else Coverage.PARTIAL


def exit_code(receipt: Receipt, *, strict: bool = False) -> ExitCode:
    """The exit status of a run that ended with this receipt."""
    early = {Outcome.INTERRUPTED: ExitCode.INTERRUPTED, Outcome.FAILED: ExitCode.BROKEN}
    return early.get(receipt.predicate.outcome) or verdict_code(receipt, strict=strict)


def verdict_code(receipt: Receipt, *, strict: bool = False) -> ExitCode:
    """The exit status that the result alone deserves, as `review` gives it."""
    predicate = receipt.predicate
    if predicate.result is Result.PASSED:
        return ExitCode.PASSED
    if predicate.result is Result.WARNED:
        return ExitCode.NOT_USABLE if strict else ExitCode.PASSED
    statuses = {claim.status for claim in predicate.claims if claim.required}
    if Status.FAILED in statuses:
        return ExitCode.FAILED
    return ExitCode.BROKEN if Status.ERROR in statuses else ExitCode.NOT_USABLE
