# SPDX-License-Identifier: Apache-2.0
"""Facts about this host and this harness, observed, never declared."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import psutil

from qualify import __version__
from qualify.records import Harness, Host


def observe_host() -> Host:
    """The machine the harness runs on. No host name, address or user is taken."""
    return Host(
        kernel=platform.release(),
        cpu_model=_cpu_model(Path("/proc/cpuinfo")),
        cores=len(psutil.Process().cpu_affinity()),
        memory_bytes=psutil.virtual_memory().total,
        python=platform.python_version(),
    )


def observe_harness(folder: Path | None = None) -> Harness:
    """Version and git state of the harness's own code; commit and `clean` are None outside a git checkout."""
    folder = folder or Path(__file__).parent
    commit = _git(folder, "rev-parse", "HEAD")
    changes = _git(folder, "status", "--porcelain") if commit else None
    return Harness(
        version=__version__,
        git_commit=commit or None,
        clean=None if changes is None else not changes,
    )


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
