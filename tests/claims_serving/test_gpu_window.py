# SPDX-License-Identifier: Apache-2.0
"""throughput.sustained on GPUs: a speed counts only with the facts of its GPUs, and while nothing slowed them down."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_engine import cells
from fake_engine.bench import judged, run_record
from fake_engine.cells import Steps
from qualify import profiles
from qualify.claims.model import Claim, ClaimId, Status
from qualify.evidence import EvidenceWriter
from qualify.reasons import ReasonCode
from qualify.records import HOST, Gpu, GpuSample, Host

STEPS = Steps([200, 201, 199, 200] * 5)
GPU = Gpu(
    uuid_hash="0", name="H200", memory_bytes=1, driver="580", mig="Disabled", power_limit_watts=700.0, max_sm_mhz=1980.0
)
SAMPLE = GpuSample(
    at=1.0,
    uuid_hash="0",
    sm_mhz=1980.0,
    memory_mhz=3201.0,
    power_watts=300.0,
    celsius=50.0,
    busy_percent=97.0,
    throttles=(),
)


def judge(
    root: Path, gpus: tuple[Gpu, ...], samples: tuple[GpuSample, ...], kind: str = "cuda", ranks: int = 1
) -> Claim:
    boot = cells.boot()
    cells.write(root, boot, run_record(), STEPS, gpus=samples)
    host = Host(kernel="6", cpu_model="x", cores=2, memory_bytes=1, python="3.12.3", gpus=gpus)
    EvidenceWriter(root).record(HOST, host)
    profile = cells.profile_of(profiles.load("cpu-smoke"), boot, len(STEPS.steps) * STEPS.spacing)
    engine = profile.engine.model_copy(update={"kind": kind, "tensor_parallel": ranks})
    return judged(root, profile.model_copy(update={"engine": engine}), ClaimId.THROUGHPUT_SUSTAINED)


def verdict(claim: Claim) -> tuple[Status, set[ReasonCode]]:
    return claim.status, set(claim.reason_codes)


def test_a_known_and_free_gpu_passes(tmp_path: Path) -> None:
    """All facts are there and nothing was slowed down."""
    assert verdict(judge(tmp_path, (GPU,), (SAMPLE, SAMPLE))) == (Status.PASSED, set())


@pytest.mark.parametrize("fact", ["mig", "power_limit_watts", "max_sm_mhz"])
def test_an_unknown_fact_of_the_host_voids_the_speed(tmp_path: Path, fact: str) -> None:
    """Nobody can repeat a speed of a GPU whose limits are not known."""
    claim = judge(tmp_path, (GPU.model_copy(update={fact: None}),), (SAMPLE,))
    assert verdict(claim) == (Status.INVALID, {ReasonCode.ENVIRONMENT_INCOMPLETE})


@pytest.mark.parametrize("fact", ["sm_mhz", "memory_mhz", "power_watts", "throttles"])
def test_an_unknown_fact_of_the_window_voids_the_speed(tmp_path: Path, fact: str) -> None:
    """One sample without a clock is enough: the GPU may have been slow just then."""
    claim = judge(tmp_path, (GPU,), (SAMPLE, SAMPLE.model_copy(update={fact: None})))
    assert verdict(claim) == (Status.INVALID, {ReasonCode.ENVIRONMENT_INCOMPLETE})


@pytest.mark.parametrize(
    ("gpus", "samples", "ranks"),
    [((GPU,), (), 1), ((), (SAMPLE,), 1), ((GPU,), (SAMPLE,), 2)],
    ids=["not sampled", "unknown to the host", "one of two"],
)
def test_every_rank_needs_a_gpu_that_was_watched(tmp_path: Path, gpus: Any, samples: Any, ranks: int) -> None:
    """Samples and host agree on one GPU a rank."""
    claim = judge(tmp_path, gpus, samples, ranks=ranks)
    assert verdict(claim) == (Status.INVALID, {ReasonCode.ENVIRONMENT_INCOMPLETE})


def test_a_slowed_down_gpu_is_inconclusive(tmp_path: Path) -> None:
    """The engine may be faster than this: neither passed nor failed."""
    slow = SAMPLE.model_copy(update={"throttles": ("software power cap",)})
    assert verdict(judge(tmp_path, (GPU,), (SAMPLE, slow))) == (Status.INCONCLUSIVE, {ReasonCode.GPU_THROTTLED})


def test_an_engine_without_gpus_needs_none(tmp_path: Path) -> None:
    """On the CPU nothing is asked about GPUs."""
    assert verdict(judge(tmp_path, (), (), kind="cpu")) == (Status.PASSED, set())
