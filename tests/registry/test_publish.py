# SPDX-License-Identifier: Apache-2.0
"""Publishing an image with its receipt, every way in which it can go wrong, and finding the receipt again."""

import gzip
import hashlib
import io
import json
import tarfile
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from qualify.errors import EvidenceError, UsageError
from qualify.publish import (
    ARTIFACT_TYPE,
    Candidate,
    _export,
    fetch_receipt,
    pack,
    publish,
    read_saved_image,
    unpack,
)
from qualify.receipt.model import Result
from qualify.registry import (
    OCI_INDEX,
    OCI_MANIFEST,
    Descriptor,
    Manifest,
    NotFound,
    Reference,
    RegistryError,
    Repository,
    canonical_json,
    fallback_tag,
)
from qualify.targets.docker import Docker


def quiet(text: str) -> None:
    pass


def archive(files, links=()):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        for name, target in links:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, target
            tar.addfile(member)
    buffer.seek(0)
    return buffer


def hexdigest(content):
    return hashlib.sha256(content).hexdigest()


def docker_archive(layers=(b"first layer", b"second layer", b"first layer")):
    """As docker 20.10 saves: a layer that occurs again is a link to its first occurrence."""
    config = json.dumps({"rootfs": {"diff_ids": [f"sha256:{hexdigest(layer)}" for layer in layers]}}).encode()
    listed = [f"{number}/layer.tar" for number in range(len(layers))]
    files, links, seen = {}, [], {}
    for name, layer in zip(listed, layers, strict=True):
        if layer in seen:
            links.append((name, f"../{seen[layer]}"))
        else:
            files[name] = layer
            seen[layer] = name
    entry = {"Config": "config.json", "Layers": listed, "RepoTags": None}
    return files | {"config.json": config, "manifest.json": json.dumps([entry]).encode()}, links


@pytest.fixture
def image(tmp_path):
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    files, links = docker_archive()
    return read_saved_image(archive(files, links), blobs)


def candidate_for(image, result=Result.PASSED, finished_at="2026-01-01T00:00:00Z", index_digest=None):
    statement = {"subject": [{"digest": {"sha256": image.manifest.digest.removeprefix("sha256:")}}]}
    files = {
        "receipt.intoto.json": json.dumps(statement).encode(),
        "evidence/run.json": finished_at.encode(),
        "manifest.json": b"[]",
    }
    config_digest = image.manifest.config.digest
    return Candidate(image.manifest.digest, index_digest, config_digest, result, "a" * 64, finished_at, files)


def target(host, tag="v1", digest=None):
    return Reference(host, "team/engine", tag, digest)


@pytest.fixture(params=["interface", "fallback", "distribution"])
def host(request, stub):
    """Each kind of registry: with the referrers interface, without it, and a real one."""
    if request.param == "distribution":
        return request.getfixturevalue("distribution")
    return stub(with_referrers=request.param == "interface").host


def test_receipt_is_found_from_the_image(host, image, tmp_path):
    """What was published is read back from the tag: the same files, and the tag names the qualified manifest."""
    reference = Reference(host, f"team/{tmp_path.name.replace('_', '-')}", "v1")
    repository = Repository(reference)
    candidate = candidate_for(image)
    first = publish(candidate, reference, repository, lambda: image, quiet)
    assert first.tag_moved and first.bytes_sent > 0
    assert image.manifest.content == repository.manifest("v1").content
    folder = fetch_receipt(reference, repository, tmp_path / "fetched")
    found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert candidate.files == found
    again = publish(candidate, reference, repository, lambda: image, quiet)
    assert (0, first.receipt_digest) == (again.bytes_sent, again.receipt_digest)
    assert len(repository.referrers(image.manifest.digest, ARTIFACT_TYPE)) == 1


