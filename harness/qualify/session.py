# SPDX-License-Identifier: Apache-2.0
"""What a probe is given: one booted engine, where to write, and how to report progress."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from qualify.evidence import EvidenceWriter
from qualify.http import Client
from qualify.load.client import Reply
from qualify.profiles import Boot, Profile


@dataclass(frozen=True)
class Session:
    profile: Profile
    boot: Boot
    engine: Client
    """The vLLM server."""
    cache: Client | None
    """The HTTP interface of the LMCache server, if the boot has one."""
    storage: Path | None
    """The folder of the LMCache file tier, if the harness can see it."""
    model: str
    """The name under which the engine serves the model."""
    extension: bool
    """Whether the worker extension `qualify.inside.worker` is loaded, so that `engine.rpc` works."""
    evidence: EvidenceWriter
    """Writes below this boot's evidence folder."""
    progress: Callable[[str], None]
    """Shows one short line; carries no evidence."""
    gpus: tuple[str, ...] = ()
    """UUIDs of the GPUs that the engine runs on, if the harness chose them."""

    def note(self, path: str, reply: Reply) -> None:
        """Write down a request that the load's client made, just after it ended."""
        began = time.monotonic() - (reply.times.ended - reply.times.sent)
        self.engine.record("POST", path, began, reply.answer.status, reply.answer.error)


class ProbeFunction(Protocol):
    def __call__(self, session: Session) -> None:
        """Collect evidence. Never judges; raises TargetError when the engine fails."""
        ...
