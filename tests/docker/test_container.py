# SPDX-License-Identifier: Apache-2.0
"""The container of a boot: how it is confined, what ends in it, and what is left; on a real daemon."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from qualify import profiles
from qualify.errors import PreflightError, TargetError
from qualify.evidence import EvidenceWriter
from qualify.records import BootOutcome, BootRecord
from qualify.targets import Launch
from qualify.targets.container import (
    PLUGIN,
    BootContainer,
    ContainerRunning,
    ContainerTarget,
    writable_in_memory,
)
from qualify.targets.docker import OWNER_LABEL, DockerError

pytestmark = pytest.mark.docker


def until(condition, seconds=60):
    """Wait for something that another process does; the bound only ends a test that would never end."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.1)


def ours(docker, kind):
    listing = {"container": ("ps", "--all"), "network": ("network", "ls")}[kind]
    return docker.call(*listing, "--filter", f"label={OWNER_LABEL}", "--quiet").split()


@pytest.fixture
def container(docker, small_image):
    image = small_image("vllm-qualify-test:plain", {})
    container = BootContainer(docker, image, f"vllm-qualify-test-{os.getpid()}")
    container.start(writable_in_memory())
    yield container
    container.close()


def test_container_is_confined(docker, container):
    """No user root, no capability, no new privilege, nothing to write in the image: also for what is run in it."""
    script = "id -u; cat /proc/self/status; touch /usr/x 2>&1; touch /tmp/x && echo written; exit 0"
    output = docker.call("exec", container.name, "sh", "-c", script)
    assert output.splitlines()[0] != "0"
    assert "CapEff:\t0000000000000000" in output and "CapBnd:\t0000000000000000" in output
    assert "NoNewPrivs:\t1" in output
    assert "Read-only file system" in output and output.splitlines()[-1] == "written"


def test_network_is_internal(docker, container):
    """The network has no way to other networks, and nothing is published on the host."""
    network = docker.inspect("network", container.name)
    found = docker.inspect("container", container.name)
    assert network["Internal"] is True
    assert not any(found["NetworkSettings"]["Ports"].values())
    assert container.address in network["Containers"][found["Id"]]["IPv4Address"]


def test_processes_share_one_scheduling_group(docker, container):
    """All that is run in the container is in its own control groups: between groups, ranks that spin starve others."""
    groups = ["exec", container.name, "cat"]
    assert docker.call(*groups, "/proc/1/cgroup") == docker.call(*groups, "/proc/self/cgroup")


def test_closing_leaves_nothing(docker, container):
    """Container and network are gone after an orderly end, and closing again is harmless."""
    container.close()
    container.close()
    assert docker.inspect("container", container.name) is None
    assert docker.inspect("network", container.name) is None


KILLED = """
import sys, time
from pathlib import Path
from qualify.targets.command import CONTAINER_WORK, Command
from qualify.targets.container import BootContainer, Executed, mount
from qualify.targets.docker import Docker
import qualify
docker = Docker(sys.argv[1])
container = BootContainer(docker, sys.argv[2], sys.argv[3])
container.start([mount(Path(qualify.__file__).parent, f"{CONTAINER_WORK}/extension/qualify")])
Executed(docker, container.name, Command("engine", ("sleep", "1000"), {}), Path(sys.argv[4]))
while "sleep" not in docker.call("top", container.name):
    time.sleep(0.1)
print("ready", flush=True)
time.sleep(1000)
"""


def test_killed_harness_takes_its_container_with_it(docker, small_image, tmp_path):
    """After SIGKILL of the harness the container ends by itself; the next run removes the network."""
    image = small_image("vllm-qualify-test:plain", {})
    name = f"vllm-qualify-test-kill-{os.getpid()}"
    argv = [sys.executable, "-c", KILLED, docker.program, image, name, str(tmp_path / "log")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    harness = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=environment)
    assert harness.stdout.readline() == "ready\n"
    harness.send_signal(signal.SIGKILL)
    harness.wait()
    until(lambda: docker.inspect("container", name) is None)
    assert docker.inspect("network", name) is not None
    assert any("network" in removed for removed in docker.reap())
    assert docker.inspect("network", name) is None