def test_newest_receipt_is_the_one_that_is_found(host, image, tmp_path):
    """A later receipt of the same image comes before an earlier one; both stay attached."""
    reference = Reference(host, f"team/{tmp_path.name.replace('_', '-')}", "v1")
    repository = Repository(reference)
    for day in (2, 3, 1):
        publish(
            candidate_for(image, finished_at=f"2026-01-0{day}T00:00:00Z"), reference, repository, lambda: image, quiet
        )
    folder = fetch_receipt(reference, repository, tmp_path / "fetched")
    assert (folder / "evidence/run.json").read_text() == "2026-01-03T00:00:00Z"
    assert len(repository.referrers(image.manifest.digest, ARTIFACT_TYPE)) == 3


@pytest.mark.parametrize("result", [Result.WARNED, Result.FAILED, Result.INVALID])
def test_only_a_passed_receipt_moves_the_tag(stub, image, result):
    """Any other receipt is attached, so that it is not lost, and the tag stays where it was."""
    registry = stub()
    before = registry.put("v1", OCI_MANIFEST, b'{"schemaVersion":2,"layers":[]}')
    published = publish(
        candidate_for(image, result), target(registry.host), Repository(target(registry.host)), lambda: image, quiet
    )
    assert not published.tag_moved and result.value in published.kept
    assert before == Repository(target(registry.host)).manifest("v1").digest
    assert published.receipt_digest in registry.manifests


def test_receipt_of_another_image_is_refused(stub, image):
    """Image, digest in the reference and receipt must name one manifest; else nothing at all is sent."""
    registry = stub()
    repository = Repository(target(registry.host))
    other = replace(candidate_for(image), manifest_digest="sha256:" + "7" * 64)
    with pytest.raises(UsageError, match="the receipt is of"):
        publish(other, target(registry.host), repository, lambda: image, quiet)
    with pytest.raises(UsageError, match="the receipt is of"):
        publish(
            candidate_for(image), target(registry.host, digest="sha256:" + "7" * 64), repository, lambda: image, quiet
        )
    assert not [request for request in registry.requests if request[0] in ("PUT", "POST")]


def test_image_that_is_nowhere_is_named(stub, image, tmp_path):
    """An image that neither the registry nor the daemon has cannot be published; nothing is sent."""
    registry = stub()

    class Empty(Docker):
        def inspect(self, kind, name):
            return None

    export = partial(_export, candidate_for(image), Empty(), tmp_path)
    with pytest.raises(UsageError, match="neither the registry nor this machine"):
        publish(candidate_for(image), target(registry.host), Repository(target(registry.host)), export, quiet)
    assert not [request for request in registry.requests if request[0] in ("PUT", "POST")]


def test_image_is_not_exported_when_the_registry_has_it(stub, image):
    """Publishing a receipt for an image that was pushed before needs no daemon."""
    registry = stub()
    registry.put("v0", OCI_MANIFEST, image.manifest.content)

    def export():
        raise AssertionError("it was exported")

    assert publish(
        candidate_for(image), target(registry.host), Repository(target(registry.host)), export, quiet
    ).tag_moved


@pytest.mark.parametrize("upload", range(6))
def test_dropped_connection_leaves_nothing_half_published(stub, image, upload):
    """Whichever upload breaks, tag and image are absent or whole; the next attempt completes what is missing."""
    registry = stub(drop_upload=upload)
    reference, repository = target(registry.host), Repository(target(registry.host))
    with pytest.raises(RegistryError, match="broke"):
        publish(candidate_for(image), reference, repository, lambda: image, quiet)
    assert "v1" not in registry.manifests
    for digest, (_, content) in registry.manifests.items():
        assert digest == image.manifest.digest
        assert {entry["digest"] for entry in json.loads(content)["layers"]} <= set(registry.blobs)
    stored = set(registry.blobs)
    registry.drop_upload = None
    published = publish(candidate_for(image), reference, repository, lambda: image, quiet)
    assert published.tag_moved
    sent_again = [path for method, path, _ in registry.requests if method == "PUT" and "/blobs/" in path]
    assert len(registry.blobs) + 1 == len(sent_again) and stored <= set(registry.blobs)


