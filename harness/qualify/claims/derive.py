# SPDX-License-Identifier: Apache-2.0
"""`derive` turns evidence and profile into judged statements. It never touches a network, clock or process."""

from __future__ import annotations

from collections.abc import Callable

from qualify.claims import contract, errors, graphs, kv, memory, pins, plugin, serve, throughput
from qualify.claims.model import OBSERVED, Check, Claim, ClaimId, Judgement, Status, worst
from qualify.errors import EvidenceError
from qualify.evidence import Evidence, MissingEvidence, Source
from qualify.profiles import Profile
from qualify.reasons import ReasonCode
from qualify.records import RUN, Outcome, Run

ClaimFunction = Callable[[Evidence, Profile], Judgement]

JUDGES: dict[ClaimId, ClaimFunction] = {
    ClaimId.PINS: pins.judge,
    ClaimId.OP_CONTRACT: contract.judge,
    ClaimId.PLUGIN_ACTIVE: plugin.judge,
    ClaimId.SERVE_TP: serve.judge,
    ClaimId.GRAPHS_CAPTURE: graphs.judge,
    ClaimId.MEMORY_ADMISSION: memory.judge,
    ClaimId.KV_RESTORE: kv.judge,
    ClaimId.THROUGHPUT_SUSTAINED: throughput.judge,
    ClaimId.SERVICE_ERRORS: errors.judge,
}


def derive(source: Source, profile: Profile) -> tuple[Claim, ...]:
    """Every claim, in the order of ClaimId. `run` and `review` call this same function."""
    return tuple(_derive(Evidence(source), profile, claim) for claim in ClaimId)


def _derive(evidence: Evidence, profile: Profile, claim: ClaimId) -> Claim:
    if claim not in (*profile.claims.required, *profile.claims.optional):
        return _unmeasured(
            evidence,
            profile,
            claim,
            Status.NOT_RUN,
            ReasonCode.NOT_IN_PROFILE,
            "not asked for by the profile",
        )
    judge = JUDGES.get(claim)
    if judge is None:
        return _unmeasured(
            evidence, profile, claim, Status.NOT_RUN, ReasonCode.NOT_SUPPORTED, "this harness cannot judge it"
        )
    try:
        judgement = judge(evidence, profile)
    except MissingEvidence as error:
        status, code = _why_missing(evidence)
        return _unmeasured(evidence, profile, claim, status, code, str(error))
    except EvidenceError as error:
        return _unmeasured(evidence, profile, claim, Status.ERROR, ReasonCode.PARSE_FAILED, str(error))
    except Exception as error:  # evidence may be hostile, and one defect must not cost the other claims
        summary = f"the judge failed: {type(error).__name__}: {error}"
        return _unmeasured(evidence, profile, claim, Status.ERROR, ReasonCode.PARSE_FAILED, summary)
    return _judged(evidence, profile, claim, judgement)


def _judged(evidence: Evidence, profile: Profile, claim: ClaimId, judgement: Judgement) -> Claim:
    status = worst(check.status for check in judgement.checks)
    codes = sorted({check.reason_code for check in judgement.checks if check.reason_code is not None})
    if not judgement.checks:
        codes = [ReasonCode.EVIDENCE_MISSING]
    measured = status in OBSERVED
    return Claim(
        id=claim,
        required=claim in profile.claims.required,
        status=status,
        reason_codes=tuple(codes),
        summary=judgement.summary,
        observed=judgement.observed if measured else None,
        expected=judgement.expected if measured else None,
        estimates=judgement.estimates if measured else (),
        checks=judgement.checks,
        evidence=evidence.references(),
    )


def _unmeasured(
    evidence: Evidence, profile: Profile, claim: ClaimId, status: Status, code: ReasonCode, summary: str
) -> Claim:
    return Claim(
        id=claim,
        required=claim in profile.claims.required,
        status=status,
        reason_codes=(code,),
        summary=summary,
        evidence=evidence.references(),
    )


def _why_missing(evidence: Evidence) -> tuple[Status, ReasonCode]:
    """A file is missing because the target cannot give it, because the run ended early, or for no good reason."""
    try:
        run = evidence.record(RUN, Run)
    except EvidenceError:
        return Status.ERROR, ReasonCode.EVIDENCE_MISSING
    if run.target.startswith("url:"):
        return Status.NOT_RUN, ReasonCode.NOT_PERMITTED
    if run.outcome is Outcome.INTERRUPTED:
        return Status.NOT_RUN, ReasonCode.INTERRUPTED
    if run.outcome is Outcome.FAILED:
        return Status.NOT_RUN, ReasonCode.CRASHED
    return Status.ERROR, ReasonCode.EVIDENCE_MISSING


__all__ = ["JUDGES", "Check", "Claim", "ClaimFunction", "ClaimId", "Judgement", "Status", "derive"]