def engine_files(distributions, check=None):
    """An image whose engine describes itself as told, and whose files are as told."""
    environment = {
        "python": "3.11.2",
        "distributions": [{"name": name, "version": "1", "filesDigest": "0"} for name in distributions],
        "digest": "0",
        "lockDigest": None,
        "lockMismatches": ["torch: installed 1, locked 2"],
        "filesChecked": 2,
        "filesModified": [],
        "variables": {},
    }
    report = {"manifestDigest": "0", "files": 5, "unreadable": 0, "modified": [], "missing": [], "added": []}
    return {
        "opt/engine/bin/python": f"#!/bin/sh\ncat <<'END'\n{json.dumps(environment)}\nEND\n",
        "usr/local/bin/image-manifest": f"#!/bin/sh\ncat <<'END'\n{json.dumps(report | (check or {}))}\nEND\n",
    }


def target(docker, name, tmp_path):
    return ContainerTarget(name, tmp_path, lambda text: None, docker)


def test_image_without_our_kernel_is_refused(docker, small_image, tmp_path):
    """An engine without the plugin is refused before anything is started, and leaves nothing."""
    name = small_image("vllm-qualify-test:no-plugin", engine_files(["vllm"]), engine="cpu")
    with pytest.raises(PreflightError, match=f"has no {PLUGIN}"):
        target(docker, name, tmp_path).environment()
    assert not ours(docker, "container") and not ours(docker, "network")


def test_changed_file_of_the_image_is_reported(docker, small_image, tmp_path):
    """What `image-manifest` finds reaches the evidence of `pins`, beside what the engine says of its packages."""
    check = {"modified": ["/a"], "missing": ["/b"], "added": ["/c"]}
    name = small_image("vllm-qualify-test:changed", engine_files(["vllm", PLUGIN], check), engine="cpu")
    environment = target(docker, name, tmp_path).environment()
    assert environment.files_modified == ("/a (image)", "/b (image, missing)", "/c (image, added)")
    assert environment.files_checked == 7
    assert environment.lock_mismatches == ("torch: installed 1, locked 2",)


def test_image_that_describes_nothing_is_an_error(docker, small_image, tmp_path):
    """A program that fails, or prints something else, is one clear line."""
    name = small_image("vllm-qualify-test:broken", {"opt/engine/bin/python": "#!/bin/sh\nexit 3\n"}, engine="cpu")
    with pytest.raises(TargetError, match="cannot be looked into"):
        target(docker, name, tmp_path).environment()
    name = small_image("vllm-qualify-test:broken", {"opt/engine/bin/python": "#!/bin/sh\necho x\n"}, engine="cpu")
    with pytest.raises(TargetError, match="no description of itself"):
        target(docker, name, tmp_path).environment()


def test_contract_report_is_evidence_even_with_failed_cases(docker, small_image, tmp_path):
    """The report is what counts; without one the suite could not run, and that is an error."""
    script = '#!/bin/sh\necho noise\necho "{}" >"$4"\nexit 1\n'
    name = small_image("vllm-qualify-test:contract", {"opt/engine/bin/python": script}, engine="cpu")
    assert target(docker, name, tmp_path).contract() == b"{}\n"
    name = small_image("vllm-qualify-test:contract", {"opt/engine/bin/python": "#!/bin/sh\nexit 1\n"}, engine="cpu")
    with pytest.raises(TargetError, match="left no report"):
        target(docker, name, tmp_path).contract()


def launch(tmp_path, profile="cpu-smoke"):
    loaded = profiles.load(profile)
    for folder in ("model", "work"):
        (tmp_path / folder).mkdir()
    evidence = EvidenceWriter(tmp_path / "evidence").below("boots/01-control")
    return Launch(loaded, loaded.boots[0], 1, tmp_path / "model", tmp_path / "work", evidence)


def boot_record(tmp_path):
    path = tmp_path / "evidence" / "boots" / "01-control" / "boot.json"
    return BootRecord.model_validate_json(path.read_bytes(), strict=False)


