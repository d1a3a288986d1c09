# SPDX-License-Identifier: Apache-2.0
"""Runs one command and guarantees its end: python -I supervisor.py CONTROL STATUS CONFIG

A process of its own, because nothing inside the harness can act after SIGKILL of the harness. It adopts every
descendant whose parent ends (PR_SET_CHILD_SUBREAPER), so daemonized and re-sessioned ones cannot escape it.

CONTROL  pipe from the harness: b"T" asks the command to end (SIGTERM), b"K" kills the tree, end-of-file means that
         the harness is gone and kills the tree too
STATUS   pipe to the harness, one JSON object a line: started, exited, done
CONFIG   JSON: argv, log (null: standard error), cwd, scratch (a folder to remove at the end, or null)

After the command has ended, what is left of its tree gets GRACE_SECONDS to follow, then SIGKILL. Then its
shared-memory segments go, if nobody else has them open. Only the standard library is used.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, BinaryIO

TICK_SECONDS = 0.25
GRACE_SECONDS = 3.0
KILL_SECONDS = 20.0
"""How long killed processes may take to vanish; longer means that the kernel holds them (uninterruptible sleep)."""

SCANS_PER_SEGMENT = 8
"""How often a new segment is looked for in the tree before it is taken as somebody else's: scans cost time."""

SHM = Path("/dev/shm")
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
LIBC = ctypes.CDLL(None, use_errno=True)


def open_log(path: str | None) -> BinaryIO:
    return os.fdopen(os.dup(sys.stderr.fileno()), "ab") if path is None else Path(path).open("ab")


def die_with_parent() -> None:
    """In the child, before exec: end if the supervisor itself is killed."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def parents() -> dict[int, int]:
    """Parent of every process, by pid."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            found[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    return found


def descendants() -> set[int]:
    children: dict[int, list[int]] = {}
    for pid, parent in parents().items():
        children.setdefault(parent, []).append(pid)
    found: set[int] = set()
    todo = [os.getpid()]
    while todo:
        new = [pid for pid in children.get(todo.pop(), []) if pid not in found]
        found.update(new)
        todo += new
    return found


def describe(pid: int) -> str:
    try:
        return f"{Path(f'/proc/{pid}/comm').read_text().strip()} (pid {pid})"
    except OSError:
        return f"pid {pid}"


def segments() -> set[str]:
    try:
        return {path.name for path in SHM.iterdir()}
    except OSError:
        return set()


def opened_segments(pid: int) -> set[str]:
    """Names below /dev/shm that a process maps or holds open; empty for a process that may not be looked into.

    Maps are matched by inode: a semaphore is made under another name and linked to its own, so its maker's map names
    a deleted file.
    """
    found: set[str] = set()
    with contextlib.suppress(OSError):
        mapped = {int(inode) for inode in re.findall(r" (\d+) +/dev/shm/", Path(f"/proc/{pid}/maps").read_text())}
        found.update(path.name for path in SHM.iterdir() if mapped and inode_of(path) in mapped)
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                target = str(descriptor.readlink())
                if target.startswith("/dev/shm/"):
                    found.add(target.removeprefix("/dev/shm/"))
    return found


def inode_of(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None


class Segments:
    """Which shared-memory segments belong to the tree: those that a process of it had open, or that name its pid."""

    def __init__(self) -> None:
        self._before = segments()
        self._scans: dict[str, int] = {}
        self._mine: set[str] = set()

    def notice(self, *, thorough: bool = False) -> None:
        """Attribute segments that appeared; `thorough` looks again at those given up on."""
        new = segments() - self._before - self._mine
        if not thorough:
            new = {name for name in new if self._scans.get(name, 0) < SCANS_PER_SEGMENT}
        if not new:
            return
        tree = descendants()
        opened = set().union(*(opened_segments(pid) for pid in tree))
        for name in new:
            self._scans[name] = self._scans.get(name, 0) + 1
            if name in opened or tree & {int(number) for number in re.findall(r"\d+", name)}:
                self._mine.add(name)

    def remove(self) -> list[str]:
        """Remove those of the tree that no process has open."""
        left = self._mine & segments()
        if left:
            left -= set().union(*(opened_segments(pid) for pid in parents()))
        for name in left:
            with contextlib.suppress(OSError):
                (SHM / name).unlink()
        return sorted(left)


class Supervisor:
    def __init__(self, control: int, status: int, config: dict[str, Any]) -> None:
        self.control = control
        self.status = status
        self.config = config
        self.harness = os.getppid()
        self.segments = Segments()
        self.child = 0
        self.exit_status: int | None = None
        self.control_open = True

    def run(self) -> None:
        try:
            with open_log(self.config["log"]) as log:
                # Kept: a Popen that is collected reaps its process, and the exit status is lost.
                self.popen = subprocess.Popen(
                    self.config["argv"],
                    cwd=self.config["cwd"],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    # No session of its own: Linux's autogroup schedules sessions against each other, and engine
                    # workers that spin in sched_yield kept the cache server off the CPU for up to 16 s (Linux 6.18).
                    process_group=0,
                    preexec_fn=die_with_parent,  # noqa: PLW1509  (this process has one thread)
                )
        except OSError as error:
            self.report(event="done", error=f"{error.filename or self.config['argv'][0]}: {error.strerror}")
            return
        self.child = self.popen.pid
        self.report(event="started", pid=self.child)
        self.watch()
        killed = self.kill_tree()
        survivors = [describe(pid) for pid in descendants()]
        removed = self.segments.remove()
        if self.config["scratch"]:
            shutil.rmtree(self.config["scratch"], ignore_errors=True)
        self.report(event="done", killed=killed, removed=removed, survivors=survivors)

    def watch(self) -> None:
        """Until the tree has ended, has used up its grace, or must be killed."""
        deadline: float | None = None
        while True:
            self.reap()
            self.segments.notice()
            if self.exit_status is not None:
                deadline = deadline or time.monotonic() + GRACE_SECONDS
                if not descendants() or time.monotonic() > deadline:
                    return
            if self.must_kill():
                return

    def must_kill(self) -> bool:
        """Wait for a tick or a command. The parent's pid is checked too: a forked copy may hold the pipe open."""
        if self.control_open and select.select([self.control], [], [], TICK_SECONDS)[0]:
            command = os.read(self.control, 1)
            if command == b"T" and self.exit_status is None:
                # A last look while everything still runs: orderly exits close mappings and leave the files.
                self.segments.notice(thorough=True)
                os.kill(self.child, signal.SIGTERM)
            self.control_open = command != b""
            return command in (b"K", b"")
        return os.getppid() != self.harness

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.child:
                self.exit_status = os.waitstatus_to_exitcode(status)
                self.report(event="exited", status=self.exit_status)

    def kill_tree(self) -> list[str]:
        """Stop first, so that nothing forks while the tree is walked; then look at its segments; then kill."""
        stopped: set[int] = set()
        while new := descendants() - stopped:
            for pid in new:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            stopped |= new
        self.segments.notice(thorough=True)
        names = [describe(pid) for pid in sorted(stopped) if pid != self.child]
        deadline = time.monotonic() + KILL_SECONDS
        while (left := descendants()) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.reap()
            time.sleep(0.01)
        self.reap()
        return names

    def report(self, **event: Any) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self.status, (json.dumps(event) + "\n").encode())


def main() -> None:
    control, status, config = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    # A handler and not SIG_IGN, which the command would inherit.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, lambda *_: None)
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)
    Supervisor(control, status, config).run()


if __name__ == "__main__":
    main()
