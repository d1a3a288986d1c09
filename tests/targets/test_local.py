# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from qualify.errors import TargetError
from qualify.profiles import Storage
from qualify.records import BootOutcome, BootRecord

from tests.targets.conftest import Fake, eventually


def test_a_boot_serves_and_stops_without_a_trace(fake: Fake) -> None:
    """A boot that is ready has served a request; after its stop nothing of it exists, and the record says so."""
    running = fake.target.boot(fake.launch(cache=Storage.EMPTY))
    assert running.died() is None
    record = running.stop()
    assert record.outcome is BootOutcome.STOPPED
    assert record.ready_seconds is not None
    assert [process.role for process in record.processes] == ["cache", "engine"]
    assert [process.exit_status for process in record.processes] == [0, 0]
    assert record.leftovers == ()
    assert fake.left() == []


def test_the_record_counts_the_lines_of_each_log(fake: Fake) -> None:
    """A log that is cut after the boot is known by it; so the count is taken when nobody writes any more."""
    record = fake.target.boot(fake.launch(cache=Storage.EMPTY)).stop()
    logs = [fake.writer.path(f"{process.role}.log").read_bytes() for process in record.processes]
    assert [process.log_lines for process in record.processes] == [log.count(b"\n") for log in logs]
    assert all(process.log_lines for process in record.processes)


def test_stop_twice_gives_the_same_record(fake: Fake) -> None:
    """`stop` is safe to call twice."""
    running = fake.target.boot(fake.launch())
    assert running.stop() == running.stop()


def test_no_path_of_the_machine_is_recorded(fake: Fake) -> None:
    """Command lines in evidence name places by meaning, not by path."""
    record = fake.target.boot(fake.launch(cache=Storage.EMPTY)).stop()
    assert str(fake.root) not in record.model_dump_json()


def test_deaf_engine_is_killed(fake: Fake) -> None:
    """An engine that ignores SIGTERM is killed after the profile's patience, and the record says killed."""
    launch = fake.launch("deaf")
    timeouts = launch.profile.timeouts.model_copy(update={"stop_seconds": 0.5})
    hasty = launch.profile.model_copy(update={"timeouts": timeouts})
    record = fake.target.boot(replace(launch, profile=hasty)).stop()
    assert record.outcome is BootOutcome.KILLED
    assert record.processes[0].exit_status == -signal.SIGKILL
    assert fake.left() == []


def test_a_detached_family_goes_too(fake: Fake) -> None:
    """A child and a daemon in its own session are ended, their segments removed, and all are named as leftovers."""
    running = fake.target.boot(fake.launch("family"))
    assert eventually(lambda: len([item for item in fake.left() if "shm" in item]) == 2)
    record = running.stop()
    assert fake.left() == []
    assert {f"shared memory {fake.token}-{who}" for who in ("worker", "daemon")} <= set(record.leftovers)
    assert len([item for item in record.leftovers if item.startswith("process")]) == 2


def test_others_segments_stay(fake: Fake) -> None:
    """A segment that another program made meanwhile is not touched."""
    other = Path(f"/dev/shm/{fake.token[5:]}-other")
    running = fake.target.boot(fake.launch("family"))
    try:
        other.write_bytes(b"mine")
        running.stop()
        assert other.exists()
    finally:
        other.unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("mode", "phase", "words"),
    [
        ("die", "start of the engine", "ended by itself with status 1"),
        ("hang", "start of the engine", "not ready in time"),
        ("mute", "first request", "not ready in time"),
        ("refuse", "first request", "500"),
        ("port-taken", "start of the engine", "took the port"),
    ],
)
def test_failed_boot_names_its_phase_and_leaves_nothing(fake: Fake, mode: str, phase: str, words: str) -> None:
    """A boot that fails says in which phase and why, leaves boot.json marked not ready, and nothing else."""
    patience = 3.0 if "not ready" in words else 20.0
    with pytest.raises(TargetError) as caught:
        fake.target.boot(fake.launch(mode, "family", start_seconds=patience))
    assert caught.value.phase == phase
    assert words in str(caught.value)
    assert fake.left() == []
    record = BootRecord.model_validate_json(fake.writer.path("boot.json").read_bytes(), strict=False)
    assert record.outcome is BootOutcome.NOT_READY


