# SPDX-License-Identifier: Apache-2.0
"""A Docker daemon, one that is there or one of our own, and a small image with the layout of an engine image."""

import contextlib
import io
import os
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from qualify.errors import QualifyError
from qualify.targets.docker import Docker

ROOT = Path(__file__).resolve().parents[2]
DAEMON = ROOT / "docker" / "daemon.sh"

TINI = '#!/bin/sh\nshift 2\nexec "$@"\n'
"""Stands for tini, called as `tini -s -- PROGRAM`."""

ENTRYPOINT = '#!/bin/sh\nexec "$@"\n'


@pytest.fixture(scope="session")
def docker(tmp_path_factory):
    """The client of a daemon that answers; one is started where Docker is installed and none does."""
    client = Docker(shutil.which("docker", path=f"/usr/bin:{os.environ['PATH']}") or "docker")
    try:
        client.check()
        yield client
        return
    except QualifyError as error:
        if os.getuid() != 0 or shutil.which("dockerd", path=f"/usr/sbin:{os.environ['PATH']}") is None:
            pytest.skip(f"no Docker daemon: {error}")
    daemon = Daemon(Path("/var/tmp") / f"qualify-docker-{os.getpid()}")
    daemon.start()
    yield client
    daemon.stop()


class Daemon:
    """A daemon in a folder of its own, in force through DOCKER_HOST until it is stopped."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.before = os.environ.get("DOCKER_HOST")

    def start(self) -> None:
        answer = subprocess.run([DAEMON, "start", self.folder], capture_output=True, text=True, check=False)
        if answer.returncode != 0:
            pytest.skip(f"no Docker daemon: {answer.stderr.strip()}")
        os.environ["DOCKER_HOST"] = answer.stdout.strip()

    def stop(self, keep: bool = False) -> None:
        subprocess.run([DAEMON, "stop", self.folder], check=True, env=os.environ | {"KEEP": "1" if keep else "0"})

    def restore(self) -> None:
        os.environ.pop("DOCKER_HOST")
        if self.before is not None:
            os.environ["DOCKER_HOST"] = self.before


@pytest.fixture
def own_daemon(docker):
    """A daemon that the test may stop; skipped where none can be started."""
    if os.getuid() != 0:
        pytest.skip("a second daemon needs root")
    daemon = Daemon(Path("/var/tmp") / f"qualify-docker-{os.getpid()}-own")
    daemon.start()
    yield daemon
    daemon.stop()
    daemon.restore()


@pytest.fixture(scope="session")
def small_image(docker):
    """Make an image of programs of this machine and of files: small_image(name, {path: script}, label=value)."""
    made = []

    def make(name, files, **labels):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            for program in ("sh", "cat", "sleep", "id", "touch"):
                for source, target in libraries(program):
                    add(tar, target, Path(source).read_bytes())
            for path, content in ({"usr/bin/tini": TINI, "usr/local/bin/entrypoint": ENTRYPOINT} | files).items():
                add(tar, path, content.encode())
            for folder in ("tmp", "home/engine", "work"):
                member = tarfile.TarInfo(folder)
                member.type, member.mode = tarfile.DIRTYPE, 0o777
                tar.addfile(member)
        changes = [f"LABEL dev.vllm-qualify.{key}={value}" for key, value in labels.items()]
        changes += ["ENV PATH=/usr/local/bin:/usr/bin:/bin", 'ENTRYPOINT ["/usr/bin/tini","-s","--","entrypoint"]']
        options = [part for change in changes for part in ("--change", change)]
        subprocess.run(
            [docker.program, "import", *options, "-", name], input=buffer.getvalue(), check=True, capture_output=True
        )
        made.append(name)
        return name

    yield make
    for name in made:
        with contextlib.suppress(QualifyError):  # it was made in a daemon that is gone
            docker.call("image", "rm", "--force", name)


def libraries(program):
    """A program of this machine and the libraries that it loads: (file here, path in the image)."""
    path = shutil.which(program)
    found = {(path, f"bin/{program}")}
    listed = subprocess.run(["ldd", path], capture_output=True, text=True, check=True).stdout
    for library in re.findall(r"(/\S+) \(0x", listed):
        found.add((library, library.lstrip("/")))
    return sorted(found)


def add(tar, path, content):
    if path in tar.getnames():
        return
    member = tarfile.TarInfo(path)
    member.size, member.mode = len(content), 0o755
    tar.addfile(member, io.BytesIO(content))
