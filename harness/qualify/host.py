# SPDX-License-Identifier: Apache-2.0
"""Facts about this host and this harness, observed, never declared."""

from __future__ import annotations

import hashlib
import platform
import subprocess
from pathlib import Path

import psutil

from qualify import __version__, gpus
from qualify.model import Record
from qualify.records import Harness, Host


def observe_host() -> Host:
    """The machine the harness runs on. No host name, address or user is taken."""
    seen = gpus.observe()
    users = gpus.users() if seen else None
    return Host(
        kernel=platform.release(),
        cpu_model=_cpu_model(Path("/proc/cpuinfo")),
        cores=len(psutil.Process().cpu_affinity()),
        memory_bytes=psutil.virtual_memory().total,
        python=platform.python_version(),
        gpus=tuple(gpu.record for gpu in seen),
        gpu_links=gpus.observe_links(len(seen)) if seen else None,
        gpu_users=None if users is None else len(users),
    )


SOURCE = "harness.json"
"""Beside the package in a bundle: which revision it was made from."""


class Source(Record):
    """`digest` is over the package's files: a copy that was changed afterwards is not that revision."""

    git_commit: str | None
    clean: bool | None
    digest: str


def observe_harness(folder: Path | None = None) -> Harness:
    """Version and revision of the harness's own code: from its git checkout, or from what its bundle says of it.
    Commit and `clean` are None where neither tells."""
    folder = folder or Path(__file__).parent
    bundled = folder.parent / SOURCE
    if bundled.is_file():
        source = Source.model_validate_json(bundled.read_bytes())
        intact = source.digest == _digest(folder)
        return Harness(version=__version__, git_commit=source.git_commit, clean=source.clean and intact)
    source = source_record(folder)
    return Harness(version=__version__, git_commit=source.git_commit, clean=source.clean)


def source_record(folder: Path) -> Source:
    """What git says of the package in `folder`."""
    commit = _git(folder, "rev-parse", "HEAD")
    changes = _git(folder, "status", "--porcelain") if commit else None
    return Source(git_commit=commit or None, clean=None if changes is None else not changes, digest=_digest(folder))


def _digest(folder: Path) -> str:
    """sha256 over path and digest of every file of the package that is code or data, sorted."""
    files = [path for pattern in ("*.py", "*.toml", "*.css") for path in folder.rglob(pattern)]
    lines = (
        f"{path.relative_to(folder).as_posix()} {hashlib.sha256(path.read_bytes()).hexdigest()}\n" for path in files
    )
    return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()


def _cpu_model(cpuinfo: Path) -> str:
    for line in cpuinfo.read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