def test_the_last_words_are_the_exception(fake: Fake) -> None:
    """The tail of a failed boot holds the exception itself."""
    with pytest.raises(TargetError) as caught:
        fake.target.boot(fake.launch("die"))
    assert "RuntimeError: the weights are made of cheese" in caught.value.tail


def test_missing_python_is_one_line(fake: Fake) -> None:
    """An engine environment without its interpreter is an error, not a hang."""
    (fake.root / "env" / "bin" / "python").unlink()
    with pytest.raises(TargetError, match=r"could not be started: .*python: No such file"):
        fake.target.boot(fake.launch())


def test_death_under_load_is_seen(fake: Fake) -> None:
    """`died` names the process that ended by itself; the record says died."""
    running = fake.target.boot(fake.launch("crash"))
    assert eventually(lambda: running.died() is not None)
    assert running.died() == "the engine (vLLM) ended by itself with status 9"
    assert running.stop().outcome is BootOutcome.DIED


def test_cache_server_killed_under_load_is_seen(fake: Fake) -> None:
    """The end of the cache server alone is noticed, and named with its signal."""
    running = fake.target.boot(fake.launch(cache=Storage.EMPTY))
    os.kill(running.pid_of("cache"), signal.SIGKILL)
    assert eventually(lambda: running.died() is not None)
    assert running.died() == "the cache server (LMCache) was ended by signal 9"
    assert running.stop().outcome is BootOutcome.DIED
    assert fake.left() == []


def test_kept_storage_survives_and_empty_storage_is_emptied(fake: Fake) -> None:
    """`kept` finds what the boot before stored, `empty` does not."""
    running = fake.target.boot(fake.launch(cache=Storage.EMPTY))
    assert running.storage is not None
    (running.storage / "chunk").write_bytes(b"kv")
    running.stop()
    fake.target.boot(fake.launch(cache=Storage.KEPT)).stop()
    assert (running.storage / "chunk").exists()
    fake.target.boot(fake.launch(cache=Storage.EMPTY)).stop()
    assert not (running.storage / "chunk").exists()


@pytest.mark.parametrize(("name", "served"), [("tiny-1.5_b", "tiny-1.5_b"), ("--port", "model"), ("storage", "model")])
def test_a_model_folder_cannot_be_taken_for_something_else(fake: Fake, name: str, served: str) -> None:
    """A folder whose name looks like an option, or like another entry of the working directory, gets a plain name."""
    (fake.root / "models" / name).mkdir(parents=True)
    launch = replace(fake.launch(cache=Storage.EMPTY), model=fake.root / "models" / name)
    running = fake.target.boot(launch)
    assert running.model == served
    assert running.stop().outcome is BootOutcome.STOPPED


HARNESS = """
import sys, time
from pathlib import Path
from tests.targets.conftest import Fake
from qualify import profiles
from qualify.environment import EngineEnv
from qualify.profiles import Storage
from qualify.targets.local import LocalTarget
root, token = Path(sys.argv[1]), sys.argv[2]
python = root / "env" / "bin" / "python"
fake = Fake(root, token, LocalTarget(profiles.load("cpu-smoke"), EngineEnv(python, python.parents[1], None), print))
print("booting", flush=True)
running = fake.target.boot(fake.launch(*sys.argv[3:], cache=Storage.EMPTY))
print("ready", flush=True)
time.sleep(3600)
"""


@pytest.mark.parametrize("when", ["boot", "load"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_survives_the_harness(fake: Fake, when: str, how: signal.Signals) -> None:
    """When the harness is killed, even with SIGKILL, its engine with all descendants and segments goes too."""
    root = Path(__file__).parents[2]
    modes = ["family", "deaf"] + (["hang"] if when == "boot" else [])
    harness = subprocess.Popen(
        [sys.executable, "-c", HARNESS, str(fake.root), fake.token, *modes],
        env={**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{root / 'harness'}"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert harness.stdout is not None
    if when == "load":
        assert any(line == "ready\n" for line in harness.stdout)
    assert eventually(lambda: len([item for item in fake.left() if "shm" in item]) == 2)
    harness.send_signal(how)
    harness.wait()
    harness.stdout.close()
    assert eventually(lambda: fake.left() == [])
