# SPDX-License-Identifier: Apache-2.0
"""Every way in which an image must not be run or published, with a real daemon and a real registry."""

import contextlib
import os
import shutil
import socket
import threading

import pytest
from qualify.errors import ExitCode, PreflightError, UsageError
from qualify.publish import Candidate, fetch, publish_receipt
from qualify.receipt.model import Result
from qualify.registry import NotFound, Reference, RegistryError, Repository
from qualify.targets.container import ContainerTarget, identify
from qualify.targets.docker import DaemonError, Docker

pytestmark = pytest.mark.docker


def quiet(text):
    pass


@pytest.fixture
def empty_login(tmp_path, monkeypatch):
    """No login of this user reaches the registry, and none is needed."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))


@pytest.fixture
def pushed(docker, small_image, distribution, tmp_path, empty_login):
    """Push two images, as v1 and v2, to a repository of this test; its name."""
    name = f"{distribution}/{tmp_path.name.replace('_', '-')}"
    for tag in ("v1", "v2"):
        small_image(f"{name}:{tag}", {"content": tag}, engine="cpu")
        docker.call("push", "--quiet", f"{name}:{tag}")
    return name


def test_digest_that_the_registry_does_not_have_is_refused(docker, pushed):
    """An image that is named by a wrong digest is nowhere: the tag beside it is not taken instead."""
    with pytest.raises(PreflightError, match="cannot be pulled"):
        identify(docker, Reference.parse(f"{pushed}:v1@sha256:{'7' * 64}"), quiet)


def test_tag_that_was_moved_in_the_registry_is_refused(docker, pushed):
    """The image here is what the tag was; what the tag is now is another one."""
    found = identify(docker, Reference.parse(f"{pushed}:v1"), quiet)
    repository = Repository(Reference.parse(pushed))
    assert found.image.manifest_digest == repository.manifest("v1").digest
    repository.push_manifest(repository.manifest("v2"), "v1")
    with pytest.raises(PreflightError, match="the tag was moved"):
        identify(docker, Reference.parse(f"{pushed}:v1"), quiet)


@pytest.fixture
def candidate(docker, small_image, monkeypatch):
    """A receipt of an image that is in no registry, as if its review had passed."""
    name = small_image("vllm-qualify-test:candidate", {"content": "candidate"}, engine="cpu")
    image = identify(docker, Reference.parse(name), quiet).image
    digest = image.manifest_digest.removeprefix("sha256:")
    files = {"receipt.intoto.json": b'{"subject":[{"digest":{"sha256":"%s"}}]}' % digest.encode()}
    candidate = Candidate(
        image.manifest_digest, None, image.config_digest, Result.PASSED, "a" * 64, "2026-01-01T00:00:00Z", files
    )
    monkeypatch.setattr("qualify.publish.load_candidate", lambda folder: candidate)
    return candidate


def test_receipt_of_another_image_is_not_published(docker, candidate, pushed, tmp_path):
    """A digest in the reference is a promise: a receipt of another image is refused, and the tags stay."""
    repository = Repository(Reference.parse(pushed))
    before = repository.manifest("v2").digest
    with pytest.raises(UsageError, match="the receipt is of"):
        publish_receipt(tmp_path, f"{pushed}:v2@{before}", quiet, docker)
    assert repository.manifest("v2").digest == before
    assert not repository.has_manifest(candidate.manifest_digest)
    with pytest.raises(NotFound, match="has no receipt"):
        fetch(f"oci://{pushed}:v2", tmp_path / "fetched")


@contextlib.contextmanager
def cut_after(host, limit):
    """HOST:PORT that leads to `host` until `limit` bytes were sent there; then every connection breaks."""
    address, port = host.split(":")
    sent = 0

    def forward(source, drain, counted):
        nonlocal sent
        with contextlib.suppress(OSError):
            while piece := source.recv(65536):
                sent += len(piece) if counted else 0
                if sent > limit:
                    break
                drain.sendall(piece)
        for end in (source, drain):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def accept():
        with contextlib.suppress(OSError):
            while True:
                client = listener.accept()[0]
                server = socket.create_connection((address, int(port)))
                for ends in ((client, server, True), (server, client, False)):
                    threading.Thread(target=forward, args=ends, daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


def test_connection_that_breaks_in_mid_push_leaves_nothing_half_published(
    docker, candidate, distribution, tmp_path, empty_login
):
    """Neither image nor tag nor receipt is there; the next attempt publishes all of them."""
    path = tmp_path.name.replace("_", "-")
    repository = Repository(Reference.parse(f"{distribution}/{path}"))
    with cut_after(distribution, 1 << 20) as host, pytest.raises(RegistryError, match="broke"):
        publish_receipt(tmp_path, f"{host}/{path}:v1", quiet, docker)
    assert not repository.has_manifest(candidate.manifest_digest)
    with pytest.raises(NotFound):
        repository.manifest("v1")
    assert publish_receipt(tmp_path, f"{distribution}/{path}:v1", quiet, docker).tag_moved
    assert repository.manifest("v1").digest == candidate.manifest_digest
    folder = fetch(f"oci://{distribution}/{path}:v1", tmp_path / "fetched")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == candidate.files


def test_missing_daemon_is_a_refusal(docker, tmp_path, monkeypatch):
    """No daemon at the address: refused before anything is done, with a remedy."""
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    with pytest.raises(DaemonError, match="no Docker daemon answers") as caught:
        ContainerTarget("vllm-qualify-test:none", tmp_path, quiet, docker).environment()
    assert caught.value.exit_code == ExitCode.REFUSED and "--target local" in caught.value.remedy


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become a user who may not use the daemon")
def test_missing_permission_is_a_refusal(docker, tmp_path):
    """A user outside the daemon's group is told so, and not that there is no daemon."""
    program = tmp_path / "docker"
    become = f"{shutil.which('setpriv')} --reuid 65534 --regid 65534 --clear-groups"
    program.write_text(f'#!/bin/sh\nexec {become} {docker.program} "$@"\n')
    program.chmod(0o755)
    with pytest.raises(DaemonError, match="may not use the Docker daemon") as caught:
        ContainerTarget("vllm-qualify-test:none", tmp_path, quiet, Docker(str(program))).environment()
    assert caught.value.exit_code == ExitCode.REFUSED and caught.value.remedy
