# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from qualify import doctor, profiles
from qualify.doctor import Facts, Severity

PROFILE = profiles.load("cpu-smoke")
GIB = 2**30


def facts(**changes: Any) -> Facts:
    """A host that can run everything, but for the changes."""
    able = {
        "system": "linux",
        "machine": "x86_64",
        "cores": 2,
        "memory_bytes": 16 * GIB,
        "free_bytes": 20 * 10**9,
        "shm_bytes": 8 * GIB,
        "pythons": ("3.11",),
        "compiler": "/usr/bin/c++",
        "docker": "daemon 26",
        "docker_problem": None,
        "gpus": ("NVIDIA H200", "NVIDIA H200"),
        "driver": "580.1",
        "engine_installed": False,
    }
    return Facts(**{**able, **changes})


def test_an_able_host_has_nothing_to_remedy() -> None:
    """Where nothing is missing, every finding is ok and no remedy is given."""
    findings = doctor.diagnose(facts())
    assert {finding.severity for finding in findings} == {Severity.OK}
    assert not any(finding.remedy for finding in findings)
    assert doctor.unable(PROFILE, facts()) is None


@pytest.mark.parametrize(
    ("changes", "subject"),
    [
        ({"system": "darwin"}, "platform"),
        ({"machine": "aarch64"}, "platform"),
        ({"cores": 1}, "CPU cores"),
        ({"memory_bytes": 8 * GIB - 1}, "memory"),
        ({"free_bytes": 5 * 10**9}, "disk"),
        ({"free_bytes": 10**9, "engine_installed": True}, "disk"),
        ({"shm_bytes": 64 * 2**20}, "/dev/shm"),
        ({"shm_bytes": None}, "/dev/shm"),
        ({"pythons": ()}, "Python"),
        ({"compiler": None}, "C++ compiler"),
    ],
)
def test_what_blocks_is_refused_with_a_remedy(changes: dict[str, Any], subject: str) -> None:
    """Each lack that keeps the CPU engine from running blocks, alone, and says what to do."""
    blocking = [item for item in doctor.diagnose(facts(**changes)) if item.severity is Severity.BLOCKING]
    assert [item.subject for item in blocking] == [subject]
    assert blocking[0].remedy
    assert doctor.unable(PROFILE, facts(**changes)) == blocking[0]


@pytest.mark.parametrize(
    "changes", [{"gpus": (), "driver": None}, {"docker": None}, {"compiler": None, "engine_installed": True}]
)
def test_what_only_others_need_does_not_block(changes: dict[str, Any]) -> None:
    """Without GPUs, Docker, or a compiler once the engine is built, the CPU profile still runs; each is named."""
    findings = doctor.diagnose(facts(**changes))
    assert [item.severity for item in findings].count(Severity.MISSING) == 1
    assert doctor.unable(PROFILE, facts(**changes)) is None


def test_an_installed_engine_needs_no_python_and_less_disk() -> None:
    """Once the engine is there, what its installation needed is no longer asked for."""
    assert doctor.unable(PROFILE, facts(pythons=(), free_bytes=3 * 10**9, engine_installed=True)) is None


def test_a_cuda_profile_needs_a_gpu_for_each_rank() -> None:
    """A CUDA profile on a host with one GPU is refused, with both numbers."""
    cuda = PROFILE.model_copy(update={"engine": PROFILE.engine.model_copy(update={"kind": "cuda"})})
    refused = doctor.unable(cuda, facts(gpus=("NVIDIA H200",)))
    assert refused is not None
    assert "needs 2 NVIDIA GPUs, 1 are visible" in refused.observed
    assert doctor.unable(cuda, facts()) is None


def test_this_host_can_be_examined(tmp_path: Path) -> None:
    """Looking at a real host gives one finding per subject, the same in text and JSON."""
    findings = doctor.examine(tmp_path / "not" / "there")
    assert len({finding.subject for finding in findings}) == len(findings)
    text = doctor.render(findings)
    assert all(finding.observed in text for finding in findings)
    assert [item["subject"] for item in json.loads(doctor.render_json(findings))] == [f.subject for f in findings]
