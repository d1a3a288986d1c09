# SPDX-License-Identifier: Apache-2.0
"""The lattice from claims to result, coverage and exit status."""

from __future__ import annotations

import itertools

import pytest
from qualify.claims.model import OBSERVED, Claim, ClaimId, EvidenceRef, Status, passed
from qualify.reasons import ReasonCode
from qualify.receipt import verdict
from qualify.receipt.model import Coverage, Result
from qualify.records import Gpu, Harness, Host, Outcome, Run

CPU_HOST = Host(kernel="6", cpu_model="x", cores=2, memory_bytes=1, python="3.11")
GPU_HOST = CPU_HOST.model_copy(update={"gpus": (Gpu(uuid_hash="0", name="H200", memory_bytes=1, driver="580"),)})


def run(outcome: Outcome = Outcome.COMPLETED, clean: bool | None = True, target: str = "local") -> Run:
    harness = Harness(version="1", git_commit="c", clean=clean)
    return Run(harness=harness, target=target, started_at="", finished_at="", outcome=outcome, phases=())


def claim(status: Status, *, required: bool = True, code: ReasonCode = ReasonCode.CRASHED, name: str = "pins") -> Claim:
    measured = status in OBSERVED
    return Claim(
        id=ClaimId(name),
        required=required,
        status=status,
        reason_codes=() if status is Status.PASSED else (code,),
        summary="",
        observed={} if measured else None,
        checks=(passed("rule"),) if measured else (),
        evidence=(EvidenceRef(path="a", sha256="0" * 64),) if measured else (),
    )


RESULT_OF_REQUIRED = {
    Status.PASSED: Result.PASSED,
    Status.FAILED: Result.FAILED,
    Status.INCONCLUSIVE: Result.FAILED,
    Status.SKIPPED: Result.FAILED,
    Status.INVALID: Result.INVALID,
    Status.ERROR: Result.INVALID,
    Status.NOT_RUN: Result.INVALID,
}


@pytest.mark.parametrize("status", Status)
def test_a_required_claim_decides(status: Status) -> None:
    """Only `passed` passes; what was measured and not shown to hold fails; what was not measured is invalid."""
    found, reasons = verdict.result((claim(status),), run())
    assert found is RESULT_OF_REQUIRED[status]
    assert bool(reasons) == (found is not Result.PASSED)


@pytest.mark.parametrize("statuses", list(itertools.combinations(Status, 2)))
def test_failed_outranks_invalid_outranks_passed(statuses: tuple[Status, Status]) -> None:
    """The worse of two required claims gives the result."""
    order = (Result.FAILED, Result.INVALID, Result.PASSED)
    worse = min((RESULT_OF_REQUIRED[status] for status in statuses), key=order.index)
    assert verdict.result(tuple(claim(status) for status in statuses), run())[0] is worse


@pytest.mark.parametrize("status", [status for status in Status if status is not Status.PASSED])
def test_an_optional_claim_of_the_profile_warns(status: Status) -> None:
    """An optional claim that did not pass caps the result at WARNED."""
    claims = (claim(Status.PASSED), claim(status, required=False, name="op.contract"))
    assert verdict.result(claims, run())[0] is Result.WARNED


def test_a_claim_outside_of_the_profile_has_no_say() -> None:
    """not_in_profile is no warning."""
    other = claim(Status.NOT_RUN, required=False, code=ReasonCode.NOT_IN_PROFILE, name="op.contract")
    assert verdict.result((claim(Status.PASSED), other), run()) == (Result.PASSED, ())


@pytest.mark.parametrize("clean", [False, None])
def test_a_harness_that_is_not_clean_warns(clean: bool | None) -> None:
    """`clean` other than true, also unknown, caps the result at WARNED."""
    found, reasons = verdict.result((claim(Status.PASSED),), run(clean=clean))
    assert (found, [reason.reason_code for reason in reasons]) == (Result.WARNED, [ReasonCode.DIRTY_HARNESS])


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.INTERRUPTED])
def test_a_run_that_ended_early_never_passes(outcome: Outcome) -> None:
    """Also if every required claim passed before it ended."""
    assert verdict.result((claim(Status.PASSED),), run(outcome))[0] is Result.INVALID


def test_nothing_required_proves_nothing() -> None:
    """A receipt without a required claim is not passed."""
    assert verdict.result((claim(Status.PASSED, required=False),), run())[0] is Result.INVALID


ALL_PASSED = tuple(claim(Status.PASSED, name=name) for name in ClaimId)


@pytest.mark.parametrize(
    ("claims", "host", "target", "expected"),
    [
        (ALL_PASSED, GPU_HOST, "local", Coverage.FULL),
        (ALL_PASSED, CPU_HOST, "local", Coverage.SMOKE),
        (ALL_PASSED, None, "local", Coverage.SMOKE),
        (ALL_PASSED, GPU_HOST, "url:http://127.0.0.1:1", Coverage.SMOKE),
        (ALL_PASSED[:-1], GPU_HOST, "local", Coverage.PARTIAL),
        (ALL_PASSED[1:], GPU_HOST, "local", Coverage.SMOKE),
        ((claim(Status.FAILED),), GPU_HOST, "local", Coverage.NONE),
    ],
)
def test_coverage_follows_from_claims_and_hardware(
    claims: tuple[Claim, ...], host: Host | None, target: str, expected: Coverage
) -> None:
    """Full needs every claim on a GPU that the harness itself saw beside the engine."""
    assert verdict.coverage(claims, run(target=target), host) is expected