def test_tag_that_someone_moves_meanwhile_is_left(stub, image):
    """A tag that changed between the start and the end of publishing is not overwritten."""
    registry = stub()
    intruder = b'{"schemaVersion":2,"layers":[] }'

    def meanwhile(reference):
        if reference.startswith("sha256:"):
            registry.put("v1", OCI_MANIFEST, intruder)

    registry.before_manifest = meanwhile
    with pytest.raises(RegistryError, match="by someone else"):
        publish(candidate_for(image), target(registry.host), Repository(target(registry.host)), lambda: image, quiet)
    assert intruder == registry.manifests["v1"][1]


def test_index_is_tagged_only_if_all_of_it_is_qualified(stub, image):
    """The tag names the index of the receipt's image, so that its attestations stay reachable; a second runnable
    image in it would ride on this receipt and is refused."""
    registry = stub()
    repository = Repository(target(registry.host))
    proof = {"annotations": {"vnd.docker.reference.type": "attestation-manifest"}, "digest": "sha256:" + "9" * 64}
    ours = image.manifest.descriptor.to_json()

    def index(*entries):
        body = {"schemaVersion": 2, "manifests": [{"mediaType": OCI_MANIFEST, "size": 1} | entry for entry in entries]}
        return registry.put("index", OCI_INDEX, json.dumps(body).encode())

    good = index(ours, proof)
    assert publish(
        candidate_for(image, index_digest=good), target(registry.host), repository, lambda: image, quiet
    ).tag_moved
    assert good == repository.manifest("v1").digest
    bad = index(ours, {"digest": "sha256:" + "8" * 64})
    with pytest.raises(UsageError, match="not of"):
        publish(candidate_for(image, index_digest=bad), target(registry.host), repository, lambda: image, quiet)
    assert good == repository.manifest("v1").digest


def test_alien_receipt_is_refused(stub, image, tmp_path):
    """A statement of another image that hangs on this one is refused, though its digests are all in order."""
    registry = stub()
    repository = Repository(target(registry.host))
    alien = {"subject": [{"digest": {"sha256": "7" * 64}}]}
    candidate = candidate_for(image)
    files = dict(candidate.files) | {"receipt.intoto.json": json.dumps(alien).encode()}
    publish(replace(candidate, files=files), target(registry.host), repository, lambda: image, quiet)
    with pytest.raises(RegistryError, match="is of another image"):
        fetch_receipt(target(registry.host), repository, tmp_path / "fetched")
    assert not (tmp_path / "fetched").exists()


def test_fallback_entry_for_another_subject_is_refused(stub, image, tmp_path):
    """A fallback tag can list anything: a receipt whose own subject is another manifest is refused."""
    registry = stub(with_referrers=False)
    repository = Repository(target(registry.host))
    published = publish(candidate_for(image), target(registry.host), repository, lambda: image, quiet)
    other = registry.put("other", OCI_MANIFEST, b'{"schemaVersion":2,"layers":[] }')
    entry = Descriptor(OCI_MANIFEST, published.receipt_digest, 1, ARTIFACT_TYPE).to_json()
    registry.put(fallback_tag(other), OCI_INDEX, canonical_json({"schemaVersion": 2, "manifests": [entry]}))
    with pytest.raises(RegistryError, match="attached to another image"):
        fetch_receipt(target(registry.host, "other"), repository, tmp_path / "fetched")


def test_image_without_receipt_is_said(stub, image, tmp_path):
    """An image without a receipt, and one that is not there, are told apart from a broken registry."""
    registry = stub()
    registry.put("v1", OCI_MANIFEST, image.manifest.content)
    with pytest.raises(NotFound, match="has no receipt"):
        fetch_receipt(target(registry.host), Repository(target(registry.host)), tmp_path / "fetched")
    with pytest.raises(NotFound, match="has no v2"):
        fetch_receipt(target(registry.host, "v2"), Repository(target(registry.host)), tmp_path / "fetched")


