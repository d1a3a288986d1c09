# SPDX-License-Identifier: Apache-2.0
"""The whole way: the CPU engine image, qualified through the container target, published, and reviewed from there."""

import os
import re
import shutil
import subprocess
import time

import pytest
from qualify import models, profiles
from qualify.claims.model import Status
from qualify.environment import cache_folder
from qualify.publish import fetch, publish_receipt
from qualify.receipt.model import Identity, Result
from qualify.receipt.verify import review
from qualify.registry import Reference, Repository
from qualify.report.progress import Progress
from qualify.run import qualify
from qualify.targets.container import ContainerTarget
from qualify.targets.docker import OWNER_LABEL

pytestmark = [pytest.mark.docker, pytest.mark.engine]

IMAGE = os.environ.get("IMAGE", "vllm-qualify-engine:cpu")


@pytest.fixture(scope="module")
def distribution(tmp_path_factory):
    """HOST:PORT of a real registry with room for the image."""
    program = shutil.which("docker-registry")
    if program is None:
        pytest.skip("docker-registry is not installed (Debian package docker-registry)")
    folder = tmp_path_factory.mktemp("distribution")
    config = folder / "config.yml"
    storage = f"storage: {{filesystem: {{rootdirectory: {folder}/data}}}}"
    config.write_text(f"version: 0.1\n{storage}\nhttp: {{addr: '127.0.0.1:0'}}\n")
    log = folder / "log"
    with log.open("w") as output:
        process = subprocess.Popen([program, "serve", str(config)], stderr=output)
    try:
        while not (found := re.search(r"listening on (127\.0\.0\.1:\d+)", log.read_text())):
            assert process.poll() is None, log.read_text()
            time.sleep(0.1)
        yield found[1]
    finally:
        process.terminate()
        process.wait(30)
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def bundle(docker, tmp_path_factory):
    """The receipt folder of one run of the profile cpu-smoke in containers."""
    if docker.inspect("image", IMAGE) is None:
        pytest.skip(f"{IMAGE} is not built: docker/build.sh cpu")
    folder = tmp_path_factory.mktemp("run") / "bundle"
    progress = Progress()
    profile = profiles.load("cpu-smoke")
    model = models.ensure(cache_folder(), profile.model.recipe, profile.model.seed, progress.note)
    target = ContainerTarget(IMAGE, cache_folder(), progress.note, docker)
    _, failure = qualify(profile, target, model, folder, folder.parent / "work", progress)
    assert failure is None, failure
    return folder


def test_image_is_qualified(bundle):
    """Every required claim passes in containers; the receipt's subject is the image."""
    receipt = review(bundle).receipt
    assert receipt is not None
    predicate = receipt.predicate
    wrong = {c.id: (c.status, c.reason_codes) for c in predicate.claims if c.required and c.status is not Status.PASSED}
    assert not wrong
    assert predicate.identity is Identity.IMAGE
    assert predicate.result in (Result.PASSED, Result.WARNED), "WARNED only for a harness that is not committed"


def test_run_left_nothing(docker, bundle):
    """No container and no network of the harness is there after the run."""
    assert not docker.call("ps", "--all", "--quiet", "--filter", f"label={OWNER_LABEL}")
    assert not docker.call("network", "ls", "--quiet", "--filter", f"label={OWNER_LABEL}")


def test_published_image_leads_to_its_receipt(docker, bundle, distribution, tmp_path, monkeypatch):
    """Pushed to a real registry, pulled back by docker as the same image, and reviewed from the registry alone."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    reference = f"{distribution}/qualified/engine:v1"
    published = publish_receipt(bundle, reference, print, docker)
    result = review(bundle).receipt.predicate.result
    assert published.tag_moved is (result is Result.PASSED)
    digest = f"{distribution}/qualified/engine@{published.manifest_digest}"
    docker.call("pull", "--quiet", digest, timeout=600)
    assert docker.inspect("image", digest)["Id"] == docker.inspect("image", IMAGE)["Id"]
    docker.call("image", "rm", digest)
    fetched = review(fetch(f"oci://{digest}", tmp_path / "fetched"))
    assert fetched.receipt == review(bundle).receipt
    repository = Repository(Reference.parse(digest))
    assert repository.has_manifest(published.receipt_digest)


def test_changed_image_digest_is_found(bundle, tmp_path):
    """The evidence that names the image is bound like all other evidence."""
    copy = tmp_path / "copy"
    shutil.copytree(bundle, copy)
    target = copy / "evidence" / "image.json"
    target.write_bytes(target.read_bytes().replace(b"linux/amd64", b"linux/arm64"))
    assert review(copy).receipt is None
