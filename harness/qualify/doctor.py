# SPDX-License-Identifier: Apache-2.0
"""The doctor: what this host can run, and what is missing, each with its remedy.

`observe` looks at the host, `diagnose` turns what was seen into findings, `render` shows them; only the first touches
the machine.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from enum import StrEnum
from pathlib import Path

import psutil
from pydantic import TypeAdapter

from qualify import gpus
from qualify.environment import ENGINE_LOCK, NEEDED_BYTES, PYTHONS, TORCH_LOCK, lock_digest, version_with_venv
from qualify.errors import PreflightError
from qualify.model import Record
from qualify.profiles import Profile

MIN_MEMORY_BYTES = 8 * 2**30
"""Two workers, the engine's core, the server and a cache server. Assumed: the peak of cpu-smoke was not measured."""

RUN_BYTES = 2 * 10**9
"""Disk for one run beside the engine: cache storage and evidence."""

SHM_BYTES = 2 * 2**30
"""/dev/shm for the KV memory that engine and cache server share."""


class Severity(StrEnum):
    OK = "ok"
    MISSING = "missing"
    """Something that only some targets need is not there."""
    BLOCKING = "blocking"
    """The local CPU engine cannot run."""


class Finding(Record):
    subject: str
    severity: Severity
    observed: str
    remedy: str = ""


class Facts(Record):
    """What was seen of the host; None where it is not there."""

    system: str
    machine: str
    cores: int
    memory_bytes: int
    free_bytes: int
    shm_bytes: int | None
    pythons: tuple[str, ...]
    """Supported versions that can make virtual environments."""
    compiler: str | None
    docker: str | None
    docker_problem: str | None
    gpus: tuple[str, ...]
    gpu_users: tuple[str, ...] = ()
    """Processes on the GPUs, as far as the driver shows them."""
    driver: str | None
    engine_installed: bool


def examine(cache: Path) -> tuple[Finding, ...]:
    """Look at this host and say what it can run."""
    return diagnose(observe(cache))


def refuse_if_unable(profile: Profile, cache: Path) -> None:
    """Raises PreflightError with the first reason why this host cannot run the profile; starts nothing."""
    if reason := unable(profile, observe(cache)):
        raise PreflightError(reason.observed, remedy=reason.remedy)


def unable(profile: Profile, facts: Facts) -> Finding | None:
    """The first finding that keeps the profile from running, None if there is none."""
    ranks = profile.engine.tensor_parallel
    if profile.engine.kind == "cuda" and len(facts.gpus) < ranks:
        return Finding(
            subject="GPUs",
            severity=Severity.BLOCKING,
            observed=f"profile {profile.name} needs {ranks} NVIDIA GPUs, {len(facts.gpus)} are visible",
            remedy="run on such a host, or use the profile cpu-smoke",
        )
    if profile.engine.kind == "cuda":
        return None  # what follows is about the CPU engine, which is installed here
    if facts.cores < ranks:
        return _cores(facts, ranks)
    return next((finding for finding in diagnose(facts) if finding.severity is Severity.BLOCKING), None)


def diagnose(facts: Facts) -> tuple[Finding, ...]:
    """One finding per subject, the blocking subjects first."""
    return (
        _platform(facts),
        _cores(facts, 2),
        _memory(facts),
        _disk(facts),
        _shared_memory(facts),
        _python(facts),
        _compiler(facts),
        _docker_daemon(facts),
        _gpus(facts),
    )


def render(findings: tuple[Finding, ...]) -> str:
    """A table for people: subject, severity in words, what was seen, and the remedy below what is not ok."""
    width = max(len(finding.subject) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.severity.value:<8}  {finding.subject:<{width}}  {finding.observed}")
        if finding.remedy:
            lines.append(f"{'':<8}  {'':<{width}}  → {finding.remedy}")
    blocked = [finding.subject for finding in findings if finding.severity is Severity.BLOCKING]
    verdict = f"cannot run the CPU engine here: {', '.join(blocked)}" if blocked else "can run the CPU engine here"
    return "\n".join([*lines, "", verdict])


def render_json(findings: tuple[Finding, ...]) -> str:
    return TypeAdapter(tuple[Finding, ...]).dump_json(findings, indent=1, by_alias=True).decode()


