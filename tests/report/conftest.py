# SPDX-License-Identifier: Apache-2.0
"""A receipt with one claim of each status, and a folder with the evidence of one throughput cell."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from qualify import profiles
from qualify.claims.model import OBSERVED, Check, Claim, ClaimId, Estimate, EvidenceRef, Status
from qualify.evidence import EvidenceWriter, FolderSource
from qualify.load.ceiling import Ceiling
from qualify.probes.load_records import Cell, Sample
from qualify.reasons import ReasonCode
from qualify.receipt.build import assemble
from qualify.receipt.model import Digest, ManifestReference, Receipt
from qualify.records import Harness, Outcome, Phase, Run

HOSTILE = "<script>alert('x')</script> & \"quoted\" \x1b[31mred\x00 \u202e"
SCOPE = "control C2"


def cell(rates: list[float]) -> Cell:
    """A cell whose samples are a second apart and whose token counter grows by `rates`."""
    totals = [sum(rates[:count]) for count in range(len(rates) + 1)]
    samples = tuple(
        Sample(
            at=float(second),
            took=0.001,
            generation_tokens=total,
            steps=total / 2,
            drafts=None,
            draft_tokens=None,
            accepted_tokens=None,
            preemptions=0,
            running=2,
            waiting=0,
            process_start=1.0,
        )
        for second, total in enumerate(totals)
    )
    return Cell(
        boot="control",
        concurrency=2,
        window_began=0,
        window_ended=float(len(rates)),
        sample_seconds=1.0,
        samples=samples,
        requests=(),
        ceiling=Ceiling(concurrency=2, seconds=1, tokens=1000, tokens_per_second=1000),
        drained=True,
        failure=None,
    )


def claim(name: ClaimId, status: Status) -> Claim:
    measured = status in OBSERVED
    code = None if status is Status.PASSED else ReasonCode.CRASHED
    figure = Estimate(
        name="outputTokensPerSecond",
        unit="{token}/s",
        scope=SCOPE,
        point=10.04,
        low=9.5,
        high=10.58,
        method="batch means",
        replicates=10,
        replicate_unit="batch",
    )
    speed = measured and name is ClaimId.THROUGHPUT_SUSTAINED
    return Claim(
        id=name,
        required=True,
        status=status,
        reason_codes=(code,) if code else (),
        summary=f"{name} {HOSTILE}",
        observed={HOSTILE: HOSTILE} if measured else None,
        estimates=(figure,) if speed else (),
        checks=(Check(name=HOSTILE, status=status, reason_code=code, where=HOSTILE, observed=HOSTILE, expected=[1]),),
        evidence=(EvidenceRef(path="run.json", sha256="0" * 64),),
    )


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """Evidence of a run with one cell."""
    phases = (Phase(name=f"boot {HOSTILE}", began=0, seconds=3.0, outcome=Outcome.COMPLETED),)
    run = Run(
        harness=Harness(version="1", git_commit="c" * 40, clean=True),
        target="local",
        started_at="2026-01-01T00:00:00Z",
        finished_at="2026-01-01T00:05:00Z",
        outcome=Outcome.COMPLETED,
        phases=phases,
    )
    evidence = EvidenceWriter(tmp_path / "evidence")
    evidence.record("run.json", run)
    evidence.record("boots/01-control/throughput/c2.json", cell([9.0, 10.0, 11.0, 10.0]))
    return tmp_path


@pytest.fixture
def receipt_of(bundle: Path) -> Callable[..., Receipt]:
    """The receipt of the bundle with these claims; by default one of each status."""

    def make(claims: tuple[Claim, ...] | None = None) -> Receipt:
        statuses = [*Status, Status.PASSED, Status.NOT_RUN]
        spread = dict(zip(ClaimId, statuses, strict=True)) | {ClaimId.THROUGHPUT_SUSTAINED: Status.PASSED}
        found = claims or tuple(claim(name, status) for name, status in spread.items())
        bound = ManifestReference(digest=Digest(sha256="0" * 64), file_count=1, total_bytes=1)
        return assemble(FolderSource(bundle / "evidence"), profiles.load("cpu-smoke"), found, bound)

    return make
