# SPDX-License-Identifier: Apache-2.0
"""The docker client: what its failures mean, and whose leftovers may be removed."""

import os
import subprocess

import pytest
from qualify.errors import ExitCode
from qualify.targets.container import gpu_options, idle_gpus, mount
from qualify.targets.docker import DaemonError, Docker, DockerError, explain, is_abandoned, owner


@pytest.fixture
def client(tmp_path):
    """A docker client that prints and exits as it is told: client(status, stdout, stderr)."""

    def make(status=0, stdout="", stderr=""):
        program = tmp_path / "docker"
        (tmp_path / "out").write_text(stdout)
        (tmp_path / "err").write_text(stderr)
        program.write_text(f'#!/bin/sh\ncd "$(dirname "$0")"\ncat out\ncat err >&2\nexit {status}\n')
        program.chmod(0o755)
        return Docker(str(program))

    return make


@pytest.mark.parametrize(
    ("complaint", "kind", "text"),
    [
        (
            "Cannot connect to the Docker daemon at unix:///x.sock. Is the docker daemon running?\n",
            DaemonError,
            "no Docker daemon answers",
        ),
        (
            "Got permission denied while trying to connect to the Docker daemon socket at unix:///x.sock: Get ...\n",
            DaemonError,
            "may not use",
        ),
        (
            "permission denied while trying to connect to the docker API at unix:///var/run/docker.sock: daemon\n",
            DaemonError,
            "may not use",
        ),
        ("Error response from daemon: No such image: x\n", DockerError, "No such image: x"),
        ("", DockerError, "no reason given"),
    ],
)
def test_failure_is_one_clear_line(client, complaint, kind, text):
    """A missing daemon and a missing permission are preflight refusals with a remedy; the rest keeps its own words."""
    with pytest.raises(kind, match=text) as caught:
        client(1, stderr=complaint).call("ps")
    assert "\n" not in str(caught.value)
    assert kind is not DaemonError or (caught.value.exit_code == ExitCode.REFUSED and caught.value.remedy)


def test_missing_client_is_said(tmp_path):
    """No docker program is a refusal that names the other targets."""
    with pytest.raises(DaemonError, match="no docker client"):
        Docker(str(tmp_path / "docker")).check()


def test_broken_save_is_an_error(client):
    """An archive that ends early because the client failed is not taken for a whole one."""
    with pytest.raises(DockerError, match="disk"), client(1, "partial", "write: disk full").save("x") as stream:
        assert stream.read() == b"partial"


def test_unknown_image_is_none(client):
    """An image that the daemon does not have is no error; another refusal is."""
    assert client(1, "[]", "Error: No such image: x").inspect("image", "x") is None
    with pytest.raises(DockerError):
        client(1, "[]", "Error response from daemon: database is locked").inspect("image", "x")


def test_only_dead_owners_of_this_machine_are_abandoned():
    """A running owner, an owner on another machine, and a label that is not ours keep what they own."""
    machine, pid, started = owner().rsplit(":", 2)
    assert pid == str(os.getpid())
    child = subprocess.Popen(["sleep", "60"])
    child_started = open(f"/proc/{child.pid}/stat").read().rpartition(")")[2].split()[19]  # noqa: PTH123, SIM115
    label = f"{machine}:{child.pid}:{child_started}"
    assert not is_abandoned(label)
    child.kill()
    child.wait()
    assert is_abandoned(label)
    assert is_abandoned(f"{machine}:{pid}:{int(started) - 1}"), "the PID was given to another process"
    assert not is_abandoned(owner())
    assert not is_abandoned(f"other-machine:{child.pid}:1")
    assert not is_abandoned("")


def test_reap_removes_only_the_abandoned(client):
    """Of all that carries the label, what belongs to a living harness stays."""
    machine = owner().rsplit(":", 2)[0]
    docker = client(stdout=f"aaa {owner()}\nbbb {machine}:4000000:1\nccc other:1:1\n")
    assert docker.reap() == ("container bbb", "network bbb")


def test_path_that_an_option_cannot_carry_is_refused(tmp_path):
    """A comma would end the source and start another option of the mount."""
    with pytest.raises(Exception, match="comma"):
        mount(tmp_path / "a,readonly=false", "/x")
    assert mount(tmp_path, "/x").endswith(",readonly")


def test_busy_gpus_are_not_taken(tmp_path, monkeypatch):
    """GPUs are chosen by UUID among those that nobody uses; too few is a refusal."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nprintf 'GPU-a, 9.0, 4\\nGPU-b, 9.0, 70000\\nGPU-c, 9.0, 4\\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    cards = idle_gpus(2)
    assert gpu_options(cards) == ["--gpus", '"device=GPU-a,GPU-c"']
    with pytest.raises(Exception, match="3 idle GPUs are needed, 2 of 3"):
        idle_gpus(3)


def test_complaint_without_the_usage_hint():
    """The pointer to --help is not the reason."""
    error = explain("run", "See 'docker run --help'.\ndocker: Error response from daemon: x\n")
    assert str(error) == "docker run failed: x"
