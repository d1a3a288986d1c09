# SPDX-License-Identifier: Apache-2.0
"""The docker command line: calls with clear errors, and the removal of what a killed harness left behind.

The client and not a library: it is the client that knows the user's contexts, credential helpers and hosts, it exists
wherever images are built, and a container that it runs in the foreground is a process like any other, whose output,
exit status and signals the supervisor of the local target already handles.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from qualify.errors import PreflightError, QualifyError

OWNER_LABEL = "dev.vllm-qualify.owner"
"""On everything the harness makes: which process of which boot of which machine it belongs to."""

PASSED_ON = ("PATH", "HOME", "XDG_RUNTIME_DIR", "SSH_AUTH_SOCK")
"""Variables that the client needs, beside its own DOCKER_ ones."""

CALL_SECONDS = 60.0


class DockerError(QualifyError):
    """The daemon refused a call."""


class DaemonError(PreflightError):
    """There is no daemon to talk to, or it does not talk to this user."""


class Docker:
    """Calls of the client. All raise DaemonError when no daemon answers, DockerError when it refuses."""

    def __init__(self, program: str = "docker") -> None:
        self.program = shutil.which(program) or program

    @property
    def environment(self) -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if name in PASSED_ON or name.startswith("DOCKER_")}

    def call(self, *arguments: str, timeout: float | None = CALL_SECONDS) -> str:
        """The output of one command."""
        try:
            answer = subprocess.run(
                [self.program, *arguments],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout,
                check=False,
            )
        except FileNotFoundError:
            raise DaemonError("there is no docker client", remedy="install Docker, or use --target local") from None
        except subprocess.TimeoutExpired:
            raise DaemonError(
                f"docker {arguments[0]} did not answer within {timeout:.0f} s", remedy="see the daemon's log"
            ) from None
        if answer.returncode != 0:
            raise explain(arguments[0], answer.stderr)
        return answer.stdout

    def inspect(self, kind: str, name: str) -> dict[str, Any] | None:
        """What the daemon knows about an image, container or network; None if it has none of that name."""
        try:
            found = json.loads(self.call(kind, "inspect", name))
        except DockerError as error:
            if "No such" in error.what or "not found" in error.what:
                return None
            raise
        return dict(found[0]) if found else None

    @contextlib.contextmanager
    def save(self, image: str) -> Iterator[IO[bytes]]:
        """The archive of an image as a stream. Raises DockerError if it breaks off."""
        process = subprocess.Popen(
            [self.program, "save", image], env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert process.stdout is not None and process.stderr is not None
        try:
            yield process.stdout
            while process.stdout.read(1 << 20):  # the end of the archive is not always the end of the stream
                pass
            complaint = process.stderr.read().decode(errors="replace")
            if process.wait() != 0:
                raise explain("save", complaint)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
            process.stderr.close()

    def check(self) -> str:
        """The version of the daemon. Raises DaemonError."""
        return self.call("version", "--format", "{{.Server.Version}}", timeout=20.0).strip()

    def remove(self, *containers: str) -> None:
        """Kill and remove containers that may be gone already."""
        for name in containers:
            with contextlib.suppress(DockerError):
                self.call("rm", "--force", "--volumes", name)

    def reap(self) -> tuple[str, ...]:
        """Remove containers and networks of a harness on this machine that no longer runs; their names."""
        removed = []
        for kind, listing in (("container", ("ps", "--all")), ("network", ("network", "ls"))):
            line = '{{.ID}} {{.Label "%s"}}' % OWNER_LABEL  # noqa: UP031 - a format string would need its braces doubled
            for entry in self.call(*listing, "--filter", f"label={OWNER_LABEL}", "--format", line).splitlines():
                name, _, owner = entry.partition(" ")
                if is_abandoned(owner):
                    with contextlib.suppress(DockerError):
                        self.call(kind, "rm", *(("--force",) if kind == "container" else ()), name)
                        removed.append(f"{kind} {name}")
        return tuple(removed)


def explain(command: str, complaint: str) -> QualifyError:
    """What a failed call means, from what the client printed."""
    lines = [line.strip() for line in complaint.splitlines() if line.strip()]
    text = " ".join(lines)
    if "permission denied" in text.lower() and "daemon" in text:
        return DaemonError(
            "this user may not use the Docker daemon", remedy="join the group docker, or run rootless Docker"
        )
    if "Cannot connect to the Docker daemon" in text or "error during connect" in text:
        return DaemonError("no Docker daemon answers", remedy="start it, or set DOCKER_HOST; or use --target local")
    first = next((line for line in lines if not line.startswith("See ")), "no reason given")
    return DockerError(
        f"docker {command} failed: {first.removeprefix('docker: ').removeprefix('Error response from daemon: ')}"[:400]
    )


def owner() -> str:
    """This process, so that nobody else is taken for it: boot, PID namespace, PID and start time."""
    return f"{_machine()}:{os.getpid()}:{_start_time(os.getpid())}"


def is_abandoned(label: str) -> bool:
    """Whether the owner was a process of this machine that has ended. Owners elsewhere are left alone."""
    machine, _, process = label.rpartition(":")[0].rpartition(":")
    started = label.rpartition(":")[2]
    return machine == _machine() and process.isdigit() and _start_time(int(process)) != started


def _machine() -> str:
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}:{Path('/proc/self/ns/pid').stat().st_ino}"


def _start_time(pid: int) -> str:
    """Clock ticks since the machine started; empty if there is no such process."""
    try:
        # The second field, the command, may hold spaces; the fields behind its closing bracket cannot.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
