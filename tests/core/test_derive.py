# SPDX-License-Identifier: Apache-2.0
"""Derivation: the lattice of statuses, and what becomes of a claim without evidence."""

from __future__ import annotations

import pytest
from pydantic import ValidationError
from qualify import profiles
from qualify.claims import derive as claims
from qualify.claims.model import SEVERITY, Check, Claim, ClaimId, Judgement, Status, check, equal, passed, worst
from qualify.errors import EvidenceError
from qualify.evidence import Evidence, MappingSource
from qualify.profiles import Profile
from qualify.reasons import CATALOGUE, ReasonCode
from qualify.records import RUN, Failure, Harness, Outcome, Run

PROFILE = profiles.load("cpu-smoke")


def run_record(outcome: Outcome, target: str = "local") -> bytes:
    failure = None if outcome is Outcome.COMPLETED else Failure(phase="x", message="y")
    return (
        Run(
            harness=Harness(version="1", git_commit=None, clean=None),
            target=target,
            started_at="2026-01-01T00:00:00Z",
            finished_at="2026-01-01T00:00:01Z",
            outcome=outcome,
            failure=failure,
            phases=(),
        )
        .model_dump_json()
        .encode()
    )


def test_every_claim_is_always_there() -> None:
    """Without any evidence, no claim passes and none is left out."""
    derived = claims.derive(MappingSource({}), PROFILE)
    assert [claim.id for claim in derived] == list(ClaimId)
    assert all(claim.status is not Status.PASSED for claim in derived)
    assert all(claim.reason_codes for claim in derived)


@pytest.mark.parametrize(
    ("outcome", "target", "status", "code"),
    [
        (Outcome.COMPLETED, "local", Status.ERROR, ReasonCode.EVIDENCE_MISSING),
        (Outcome.INTERRUPTED, "local", Status.NOT_RUN, ReasonCode.INTERRUPTED),
        (Outcome.FAILED, "local", Status.NOT_RUN, ReasonCode.CRASHED),
        (Outcome.COMPLETED, "url:http://127.0.0.1:8000", Status.NOT_RUN, ReasonCode.NOT_PERMITTED),
    ],
)
def test_missing_evidence_is_explained_by_the_run(
    outcome: Outcome, target: str, status: Status, code: ReasonCode
) -> None:
    """A required claim without evidence says whether the run, the target or a defect is to blame."""
    derived = claims.derive(MappingSource({RUN: run_record(outcome, target)}), PROFILE)
    kv = next(claim for claim in derived if claim.id is ClaimId.KV_RESTORE)
    assert (kv.status, kv.reason_codes) == (status, (code,))


def test_a_claim_nobody_asked_for_is_not_run() -> None:
    """Claims outside the profile are listed with their reason, never silently absent."""
    derived = claims.derive(MappingSource({}), PROFILE)
    graphs = next(claim for claim in derived if claim.id is ClaimId.GRAPHS_CAPTURE)
    assert (graphs.status, graphs.reason_codes) == (Status.NOT_RUN, (ReasonCode.NOT_IN_PROFILE,))


@pytest.mark.parametrize(
    ("judgement", "status"),
    [
        (Judgement(checks=(), summary="nothing compared"), Status.ERROR),
        (Judgement(checks=(passed("a"),), summary=""), Status.PASSED),
        (
            Judgement(
                checks=(passed("a"), check("b", False, ReasonCode.CRASHED, otherwise=Status.INCONCLUSIVE)), summary=""
            ),
            Status.INCONCLUSIVE,
        ),
    ],
)
def test_the_worst_check_decides(judgement: Judgement, status: Status, monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim is as good as its worst check, and no check at all is an error."""

    def judge(evidence: Evidence, profile: Profile) -> Judgement:
        evidence.bytes("a")
        return judgement

    monkeypatch.setitem(claims.JUDGES, ClaimId.PINS, judge)
    pins = claims.derive(MappingSource({"a": b"1"}), PROFILE)[0]
    assert pins.status is status
    assert [reference.path for reference in pins.evidence] == ["a"]


def test_unreadable_evidence_is_an_error_not_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim whose evidence cannot be parsed is `error` with its own code."""

    def judge(evidence: Evidence, profile: Profile) -> Judgement:
        raise EvidenceError("evidence x is not a Y")

    monkeypatch.setitem(claims.JUDGES, ClaimId.PINS, judge)
    pins = claims.derive(MappingSource({}), PROFILE)[0]
    assert (pins.status, pins.reason_codes) == (Status.ERROR, (ReasonCode.PARSE_FAILED,))


def test_unknown_is_never_equal() -> None:
    """An observed None fails an equality, even against None."""
    assert equal("x", None, None, ReasonCode.METRIC_MISSING).status is Status.FAILED


def test_failed_outranks_everything() -> None:
    """A broken rule that was measured stays broken, whatever else could not be measured."""
    assert worst(SEVERITY) is Status.FAILED
    assert worst([]) is Status.ERROR


@pytest.mark.parametrize(
    "fields",
    [
        {"status": Status.PASSED, "reason_codes": (ReasonCode.CRASHED,)},
        {"status": Status.FAILED, "reason_codes": ()},
        {"status": Status.PASSED, "observed": None},
        {"status": Status.PASSED, "evidence": ()},
        {"status": Status.PASSED, "checks": ()},
        {"status": Status.ERROR, "reason_codes": (ReasonCode.CRASHED,), "observed": {}},
    ],
)
def test_the_presence_table_is_enforced(fields: dict[str, object]) -> None:
    """A claim whose fields contradict its status cannot be built, so it cannot be read either."""
    good: dict[str, object] = {
        "id": ClaimId.PINS,
        "required": True,
        "status": Status.PASSED,
        "summary": "",
        "observed": {},
        "checks": (passed("a"),),
        "evidence": ({"path": "a", "sha256": "0" * 64},),
    }
    Claim.model_validate(good)
    with pytest.raises(ValidationError):
        Claim.model_validate(good | fields)


def test_a_check_has_a_reason_unless_it_passed() -> None:
    """Reason codes belong to every status but `passed`."""
    with pytest.raises(ValidationError):
        Check(name="a", status=Status.FAILED)
    with pytest.raises(ValidationError):
        Check(name="a", status=Status.PASSED, reason_code=ReasonCode.CRASHED)


def test_every_reason_code_is_explained() -> None:
    """The catalogue covers the enum exactly."""
    assert set(ReasonCode) == set(CATALOGUE)
    assert all(entry.meaning and entry.remedy for entry in CATALOGUE.values())
