# SPDX-License-Identifier: Apache-2.0
"""A Docker daemon, one that is there or one of our own; the engine image; a small image with the same layout."""

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from functools import partial
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
def docker(unavailable):
    """The client of a daemon that answers; one is started where Docker is installed and none does."""
    client = Docker(shutil.which("docker", path=f"/usr/bin:{os.environ['PATH']}") or "docker")
    try:
        client.check()
        yield client
        return
    except QualifyError as error:
        if os.getuid() != 0 or shutil.which("dockerd", path=f"/usr/sbin:{os.environ['PATH']}") is None:
            unavailable(f"no Docker daemon: {error}")
    daemon = Daemon(Path("/var/tmp") / f"qualify-docker-{os.getpid()}", unavailable)
    daemon.start()
    yield client
    daemon.stop()


class Daemon:
    """A daemon in a folder of its own, in force through DOCKER_HOST until it is stopped."""

    def __init__(self, folder: Path, unavailable) -> None:
        self.folder = folder
        self.unavailable = unavailable
        self.before = os.environ.get("DOCKER_HOST")

    def start(self) -> None:
        answer = subprocess.run([DAEMON, "start", self.folder], capture_output=True, text=True, check=False)
        if answer.returncode != 0:
            self.unavailable(f"no Docker daemon: {answer.stderr.strip()}")
        os.environ["DOCKER_HOST"] = answer.stdout.strip()

    def stop(self, keep: bool = False) -> None:
        subprocess.run([DAEMON, "stop", self.folder], check=True, env=os.environ | {"KEEP": "1" if keep else "0"})

    def restore(self) -> None:
        os.environ.pop("DOCKER_HOST")
        if self.before is not None:
            os.environ["DOCKER_HOST"] = self.before


@pytest.fixture
def own_daemon(docker, unavailable):
    """A daemon that the test may stop."""
    if os.getuid() != 0:
        unavailable("a second daemon needs root")
    daemon = Daemon(Path("/var/tmp") / f"qualify-docker-{os.getpid()}-own", unavailable)
    daemon.start()
    yield daemon
    daemon.stop()
    daemon.restore()


@pytest.fixture(scope="session")
def image(docker, unavailable):
    """The name of the CPU engine image: built here, from the offline base and the locked wheels, or named by IMAGE."""
    if named := os.environ.get("IMAGE"):
        return named
    if os.getuid() != 0 and "BASE" not in os.environ:
        unavailable("the offline base needs root: name another one by BASE, or an image that is built by IMAGE")
    run_build(docker, "cpu")
    return "vllm-qualify-engine:cpu"


def run_build(docker, what):
    """The output of `docker/build.sh WHAT`, which succeeded."""
    environment = os.environ | {"DOCKER": docker.program, "PYTHON": sys.executable}
    argv = [ROOT / "docker" / "build.sh", what]
    done = subprocess.run(
        argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


@pytest.fixture
def build(docker, image):
    """Build again, or something more: build("cpu") or build("kernels"), the build's output."""
    if "IMAGE" in os.environ:
        pytest.skip("IMAGE was not built here")
    return partial(run_build, docker)


@pytest.fixture(scope="session")
def small_image(docker):
    """Make an image of programs of this machine and of files: small_image(name, {path: script}, label=value)."""
    made = []
    base = programs()

    def make(name, files, **labels):
        buffer = io.BytesIO(base)
        with tarfile.open(fileobj=buffer, mode="a") as tar:
            for path, content in ({"usr/bin/tini": TINI, "usr/local/bin/entrypoint": ENTRYPOINT} | files).items():
                add(tar, path, content.encode())
            for folder in ("tmp", "home/engine", "work"):
                member = tarfile.TarInfo(folder)
                member.type, member.mode = tarfile.DIRTYPE, 0o777
                tar.addfile(member)
        changes = [f"LABEL dev.vllm-qualify.{key}={value}" for key, value in labels.items()]
        changes += ["ENV PATH=/usr/local/bin:/usr/bin:/bin", 'ENTRYPOINT ["/usr/bin/tini","-s","--","entrypoint"]']
        options = [part for change in changes for part in ("--change", change)]
        argv = [docker.program, "import", *options, "-", name]
        done = subprocess.run(argv, input=buffer.getvalue(), check=True, capture_output=True)
        made.append(done.stdout.decode().strip())  # another image may get the name
        return name

    yield make
    for image_id in made:
        with contextlib.suppress(QualifyError):  # it was made in a daemon that is gone
            docker.call("image", "rm", "--force", image_id)


def programs():
    """An archive of some programs of this machine, and of this Python with its library, at their own paths."""
    python = Path(sys.executable).resolve()
    library = Path(sysconfig.get_path("stdlib"))
    left_out = {"__pycache__", "dist-packages", "ensurepip", "idlelib", "lib2to3", "site-packages", "test", "tkinter"}
    modules = [path for path in library.rglob("*") if path.suffix in (".py", ".so") and not left_out & set(path.parts)]
    files = {str(path): path for path in (python, *modules)}
    for name in ("sh", "cat", "sleep", "id", "touch"):
        files[f"/bin/{name}"] = Path(shutil.which(name))
    loading = [path for path in files.values() if path.suffix in ("", ".so") or path == python]
    listed = subprocess.run(["ldd", *loading], capture_output=True, text=True, check=True).stdout
    files |= {name: Path(name) for name in re.findall(r"(/\S+) \(0x", listed)}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, path in files.items():
            add(tar, name.lstrip("/"), path.read_bytes())
        link = tarfile.TarInfo("usr/bin/python3")
        link.type, link.linkname = tarfile.SYMTYPE, str(python)
        tar.addfile(link)
    return buffer.getvalue()


def add(tar, path, content):
    member = tarfile.TarInfo(path)
    member.size, member.mode = len(content), 0o755
    tar.addfile(member, io.BytesIO(content))
