# SPDX-License-Identifier: Apache-2.0
"""Processes that cannot outlive the harness: each runs below a small supervisor that kills its whole tree."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from qualify.records import BootOutcome

SUPERVISOR = Path(__file__).with_name("supervisor.py")

SUPERVISOR_SECONDS = 40.0
"""Bound on the supervisor's own clean-up: its grace and kill times, and the time to walk /proc."""


@dataclass(frozen=True)
class Ended:
    """How a supervised process ended, and what its tree left behind that had to be removed."""

    exit_status: int | None
    """Negative for a signal; None if the command could not be started or its supervisor was killed."""
    outcome: BootOutcome
    leftovers: tuple[str, ...]
    error: str | None = None
    """Why the command could not be started."""


class Supervised:
    """One command below a supervisor, in a process group of its own; its output is appended to `log`.

    `scratch` is a folder that the supervisor removes at the end, also if the harness is killed.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        log: Path,
        environment: Mapping[str, str],
        cwd: Path,
        scratch: Path | None = None,
    ) -> None:
        self.log = log
        self.pid: int | None = None
        self._buffer = b""
        self._exit_status: int | None = None
        self._exited = False
        self._done: dict[str, object] | None = None
        self._asked = False
        self._killed = False
        folder = str(scratch) if scratch else None
        config: dict[str, object] = {"argv": list(argv), "log": str(log), "cwd": str(cwd), "scratch": folder}
        control, self._control = os.pipe()
        self._status, status = os.pipe()
        try:
            log.touch()
            self._supervisor = self._start(control, status, config, dict(environment))
        except BaseException:
            os.close(self._control)
            os.close(self._status)
            raise
        finally:
            os.close(control)
            os.close(status)

    def _start(
        self, control: int, status: int, config: dict[str, object], environment: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-I", str(SUPERVISOR), str(control), str(status), json.dumps(config)],
            env=environment,
            stdin=subprocess.DEVNULL,
            pass_fds=(control, status),
            process_group=0,  # Ctrl-C is for the harness; supervisor.py says why it is no session
        )

    def __enter__(self) -> Supervised:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(0.0)

    def wait(self, seconds: float) -> int | None:
        """The exit status of the command once it has ended, None after `seconds` if it has not.

        A command that could not be started, or whose supervisor was killed, counts as ended with 127.
        """
        deadline = time.monotonic() + seconds
        while not self._exited and self._done is None:
            if not self._read(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                return None
        return self._exit_status if self._exit_status is not None else 127

    def stop(self, seconds: float) -> Ended:
        """SIGTERM, up to `seconds` of patience (none: SIGKILL at once), SIGKILL of the tree. Safe to call twice."""
        if self._done is None:
            ended_by_itself = self.wait(0.0) is not None
            if seconds > 0 and not ended_by_itself:
                self._asked = True
                self._command(b"T")
                self.wait(seconds)
            if not self._exited and not ended_by_itself:
                self._asked = self._killed = True
                self._command(b"K")
            self._finish()
        return self._ended()

    def _finish(self) -> None:
        deadline = time.monotonic() + SUPERVISOR_SECONDS
        while self._done is None and time.monotonic() < deadline:
            self._read(deadline - time.monotonic())
        if self._done is None:
            self._supervisor.kill()
            self._lost()
        self._supervisor.wait()
        for descriptor in (self._control, self._status):
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def _ended(self) -> Ended:
        done = self._done or {}
        outcome = BootOutcome.DIED
        if self._asked:
            outcome = BootOutcome.KILLED if self._killed else BootOutcome.STOPPED
        leftovers = (
            *(f"process {name}" for name in _strings(done, "killed") if not self._killed),
            *(f"shared memory {name}" for name in _strings(done, "removed")),
            *(f"process {name}, which SIGKILL did not end" for name in _strings(done, "survivors")),
        )
        error = done.get("error")
        return Ended(self._exit_status, outcome, leftovers, str(error) if error is not None else None)

    def _command(self, command: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self._control, command)

    def _read(self, seconds: float) -> bool:
        """Take in what the supervisor reports within `seconds`; False if nothing came."""
        if not select.select([self._status], [], [], seconds)[0]:
            return False
        chunk = os.read(self._status, 65536)
        if not chunk:
            self._lost()
            return True
        self._buffer += chunk
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            event = json.loads(line)
            if event["event"] == "started":
                self.pid = event["pid"]
            elif event["event"] == "exited":
                self._exited, self._exit_status = True, event["status"]
            else:
                self._done = event
        return True

    def _lost(self) -> None:
        """The supervisor is gone: its command dies with it (PDEATHSIG), the rest of the process group is ended here."""
        if self._done is None:
            if self.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGKILL)
            self._done = {"error": "its supervisor was killed"}


def _strings(done: Mapping[str, object], key: str) -> tuple[str, ...]:
    value = done.get(key, ())
    return tuple(str(item) for item in value) if isinstance(value, (list, tuple)) else ()


def free_ports(count: int) -> tuple[int, ...]:
    """Loopback ports that nobody uses now. All are held at once while choosing, so that they differ."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for held in sockets:
            held.bind(("127.0.0.1", 0))
        return tuple(held.getsockname()[1] for held in sockets)
    finally:
        for held in sockets:
            held.close()


def last_lines(log: Path, count: int) -> tuple[str, ...]:
    """The last lines of a log that are not blank; none if there is no log."""
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 65536))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return ()
    return tuple(line.rstrip() for line in text.splitlines() if line.strip())[-count:]


def count_lines(log: Path) -> int:
    """Line ends in a log of any size."""
    with log.open("rb") as file:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))


EXCEPTION = re.compile(r"(^|[\])] )([A-Za-z_][\w.]*\.)?[A-Z]\w*(Error|Exception|Interrupt|NotFound|Refused): ?\S")
SECONDARY = ("Engine core initialization failed", "WorkerProc initialization failed", "Executor failed")
EXIT_NOISE = ("nanobind", " - leaked", " - ...", "resource_tracker", "warnings.warn", "WARNING ")


def last_words(log: Path) -> tuple[str, ...]:
    """Why a process ended, in its own words: up to 6 lines of the last 64 KiB of its log.

    The first exception is the innermost one, and that of the process that failed first: those who only pass it on
    print later. Without an exception the last lines that are not noise.
    """
    lines = [line for line in last_lines(log, 2000) if not any(noise in line for noise in EXIT_NOISE)]
    for at, line in enumerate(lines):
        if EXCEPTION.search(line) and not any(text in line for text in SECONDARY):
            return (*lines[max(0, at - 2) : at + 1], *lines[at + 1 :][-3:])
    return tuple(lines[-6:])
