# SPDX-License-Identifier: Apache-2.0
"""Kill tests on the real engine: whoever is killed, whenever, nothing is left and nothing passes.

Each test runs `qualify run` as a user would, with a short profile, and kills one process of it at a random moment of
the named stage. The seed is printed, so that a moment can be tried again: QUALIFY_SEED=N.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from qualify import profiles
from qualify.environment import cache_folder
from qualify.errors import ExitCode
from qualify.targets.supervisor import opened_segments

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]
SHM = Path("/dev/shm")

SEED = int(os.environ.get("QUALIFY_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)


def short_profile() -> str:
    """cpu-smoke with one boot, which has a cache and a load that is long enough to be hit."""
    text = (profiles.FOLDER / "cpu-smoke.toml").read_text()
    head, _, rest = text.partition("[[boots]]")
    rest = rest[rest.index("[kv]") :]
    boot = '[[boots]]\nname = "cold"\ncache = "empty"\nprobes = ["throughput"]\n\n'
    claims = 'required = ["pins", "throughput.sustained", "service.errors"]'
    return re.sub(r"required = \[.*?\]", claims, head + boot + rest, flags=re.DOTALL)


class Run:
    """`qualify run` in a process, with a cache folder that marks all its descendants as ours."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.out = folder / "out"
        self.random = random.Random(SEED)
        cache = folder / "cache"
        (cache / "models").mkdir(parents=True)
        for kept in (*cache_folder().glob("engine-*"), *cache_folder().glob("models/*")):
            (cache / kept.relative_to(cache_folder())).symlink_to(kept)
        (folder / "short.toml").write_text(short_profile())
        self.log = folder / "run.log"
        argv = [sys.executable, "-m", "qualify", "run", "--profile", str(folder / "short.toml"), "--out", str(self.out)]
        with self.log.open("wb") as log:
            environment = {**os.environ, "QUALIFY_CACHE": str(cache), "PYTHONPATH": str(ROOT / "harness")}
            self.process = subprocess.Popen(argv, env=environment, stdout=log, stderr=log, start_new_session=True)

    def descendants(self) -> dict[int, str]:
        """Command lines of all processes that run below our folder, by pid; the run itself is not among them."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                cwd = str((entry / "cwd").readlink())
            except OSError:
                continue
            ours = cwd.startswith(str(self.folder)) or str(self.folder) in words
            if ours and int(entry.name) not in (os.getpid(), self.process.pid):
                found[int(entry.name)] = words
        return found

    def segments(self) -> set[str]:
        """Shared-memory segments that our processes have open now."""
        return set().union(*(opened_segments(pid) for pid in self.descendants()))

    def wait_for(self, what: Callable[[], object], seconds: float = 420.0) -> None:
        deadline = time.monotonic() + seconds
        while not what():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.1)

    def victim(self, who: str) -> int:
        """The pid of `harness`, `vllm`, `worker` or `lmcache`."""
        if who == "harness":
            return self.process.pid
        patterns = {
            "vllm": r"vllm\.entrypoints\.cli\.main serve",
            "worker": r"VLLM::Worker|multiprocessing[.-]spawn",
            "lmcache": r"lmcache\.cli\.main server",
        }
        found: list[int] = []

        def look() -> bool:
            commands = {pid: words for pid, words in self.descendants().items() if "supervisor.py" not in words}
            found[:] = [pid for pid, words in commands.items() if re.search(patterns[who], words)]
            return bool(found)

        self.wait_for(look)
        return self.random.choice(found)

    def reach(self, stage: str) -> None:
        """Wait for a random moment of the stage."""
        mark, spread = {"boot": ("starting the engine", 25.0), "load": (": throughput", 10.0)}[stage]
        self.wait_for(lambda: mark in self.log.read_text())
        time.sleep(self.random.uniform(0.0, spread))

    def left(self, segments: set[str]) -> list[str]:
        names = {path.name for path in SHM.iterdir()}
        return [*self.descendants().values(), *sorted(segments & names)]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    print(f"QUALIFY_SEED={SEED}")
    started = Run(tmp_path)
    yield started
    started.process.kill()
    started.process.wait()


def gone(run: Run, segments: set[str], seconds: float = 60.0) -> list[str]:
    """What is left of the run once nothing changes any more, or the bound has passed."""
    deadline = time.monotonic() + seconds
    while (left := run.left(segments)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


@pytest.mark.parametrize("stage", ["boot", "load"])
@pytest.mark.parametrize("who", ["vllm", "worker", "lmcache"])
def test_a_killed_process_of_the_engine_fails_the_run(run: Run, who: str, stage: str) -> None:
    """SIGKILL of one process of the engine: the run does not pass, its receipt says why, and nothing is left.

    A load that does not need the cache server may end in spite of its death; then a claim fails instead of the run.
    """
    run.reach(stage)
    pid = run.victim(who)
    segments = run.segments()
    os.kill(pid, signal.SIGKILL)
    status = run.process.wait(timeout=240)
    assert status in (ExitCode.FAILED, ExitCode.BROKEN), run.log.read_text()
    receipt = json.loads((run.out / "receipt.intoto.json").read_text())
    assert receipt["predicate"]["result"] not in ("PASSED", "WARNED")
    assert "crashed" in {reason["reasonCode"] for reason in receipt["predicate"]["resultReasons"]}
    assert gone(run, segments) == []


@pytest.mark.parametrize("stage", ["boot", "load"])
def test_nothing_survives_a_killed_harness(run: Run, stage: str) -> None:
    """SIGKILL of the harness: its engine and cache server go with it, and it leaves no receipt that passes."""
    run.reach(stage)
    segments = run.segments()
    run.process.kill()
    run.process.wait()
    assert gone(run, segments) == []
    assert not (run.out / "receipt.intoto.json").exists()


@pytest.mark.parametrize("stage", ["boot", "load"])
def test_an_interrupted_run_keeps_its_evidence(run: Run, stage: str) -> None:
    """SIGTERM of the harness: exit status 130, a receipt that does not pass, nothing left."""
    run.reach(stage)
    segments = run.segments()
    run.process.send_signal(signal.SIGTERM)
    assert run.process.wait(timeout=120) == 130, run.log.read_text()
    receipt = json.loads((run.out / "receipt.intoto.json").read_text())
    assert receipt["predicate"]["result"] not in ("PASSED", "WARNED")
    assert gone(run, segments) == []