def test_engine_that_dies_at_boot_is_told_in_its_own_words(docker, small_image, tmp_path):
    """Phase, status and the engine's last lines; its log and the boot's record stay, no container does."""
    script = "#!/bin/sh\necho 'ValueError: bad weights' >&2\nexit 7\n"
    name = small_image("vllm-qualify-test:dies", {"opt/engine/bin/python": script}, engine="cpu")
    with pytest.raises(TargetError, match="ended by itself with status 7 during: start of the engine") as caught:
        target(docker, name, tmp_path).boot(launch(tmp_path))
    assert "ValueError: bad weights" in caught.value.tail
    record = boot_record(tmp_path)
    assert (record.outcome, record.processes[0].exit_status) == (BootOutcome.NOT_READY, 7)
    assert not ours(docker, "container") and not ours(docker, "network")
    image = json.loads((tmp_path / "evidence" / "image.json").read_bytes())
    assert image["manifestDigest"].startswith("sha256:") and image["indexDigest"] is None


def test_engine_that_is_killed_is_told(docker, small_image, tmp_path):
    """An engine that ends by a signal is recorded with it, and leaves nothing."""
    script = "#!/bin/sh\nkill -9 $$\n"
    name = small_image("vllm-qualify-test:killed", {"opt/engine/bin/python": script}, engine="cpu")
    with pytest.raises(TargetError, match="was ended by signal 9"):
        target(docker, name, tmp_path).boot(launch(tmp_path))
    assert boot_record(tmp_path).processes[0].exit_status == -9
    assert not ours(docker, "container") and not ours(docker, "network")


def sleeps(docker):
    """Whether the engine of `SLEEPS` runs."""
    with contextlib.suppress(DockerError):  # the container may not be ready
        return any("sleep" in docker.call("top", name) for name in ours(docker, "container"))
    return False


SLEEPS = {"opt/engine/bin/python": "#!/bin/sh\nexec sleep 1000\n"}


def test_container_that_is_killed_from_outside_is_told(docker, small_image, tmp_path):
    """Not the engine is blamed when somebody kills the container under it; nothing is left."""
    name = small_image("vllm-qualify-test:sleeps", SLEEPS, engine="cpu")

    def kill():
        until(lambda: sleeps(docker))
        docker.call("kill", *ours(docker, "container"))

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(TargetError, match="the container was killed or removed"):
        target(docker, name, tmp_path).boot(launch(tmp_path))
    killer.join()
    assert not ours(docker, "container") and not ours(docker, "network")


def test_container_that_the_daemon_refuses_is_told(docker, small_image, tmp_path, monkeypatch):
    """The daemon's own reason is the message, and not that an engine ended."""
    monkeypatch.setattr(ContainerRunning, "_limits", lambda self: ["--memory", "1"])
    name = small_image("vllm-qualify-test:sleeps", {}, engine="cpu")
    with pytest.raises(TargetError, match=r"docker run failed: .*[Mm]emory"):
        target(docker, name, tmp_path).boot(launch(tmp_path))
    assert not ours(docker, "container") and not ours(docker, "network")


def test_profile_of_another_engine_is_refused(docker, small_image, tmp_path):
    """A CUDA image does not run a CPU profile: refused before anything starts."""
    name = small_image("vllm-qualify-test:cuda", {}, engine="cuda")
    with pytest.raises(PreflightError, match="holds the cuda engine"):
        target(docker, name, tmp_path).boot(launch(tmp_path))
    assert not ours(docker, "network")


def test_daemon_that_goes_away_is_named(own_daemon, small_image, docker, tmp_path):
    """Not the engine is blamed when the daemon stops under it; once it is back, the next run removes what was left."""
    name = small_image("vllm-qualify-test:sleeps", SLEEPS, engine="cpu")

    def stop():
        until(lambda: sleeps(docker))
        own_daemon.stop(keep=True)

    stopper = threading.Thread(target=stop)
    stopper.start()
    with pytest.raises(TargetError, match="the Docker daemon went away"):
        target(docker, name, tmp_path).boot(launch(tmp_path))
    stopper.join()
    assert any("no Docker daemon answers" in left for left in boot_record(tmp_path).leftovers)
    own_daemon.start()
    assert not ours(docker, "container")
