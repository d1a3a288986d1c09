# SPDX-License-Identifier: Apache-2.0
"""Which image runs: digests from its registry, or as they will be when it is published; never from a tag alone."""

import contextlib
import hashlib
import io
import json
import tarfile

import pytest
from qualify.errors import PreflightError
from qualify.publish import read_saved_image
from qualify.registry import OCI_INDEX, OCI_MANIFEST, Reference, digest_of
from qualify.targets.container import KIND_LABEL, identify
from qualify.targets.docker import DockerError

CONFIG = json.dumps({"rootfs": {"diff_ids": [digest_of(b"layer")]}}).encode()


def quiet(text: str) -> None:
    pass


def saved() -> io.BytesIO:
    entry = {"Config": "config.json", "Layers": ["1/layer.tar"]}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        files = {"config.json": CONFIG, "1/layer.tar": b"layer", "manifest.json": json.dumps([entry]).encode()}
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    buffer.seek(0)
    return buffer


class FakeDocker:
    """A daemon that knows the images it is given, by the names that the client would use."""

    def __init__(self, images, pullable=()):
        self.images = images
        self.pullable = dict(pullable)

    def inspect(self, kind, name):
        assert kind == "image"
        return self.images.get(name)

    def call(self, command, *arguments, timeout=None):
        assert command == "pull"
        if arguments[-1] not in self.pullable:
            raise DockerError("docker pull failed: pull access denied")
        self.images[arguments[-1]] = self.pullable[arguments[-1]]

    @contextlib.contextmanager
    def save(self, image):
        yield saved()


def image(config_digest=None, digests=(), labels=None):
    return {
        "Id": config_digest or digest_of(CONFIG),
        "RepoDigests": list(digests),
        "Os": "linux",
        "Architecture": "amd64",
        "Config": {"Labels": {KIND_LABEL: "cpu"} if labels is None else labels},
    }


@pytest.fixture
def published(stub):
    """A registry that holds one image under the tag v1: (host, manifest digest)."""
    registry = stub()
    body = {"schemaVersion": 2, "config": {"mediaType": "c", "digest": digest_of(CONFIG), "size": len(CONFIG)}}
    digest = registry.put("v1", OCI_MANIFEST, json.dumps(body | {"layers": []}).encode())
    return registry, digest


def test_image_that_is_in_no_registry_is_measured():
    """Its manifest digest is the one under which `publish` will push it, and no registry is asked."""
    found = identify(FakeDocker({"docker.io/team/engine:v1": image()}), Reference.parse("team/engine:v1"), quiet)
    assert read_saved_image(saved()).manifest.digest == found.image.manifest_digest
    assert (digest_of(CONFIG), None, "cpu") == (found.image.config_digest, found.image.index_digest, found.kind)


def test_image_from_a_registry_has_its_digests(published):
    """Manifest and configuration are those of the registry; the image is pulled if it is not here."""
    registry, digest = published
    name = f"{registry.host}/team/engine"
    docker = FakeDocker({}, {f"{name}:v1": image(digests=[f"{name}@{digest}"])})
    found = identify(docker, Reference.parse(f"{name}:v1"), quiet)
    assert (digest, digest_of(CONFIG)) == (found.image.manifest_digest, found.image.config_digest)


def test_index_is_recorded(published):
    """An image that was pulled through an index has the index digest and the platform manifest below it."""
    registry, digest = published
    entry = {"mediaType": OCI_MANIFEST, "size": 1, "digest": digest}
    body = {"schemaVersion": 2, "manifests": [entry | {"platform": {"os": "linux", "architecture": "amd64"}}]}
    index = registry.put("v1", OCI_INDEX, json.dumps(body).encode())
    name = f"{registry.host}/team/engine"
    docker = FakeDocker({f"{name}:v1": image(digests=[f"{name}@{index}"])})
    found = identify(docker, Reference.parse(f"{name}:v1"), quiet)
    assert (digest, index) == (found.image.manifest_digest, found.image.index_digest)


def test_tag_that_moved_in_the_registry_is_refused(published):
    """The image here is what the tag was; the tag is something else now, so the name means two images."""
    registry, digest = published
    name = f"{registry.host}/team/engine"
    docker = FakeDocker({f"{name}:v1": image(digests=[f"{name}@{digest}"])})
    registry.put("v1", OCI_MANIFEST, b'{"schemaVersion":2,"layers":[]}')
    with pytest.raises(PreflightError, match="not " + digest):
        identify(docker, Reference.parse(f"{name}:v1"), quiet)


def test_tag_and_digest_of_two_images_here_are_refused(published):
    """The daemon would silently prefer the digest."""
    registry, digest = published
    name = f"{registry.host}/team/engine"
    docker = FakeDocker({f"{name}@{digest}": image(), f"{name}:v1": image(config_digest="sha256:" + "1" * 64)})
    with pytest.raises(PreflightError, match="the tag was moved"):
        identify(docker, Reference.parse(f"{name}:v1@{digest}"), quiet)


def test_image_that_is_not_the_registrys_is_refused(published):
    """What the daemon holds under a digest must have the configuration that the registry's manifest names."""
    registry, digest = published
    name = f"{registry.host}/team/engine"
    other = image(config_digest="sha256:" + hashlib.sha256(b"other").hexdigest(), digests=[f"{name}@{digest}"])
    with pytest.raises(PreflightError, match="pull it again"):
        identify(FakeDocker({f"{name}:v1": other}), Reference.parse(f"{name}:v1"), quiet)


def test_image_that_is_nowhere_is_said():
    """Neither here nor in a registry: one line with what to do."""
    with pytest.raises(PreflightError, match="cannot be pulled"):
        identify(FakeDocker({}), Reference.parse("team/engine:v1"), quiet)


def test_foreign_image_is_refused():
    """An image without our label has not our layout, so nothing in it is run."""
    docker = FakeDocker({"docker.io/team/engine:v1": image(labels={})})
    with pytest.raises(PreflightError, match="not one of this project's engines"):
        identify(docker, Reference.parse("team/engine:v1"), quiet)
