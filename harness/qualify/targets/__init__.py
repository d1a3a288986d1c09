# SPDX-License-Identifier: Apache-2.0
"""Targets: how the engine under test is started, reached and stopped.

local.py      processes of our own: vLLM and, where the profile asks, `lmcache server`
endpoint.py   a server that already runs (`url:`): nothing is started, and no evidence from inside
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from qualify.evidence import EvidenceWriter
from qualify.profiles import Boot, Profile
from qualify.records import BootRecord, EngineEnvironment


@dataclass(frozen=True)
class Launch:
    """One boot to make."""

    profile: Profile
    boot: Boot
    index: int
    model: Path | None
    """The model directory; None where the target serves its own."""
    work: Path
    """Scratch folder of the whole run: cache storage, sockets. Removed by the caller after the run."""
    evidence: EvidenceWriter
    """Writes below this boot's evidence folder: engine.log and cache.log grow there while the boot runs."""


class Running(Protocol):
    """A boot that is ready: it has answered a health check and served a request."""

    engine_url: str
    cache_url: str | None
    storage: Path | None
    model: str
    """The name under which the engine serves the model."""
    extension: bool
    """Whether `qualify.inside.worker` is loaded and reachable."""
    gpus: tuple[str, ...]
    """UUIDs of the GPUs that it runs on; none if it has none or they are not known."""

    def died(self) -> str | None:
        """One line about a process that ended by itself, None while all run."""
        ...

    def stop(self) -> BootRecord:
        """SIGTERM, then SIGKILL; waits for every process; removes what they left. Safe to call twice."""
        ...


class Target(Protocol):
    label: str
    """As the receipt names it: local, url:..., image:..."""

    def environment(self) -> EngineEnvironment | None:
        """What is installed in the engine; None if that cannot be seen from outside."""
        ...

    def contract(self) -> bytes | None:
        """The JSON report of `vllm_qout.contract`, run in the engine's environment; None if the target cannot.

        Raises TargetError if the suite could not run; a suite with failed cases is evidence, not an error.
        """
        ...

    def boot(self, launch: Launch) -> Running:
        """Start and wait until ready. Raises TargetError with the phase and the engine's last lines; leaves nothing."""
        ...
