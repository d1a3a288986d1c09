# SPDX-License-Identifier: Apache-2.0
"""A fake engine environment, and ways to see what a boot leaves on the machine."""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from qualify import profiles
from qualify.environment import EngineEnv
from qualify.evidence import EvidenceWriter
from qualify.profiles import Boot, Profile, Storage
from qualify.targets import Launch
from qualify.targets.local import LocalTarget

FAKE = Path(__file__).with_name("fake_engine.py")


@dataclass(frozen=True)
class Fake:
    """One fake engine. Its token is in the environment and the segment names of all that it starts."""

    root: Path
    token: str
    target: LocalTarget

    def launch(self, *modes: str, cache: Storage = Storage.NONE, start_seconds: float = 20.0) -> Launch:
        boot = Boot(name="fake", cache=cache, probes=())
        return Launch(
            self._profile(modes, start_seconds), boot, 1, self.root / "model", self.root / "work", self.writer
        )

    @property
    def writer(self) -> EvidenceWriter:
        return EvidenceWriter(self.root / "evidence").below("boots/01-fake")

    def _profile(self, modes: tuple[str, ...], start_seconds: float) -> Profile:
        shipped = profiles.load("cpu-smoke")
        variables = {"FAKE_MODE": ",".join(modes), "FAKE_TOKEN": self.token}
        engine = shipped.engine.model_copy(update={"environment": variables})
        timeouts = shipped.timeouts.model_copy(update={"start_seconds": start_seconds, "stop_seconds": 5.0})
        return shipped.model_copy(update={"engine": engine, "timeouts": timeouts})

    def left(self) -> list[str]:
        """Processes, segments and scratch folders of this fake that exist now."""
        found = [str(path) for path in Path("/dev/shm").iterdir() if self.token in path.name]
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                environment = (entry / "environ").read_bytes()
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if self.token.encode() in environment and state != "Z":
                found.append(f"process {entry.name}")
        return found


def eventually(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    """Whether the condition becomes true; the bound only keeps a broken test from hanging."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return condition()


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[Fake]:
    python = tmp_path / "env" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{FAKE}" "$@"\n')
    python.chmod(0o755)
    for folder in ("model", "work", "evidence"):
        (tmp_path / folder).mkdir()
    target = LocalTarget(profiles.load("cpu-smoke"), EngineEnv(python, python.parents[1], None), lambda _: None)
    yield Fake(tmp_path, f"fake-{uuid.uuid4().hex}", target)
