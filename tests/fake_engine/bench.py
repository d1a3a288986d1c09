# SPDX-License-Identifier: Apache-2.0
"""Runs the serve, prefill and throughput probes against the stand-in engine and judges what they wrote."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from qualify import profiles
from qualify.claims.derive import derive
from qualify.claims.model import Claim, ClaimId
from qualify.evidence import EvidenceWriter, FolderSource
from qualify.http import Client
from qualify.load.ceiling import Ceiling
from qualify.probes import prefill, serve, throughput
from qualify.probes.workers import WORKERS, WorkerReport
from qualify.profiles import Boot, Probe, Profile
from qualify.records import RUN, Harness, Outcome, Run, boot_folder
from qualify.session import Session

from fake_engine.engine import SOUND, Faults
from fake_engine.server import FakeEngine

CLOCK = "2026-11-30T06:00:00Z"
PROBES = {Probe.SERVE: serve.collect, Probe.PREFILL: prefill.collect, Probe.THROUGHPUT: throughput.collect}


def run_record(target: str = "local", outcome: Outcome = Outcome.COMPLETED) -> Run:
    harness = Harness(version="0", git_commit=None, clean=None)
    return Run(harness=harness, target=target, started_at=CLOCK, finished_at=CLOCK, outcome=outcome, phases=())


def only(profile: Profile, claim: ClaimId) -> Profile:
    return profile.model_copy(update={"claims": profile.claims.model_copy(update={"required": (claim,)})})


def judged(root: Path, profile: Profile, claim: ClaimId) -> Claim:
    """One claim, through the same `derive` as a run."""
    return next(one for one in derive(FolderSource(root), only(profile, claim)) if one.id is claim)


class Bench(NamedTuple):
    """A profile with one or two boots, and the folder their evidence goes to."""

    profile: Profile
    root: Path
    step_seconds: float

    def visit(self, name: str, faults: Faults = SOUND) -> None:
        """One boot of the stand-in, its workers and all its probes. Raises what the probes raise."""
        index, boot = next(pair for pair in enumerate(self.profile.boots, 1) if pair[1].name == name)
        evidence = EvidenceWriter(self.root).below(boot_folder(index, boot.name))
        drafter = self.profile.speculation.tokens if boot.speculation else None
        with (
            FakeEngine(drafter=drafter, faults=faults, step_seconds=self.step_seconds) as engine,
            Client(engine.url, evidence.path("requests.jsonl"), boot.name, timeout=5.0) as client,
        ):
            session = Session(
                profile=self.profile,
                boot=boot,
                engine=client,
                cache=None,
                storage=None,
                model="fake",
                extension=True,
                evidence=evidence,
                progress=lambda text: None,
            )
            self.finish()
            evidence.records(WORKERS, [WorkerReport.model_validate(one) for one in engine.workers()])
            for probe in boot.probes:
                client.phase = probe.value
                PROBES[probe](session)

    def finish(self, target: str = "local") -> None:
        EvidenceWriter(self.root).record(RUN, run_record(target))

    def claim(self, claim: ClaimId) -> Claim:
        return judged(self.root, self.profile, claim)


MakeBench = Callable[..., Bench]


def make_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeBench:
    """Makes a bench of short windows; the client's ceiling is given, because its measurement has tests of its own."""
    monkeypatch.setattr(throughput, "FINE_SAMPLE_SECONDS", 0.02)
    monkeypatch.setattr(throughput, "IDLE_SECONDS", 0.5)
    monkeypatch.setattr(throughput.ceiling, "measure", lambda url, c, supply, s: ceiling_of(c))

    def make(
        *boots: Boot,
        drafter: str = "dspark",
        concurrency: tuple[int, ...] = (1,),
        step_seconds: float = 0.0002,
        **plan: float,
    ) -> Bench:
        base = profiles.load("cpu-smoke")
        load = {"concurrency": concurrency, "window_seconds": 0.6, "prompt_tokens": 8, "output_tokens": 48}
        return Bench(
            base.model_copy(
                update={
                    "boots": boots,
                    "speculation": base.speculation.model_copy(update={"method": drafter}),
                    "throughput": base.throughput.model_copy(update={**load, "batches": 5, **plan}),
                    "timeouts": base.timeouts.model_copy(update={"request_seconds": 5.0}),
                }
            ),
            tmp_path / "evidence",
            step_seconds,
        )

    return make


def patience(faults: Faults) -> float:
    """Seconds without a token until a stall: few where that is the fault, else more than a busy machine takes."""
    return 0.9 if faults.stall_seconds else 5.0


def ceiling_of(concurrency: int) -> Ceiling:
    return Ceiling(concurrency=concurrency, seconds=1.0, tokens=1_000_000, tokens_per_second=1e6)
