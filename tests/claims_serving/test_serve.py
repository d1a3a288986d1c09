# SPDX-License-Identifier: Apache-2.0
"""serve.tp: a good server passes, and each fault gives its own reason code and no pass."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fake_engine import Faults
from qualify.claims.model import ClaimId, Status
from qualify.errors import TargetError
from qualify.profiles import Boot, Probe
from qualify.reasons import ReasonCode

PLAIN = Boot(name="control", probes=(Probe.SERVE,))
SPECULATIVE = Boot(name="speculative", speculation=True, probes=(Probe.SERVE,))
CODE = ReasonCode


def test_a_good_server_passes(bench: Callable) -> None:
    """Two boots, with and without drafter, whole evidence: passed, with the number of requests observed."""
    place = bench(PLAIN, SPECULATIVE)
    place.visit("control")
    place.visit("speculative")
    claim = place.claim(ClaimId.SERVE_TP)
    assert (claim.status, claim.reason_codes) == (Status.PASSED, ())
    assert claim.observed is not None
    assert claim.observed["worldSizes"] == [[2, 2], [2, 2]]
    assert claim.observed["requests"] == claim.observed["answered"] == 32
    assert claim.observed["degenerate"] == 0


@pytest.mark.parametrize(
    ("faults", "status", "codes"),
    [
        (Faults(ranks=1), Status.FAILED, {CODE.WORLD_SIZE_MISMATCH, CODE.RANK_MISSING}),
        (Faults(shared_core=True), Status.FAILED, {CODE.DEVICE_SHARED}),
        (Faults(listed_model="other"), Status.FAILED, {CODE.WRONG_MODEL}),
        (Faults(answer_model="other"), Status.FAILED, {CODE.WRONG_MODEL}),
        (Faults(refuse=5), Status.FAILED, {CODE.REQUEST_FAILED}),
        (Faults(fail=5), Status.FAILED, {CODE.REQUEST_FAILED}),
        (Faults(drop=2), Status.FAILED, {CODE.REQUEST_FAILED}),
        (Faults(early_stop=4), Status.FAILED, {CODE.REQUEST_FAILED, CODE.USAGE_MISMATCH}),
        (Faults(cut_stream=3), Status.FAILED, {CODE.STREAM_BROKEN}),
        (Faults(error_event=3), Status.FAILED, {CODE.STREAM_BROKEN}),
        (Faults(lose_text=True), Status.FAILED, {CODE.STREAM_BROKEN}),
        (Faults(usage_off=1), Status.FAILED, {CODE.USAGE_MISMATCH}),
        (Faults(no_usage=True), Status.FAILED, {CODE.USAGE_MISMATCH}),
        (Faults(moody=True), Status.INCONCLUSIVE, {CODE.OUTPUT_NOT_REPRODUCED}),
        (Faults(degenerate=True), Status.INCONCLUSIVE, {CODE.OUTPUT_DEGENERATE}),
    ],
    ids=lambda value: str(value) if isinstance(value, Faults) else "",
)
def test_each_fault_has_its_code(bench: Callable, faults: Faults, status: Status, codes: set[ReasonCode]) -> None:
    """One fault, one meaning: no other code beside it, and never a pass."""
    place = bench(PLAIN)
    place.visit("control", faults)
    claim = place.claim(ClaimId.SERVE_TP)
    assert (claim.status, set(claim.reason_codes)) == (status, codes)


def test_an_engine_that_dies_is_never_passed(bench: Callable) -> None:
    """The probe says that the engine is gone, keeps what was answered, and the claim fails on it."""
    place = bench(PLAIN)
    with pytest.raises(TargetError):
        place.visit("control", Faults(die_at_step=50))
    claim = place.claim(ClaimId.SERVE_TP)
    assert (claim.status, claim.reason_codes) == (Status.FAILED, (CODE.REQUEST_FAILED,))


@pytest.mark.parametrize("missing", ["workers.json", "serve.json"])
def test_without_evidence_there_is_no_pass(bench: Callable, missing: str) -> None:
    """A missing file of a boot that the profile promises is an error, in whichever boot it is missing."""
    place = bench(PLAIN, SPECULATIVE)
    place.visit("control")
    place.visit("speculative")
    (place.root / "boots/02-speculative" / missing).unlink()
    claim = place.claim(ClaimId.SERVE_TP)
    assert (claim.status, claim.reason_codes) == (Status.ERROR, (CODE.EVIDENCE_MISSING,))


def test_a_boot_that_left_nothing_is_missing(bench: Callable) -> None:
    """The profile's list of boots decides, not the folders that happen to be there."""
    place = bench(PLAIN, SPECULATIVE)
    place.visit("control")
    claim = place.claim(ClaimId.SERVE_TP)
    assert (claim.status, claim.reason_codes) == (Status.ERROR, (CODE.EVIDENCE_MISSING,))


def test_a_smaller_set_is_no_pass(bench: Callable) -> None:
    """Evidence without any chat request is not evidence for the whole set."""
    place = bench(PLAIN)
    place.visit("control")
    path = place.root / "boots/01-control/serve.json"
    path.write_text(path.read_text().replace("/v1/chat/completions", "/v1/completions"))
    claim = place.claim(ClaimId.SERVE_TP)
    assert (claim.status, claim.reason_codes) == (Status.ERROR, (CODE.EVIDENCE_MISSING,))


def test_from_outside_the_ranks_stay_unknown(bench: Callable) -> None:
    """A url: target can answer well and still not show its world size: inconclusive, and the claim says why."""
    place = bench(PLAIN, SPECULATIVE)
    place.visit("control")
    (place.root / "boots/01-control/workers.json").unlink()
    place.finish("url:http://127.0.0.1:1")
    claim = place.claim(ClaimId.SERVE_TP)
    assert (claim.status, claim.reason_codes) == (Status.INCONCLUSIVE, (CODE.NOT_PERMITTED,))
    assert "not visible" in claim.summary