def observe(cache: Path) -> Facts:
    """Look at the machine; takes a second at most and changes nothing."""
    seen = gpus.observe()
    docker, problem = _docker()
    return Facts(
        system=sys.platform,
        machine=platform.machine(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=_memory_limit(),
        free_bytes=shutil.disk_usage(_existing(cache)).free,
        shm_bytes=shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else None,
        pythons=_pythons(),
        compiler=shutil.which(os.environ.get("CXX", "g++")),
        docker=docker,
        docker_problem=problem,
        gpus=tuple(gpu.record.name for gpu in seen),
        gpu_users=tuple(f"{user.name} (pid {user.pid})" for user in (gpus.users() or ()) if seen),
        driver=seen[0].record.driver if seen else None,
        engine_installed=_engine_installed(cache),
    )


def _finding(subject: str, holds: bool, observed: str, remedy: str, otherwise: Severity = Severity.BLOCKING) -> Finding:
    if holds:
        return Finding(subject=subject, severity=Severity.OK, observed=observed)
    return Finding(subject=subject, severity=otherwise, observed=observed, remedy=remedy)


def _platform(facts: Facts) -> Finding:
    return _finding(
        "platform",
        facts.system == "linux" and facts.machine == "x86_64",
        observed=f"{facts.system} {facts.machine}",
        remedy="the CPU engine is locked for x86-64 Linux; use --target url: for a server elsewhere",
    )


def _cores(facts: Facts, needed: int) -> Finding:
    return _finding(
        "CPU cores",
        facts.cores >= needed,
        observed=f"{facts.cores} usable, {needed} needed (one a rank)",
        remedy="use a machine with more cores, or widen the CPU affinity of this shell",
    )


def _memory(facts: Facts) -> Finding:
    return _finding(
        "memory",
        facts.memory_bytes >= MIN_MEMORY_BYTES,
        observed=f"{facts.memory_bytes / 2**30:.1f} GiB, {MIN_MEMORY_BYTES / 2**30:.0f} GiB needed",
        remedy="use a machine with more memory, or raise the control group's limit",
    )


def _disk(facts: Facts) -> Finding:
    needed = RUN_BYTES + (0 if facts.engine_installed else NEEDED_BYTES)
    return _finding(
        "disk",
        facts.free_bytes >= needed,
        observed=f"{facts.free_bytes / 1e9:.1f} GB free for the cache, {needed / 1e9:.0f} GB needed",
        remedy="free space, or set QUALIFY_CACHE to a folder on a larger disk",
    )


def _shared_memory(facts: Facts) -> Finding:
    holds = facts.shm_bytes is not None and facts.shm_bytes >= SHM_BYTES
    seen = "not there" if facts.shm_bytes is None else f"{facts.shm_bytes / 2**30:.1f} GiB free"
    return _finding(
        "/dev/shm",
        holds,
        observed=f"{seen}, {SHM_BYTES / 2**30:.0f} GiB needed",
        remedy="remount it larger (in a container: --shm-size 4g), or remove what fills it",
    )


def _python(facts: Facts) -> Finding:
    return _finding(
        "Python",
        bool(facts.pythons) or facts.engine_installed,
        observed=", ".join(facts.pythons) or f"none of {', '.join(PYTHONS)} with venv and ensurepip",
        remedy="install one, on Debian and Ubuntu with its python3-venv package",
    )


def _compiler(facts: Facts) -> Finding:
    """Needed once, to build the plugin into the engine."""
    return _finding(
        "C++ compiler",
        facts.compiler is not None,
        observed=facts.compiler or "none",
        remedy="install g++ (C++20), or name another compiler in CXX",
        otherwise=Severity.MISSING if facts.engine_installed else Severity.BLOCKING,
    )


def _docker_daemon(facts: Facts) -> Finding:
    return _finding(
        "Docker",
        facts.docker is not None,
        observed=facts.docker or "not usable",
        remedy=facts.docker_problem or "install Docker, to build and run images",
        otherwise=Severity.MISSING,
    )


def _gpus(facts: Facts) -> Finding:
    used = f"; used by {', '.join(facts.gpu_users)}" if facts.gpu_users else ""
    return _finding(
        "NVIDIA GPUs",
        bool(facts.gpus) and not facts.gpu_users,
        observed=f"{', '.join(facts.gpus)}; driver {facts.driver}{used}" if facts.gpus else "none",
        remedy="end what uses them"
        if facts.gpus
        else "claims about CUDA graphs and GPU memory need them and their driver",
        otherwise=Severity.MISSING,
    )


def _memory_limit() -> int:
    """Bytes of memory, or the control group's limit where that is lower."""
    total = psutil.virtual_memory().total
    for path in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            return min(total, int(text))
    return total


def _existing(folder: Path) -> Path:
    """The folder, or its nearest parent that is there."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def _pythons() -> tuple[str, ...]:
    names = (sys.executable, *(f"python{version}" for version in PYTHONS), "python3")
    found = {version_with_venv(path) for path in map(shutil.which, names) if path}
    return tuple(version for version in PYTHONS if version in found)


def _engine_installed(cache: Path) -> bool:
    try:
        digest = lock_digest((TORCH_LOCK, ENGINE_LOCK))
    except PreflightError:
        return False
    return (cache / f"engine-cpu-{digest[:12]}" / "complete").is_file()


def _docker() -> tuple[str | None, str | None]:
    """The daemon's version, or why there is none."""
    client = shutil.which("docker")
    if client is None:
        return None, None
    status, output = _ask([client, "version", "--format", "{{.Server.Version}}"])
    if status == 0:
        return f"daemon {output}", None
    return None, "a client is there, but no daemon answers it: start Docker, or join its group"


def _ask(argv: list[str]) -> tuple[int, str]:
    try:
        answer = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 127, ""
    return answer.returncode, answer.stdout.strip()
