# SPDX-License-Identifier: Apache-2.0
"""The whole way of a user: an engine image qualified in containers, published, and reviewed from the registry."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from qualify.claims.model import Status
from qualify.errors import ExitCode
from qualify.receipt.model import Identity, Result
from qualify.receipt.verify import review
from qualify.registry import Reference, Repository
from qualify.targets.docker import OWNER_LABEL

pytestmark = [pytest.mark.docker, pytest.mark.engine]

QUALIFY = Path(sys.executable).with_name("qualify")
RECEIPTS = Path(__file__).parents[2] / "receipts" / "cpu-smoke"

RUN_SECONDS = 1500
"""Ends a run that hangs; one takes 7 minutes on two cores."""


def qualify(docker, *arguments, seconds=300):
    """The command line, with the client of the daemon first in PATH: status, output, messages."""
    environment = os.environ | {"PATH": f"{Path(docker.program).parent}:{os.environ['PATH']}"}
    argv = [QUALIFY, *arguments]
    return subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=seconds, check=False)


@pytest.fixture(scope="module")
def bundle(docker, image, tmp_path_factory):
    """The receipt folder of one run of the profile cpu-smoke in containers."""
    folder = tmp_path_factory.mktemp("run") / "bundle"
    done = qualify(docker, "run", "--target", f"image:{image}", "--out", folder, seconds=RUN_SECONDS)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout
    return folder


@pytest.fixture(scope="module")
def receipt(bundle):
    receipt = review(bundle).receipt
    assert receipt is not None
    return receipt


def test_image_is_qualified(receipt):
    """Every required claim passes in containers; the receipt's subject is the image."""
    predicate = receipt.predicate
    wrong = {c.id: (c.status, c.reason_codes) for c in predicate.claims if c.required and c.status is not Status.PASSED}
    assert not wrong
    assert predicate.identity is Identity.IMAGE
    assert predicate.result in (Result.PASSED, Result.WARNED), "WARNED only for a harness that is not committed"


def test_run_left_nothing(docker, bundle):
    """No container and no network of the harness is there after the run."""
    assert not docker.call("ps", "--all", "--quiet", "--filter", f"label={OWNER_LABEL}")
    assert not docker.call("network", "ls", "--quiet", "--filter", f"label={OWNER_LABEL}")


def test_containers_prove_what_processes_prove(docker, bundle):
    """Beside the receipt of a local run: the same claims passed, with the same lock, profile and model."""
    local = max(RECEIPTS.iterdir())
    done = qualify(docker, "diff", local, bundle, "--json")
    assert done.returncode in (0, 1), done.stderr
    difference = json.loads(done.stdout)
    assert [claim for claim in difference["claims"] if claim["left"] != claim["right"]] == []
    differing = {fact["name"] for fact in difference["identities"] if not fact["name"].startswith("host.")}
    assert {"subject", "target"} <= differing <= {"subject", "target", "harness", "python"}


def test_published_image_leads_to_its_receipt(docker, image, bundle, receipt, distribution, tmp_path, monkeypatch):
    """Pushed to a real registry, pulled back by docker as the same image, and reviewed from the registry alone."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    name = f"{distribution}/qualified/engine"
    done = qualify(docker, "publish", bundle, f"{name}:v1", seconds=600)
    passed = receipt.predicate.result is Result.PASSED
    assert done.returncode == (ExitCode.PASSED if passed else ExitCode.FAILED), done.stderr
    assert ("the tag names it" in done.stdout) is passed
    manifest = f"sha256:{receipt.subject[0].digest.sha256}"
    assert Repository(Reference.parse(name)).has_manifest(manifest)
    docker.call("pull", "--quiet", f"{name}@{manifest}", timeout=600)
    assert docker.inspect("image", f"{name}@{manifest}")["Id"] == docker.inspect("image", image)["Id"]
    docker.call("image", "rm", f"{name}@{manifest}")
    done = qualify(docker, "review", f"oci://{name}@{manifest}", "--json")
    assert done.returncode == 0, done.stderr
    reviewed = json.loads(done.stdout)
    assert (reviewed["verified"], reviewed["subject"]) == (True, receipt.subject[0].digest.sha256)


def test_receipt_is_not_published_for_another_image(docker, bundle, distribution):
    """A reference with another digest is refused by the command, with the reason."""
    done = qualify(docker, "publish", bundle, f"{distribution}/other/engine:v1@sha256:{'7' * 64}")
    assert done.returncode == ExitCode.USAGE and "the receipt is of" in done.stderr


def test_changed_image_digest_is_found(bundle, tmp_path):
    """The evidence that names the image is bound like all other evidence."""
    copy = tmp_path / "copy"
    shutil.copytree(bundle, copy)
    target = copy / "evidence" / "image.json"
    target.write_bytes(target.read_bytes().replace(b"linux/amd64", b"linux/arm64"))
    assert review(copy).receipt is None