PATHS = st.from_regex(r"\A[a-z][a-z0-9.]{0,6}(/[a-z][a-z0-9.]{0,6}){0,2}\Z")


@settings(deadline=None)
@given(st.dictionaries(PATHS, st.binary(max_size=2000), max_size=5))
def test_bundle_round_trip(files):
    """The files come back as they were, and the same files always give the same bytes."""
    assert files == unpack(pack(files))
    assert pack(files) == pack(dict(reversed(files.items())))


@pytest.mark.parametrize(
    ("files", "links"),
    [
        ({"../a": b""}, ()),
        ({"/a": b""}, ()),
        ({"a": b"", "b": b""}, (("c", "a"),)),
        ({".hidden": b""}, ()),
        ({"a//b": b""}, ()),
    ],
)
def test_hostile_bundle_is_refused(files, links):
    """Only plain relative files leave a bundle: no way up, no absolute path, no link."""
    with pytest.raises(EvidenceError, match="refused"):
        unpack(gzip.compress(archive(files, links).read()))


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_broken_bundle_is_one_clear_error(content):
    """Bytes that are no archive never give another exception."""
    for bundle in (content, gzip.compress(content), pack({"a": content})[:-9]):
        try:
            unpack(bundle)
        except EvidenceError:
            continue


def test_saved_image_is_measured_as_it_is_exported(image):
    """Measuring gives the manifest that exporting gives; a layer that docker saved as a link is counted each time."""
    files, links = docker_archive()
    measured = read_saved_image(archive(files, links))
    assert image.manifest == measured.manifest
    assert len(measured.manifest.list("layers")) == 3
    for descriptor in (*image.manifest.list("layers"), image.manifest.config):
        assert descriptor.digest == "sha256:" + hexdigest(image.blob(descriptor).read_bytes())
    assert {path.name for path in image.blobs.iterdir()} == {
        hexdigest(b) for b in (b"first layer", b"second layer", measured.config)
    }


def test_saved_layout_keeps_its_manifest():
    """An OCI layout, with build attestations beside the image, is published under the manifest it already has."""
    layer = gzip.compress(b"layer", mtime=0)
    config = json.dumps({"rootfs": {"diff_ids": [f"sha256:{hexdigest(b'layer')}"]}}).encode()
    media = "application/vnd.oci.image.layer.v1.tar+gzip"
    body = {
        "schemaVersion": 2,
        "config": Descriptor.of(config, "application/vnd.oci.image.config.v1+json").to_json(),
        "layers": [Descriptor.of(layer, media).to_json()],
    }
    manifest = Manifest(OCI_MANIFEST, json.dumps(body).encode())
    proof = {"mediaType": OCI_MANIFEST, "size": 1, "digest": "sha256:" + "9" * 64, "platform": {"os": "unknown"}}
    index = Manifest(OCI_INDEX, json.dumps({"manifests": [manifest.descriptor.to_json(), proof]}).encode())
    top = {"schemaVersion": 2, "manifests": [index.descriptor.to_json()]}
    blobs = {f"blobs/sha256/{hexdigest(c)}": c for c in (layer, config, manifest.content, index.content)}
    saved = read_saved_image(archive({"oci-layout": b"{}", "index.json": json.dumps(top).encode()} | blobs))
    assert manifest == saved.manifest


def test_saved_image_with_a_changed_layer_is_refused():
    """Layers that are not those of the configuration mean a damaged archive."""
    files, links = docker_archive()
    with pytest.raises(UsageError, match="not those of its configuration"):
        read_saved_image(archive(files | {"1/layer.tar": b"changed"}, links))


@pytest.mark.parametrize("content", [b"", b"no archive", b"\x1f\x8b\x08broken"])
def test_what_is_no_saved_image_is_refused(content):
    """A usage error, not a traceback."""
    with pytest.raises(UsageError):
        read_saved_image(io.BytesIO(content))
