# SPDX-License-Identifier: Apache-2.0
"""Publishing: an image, its receipt as an OCI referrer, and the tag; and finding the receipt from the image again.

The order makes half a publication impossible: blobs, then the image manifest by digest, then the receipt, and the tag
last, only for a receipt that is PASSED and of exactly that manifest. Each step is read back before the next begins.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import posixpath
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, Any

from qualify.errors import EvidenceError, QualifyError, UsageError
from qualify.evidence import SAFE_PATH, compress
from qualify.receipt.manifest import MAX_BYTES, MAX_FILES, read_folder
from qualify.receipt.model import STATEMENT, Identity, Receipt, Result
from qualify.registry import (
    EMPTY_CONTENT,
    EMPTY_TYPE,
    INDEX_TYPES,
    OCI_INDEX,
    OCI_MANIFEST,
    PIECE,
    Descriptor,
    Manifest,
    NotFound,
    Reference,
    RegistryError,
    Repository,
    canonical_json,
    credentials_for,
    resolve,
    runnable,
)
from qualify.targets.docker import Docker

ARTIFACT_TYPE = "application/vnd.vllm-qualify.qualification.v0.1"
STATEMENT_MEDIA_TYPE = "application/vnd.in-toto+json"
BUNDLE_MEDIA_TYPE = "application/vnd.vllm-qualify.bundle.v0.1.tar+gzip"
CONFIG_MEDIA_TYPE = "application/vnd.oci.image.config.v1+json"
LAYER_MEDIA_TYPE = "application/vnd.oci.image.layer.v1.tar"

TITLE = "org.opencontainers.image.title"
CREATED = "org.opencontainers.image.created"
RESULT = "dev.vllm-qualify.result"
PROFILE_DIGEST = "dev.vllm-qualify.profile.digest"

MAX_STATEMENT = 16 << 20
MAX_SMALL = 1 << 20
"""Bytes of a file of a saved image that is kept in memory: manifests and configurations are far smaller."""

Progress = Callable[[str], None]


# The image as it will lie in a registry


@dataclass(frozen=True)
class SavedImage:
    """An image read from `docker save`, with the manifest under which it is published.

    `blobs` is the folder that holds its blobs by hex digest; None if the image was only measured.
    """

    manifest: Manifest
    config: bytes
    blobs: Path | None

    def blob(self, descriptor: Descriptor) -> Path:
        if self.blobs is None:
            raise QualifyError("the image was measured, not exported")
        return self.blobs / descriptor.digest.removeprefix("sha256:")


@dataclass
class _Archive:
    """What a pass over the archive leaves: digest and size by name, small contents, and links between names."""

    files: dict[str, tuple[str, int]] = field(default_factory=dict)
    small: dict[str, bytes] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)

    def file(self, name: str) -> tuple[str, int]:
        for _ in range(2):  # a link of docker save leads to a file, never to another link
            name = self.links.get(name, name)
        try:
            return self.files[name]
        except KeyError:
            raise UsageError(f"the saved image lacks {name}", remedy="save it again with docker save") from None

    def document(self, name: str) -> Any:
        try:
            return json.loads(self.small[name])
        except (KeyError, ValueError):
            raise UsageError(f"the saved image has no readable {name}", remedy="use docker save") from None


def read_saved_image(stream: IO[bytes], blobs: Path | None = None) -> SavedImage:
    """Read what `docker save` writes for one image; keep its blobs in the folder `blobs`, or only measure it.

    Layers are published as docker stores them, uncompressed, so that the manifest digest is a function of the image
    alone and not of the version of a compressor. An archive that holds a whole OCI layout keeps its own manifest.
    Raises UsageError for anything else.
    """
    try:
        archive = _scan(stream, blobs)
    except (tarfile.TarError, EOFError) as error:
        raise UsageError(f"the saved image is not a whole archive: {error}", remedy="save it again") from None
    image = _from_layout(archive, blobs) if "oci-layout" in archive.files else _from_docker(archive, blobs)
    _check_layers(image)
    if blobs is not None:
        wanted = {entry.digest.removeprefix("sha256:") for entry in _blobs_of(image.manifest)}
        for path in blobs.iterdir():
            if path.name not in wanted:
                path.unlink()
    return image


def _scan(stream: IO[bytes], blobs: Path | None) -> _Archive:
    archive = _Archive()
    with tarfile.open(fileobj=stream, mode="r|*") as tar:
        for member in tar:
            name = posixpath.normpath(member.name)
            if member.issym() or member.islnk():
                base = posixpath.dirname(name) if member.issym() else ""
                archive.links[name] = posixpath.normpath(posixpath.join(base, member.linkname))
            elif member.isfile() and (content := tar.extractfile(member)) is not None:
                _take(content, name, member.size, archive, blobs)
    return archive


def _take(content: IO[bytes], name: str, size: int, archive: _Archive, blobs: Path | None) -> None:
    """Hash one file on its way to its blob; small ones are also kept in memory."""
    hashed = hashlib.sha256()
    small = bytearray()
    part = (blobs / ".part").open("wb") if blobs else None
    try:
        while piece := content.read(PIECE):
            hashed.update(piece)
            if size <= MAX_SMALL:
                small += piece
            if part:
                part.write(piece)
    finally:
        if part:
            part.close()
    if blobs:
        (blobs / ".part").replace(blobs / hashed.hexdigest())
    archive.files[name] = (f"sha256:{hashed.hexdigest()}", size)
    if size <= MAX_SMALL:
        archive.small[name] = bytes(small)


def _from_layout(archive: _Archive, blobs: Path | None) -> SavedImage:
    """The one image of an OCI layout (docker 25 and newer, buildx), under the manifest that it has there."""
    listed = Manifest(OCI_INDEX, canonical_json(archive.document("index.json"))).list("manifests")
    nested = (
        runnable(Manifest(entry.media_type, archive.small.get(_blob_name(entry.digest), b"")))
        for entry in listed
        if entry.media_type in INDEX_TYPES
    )
    images = [entry for entry in (*listed, *chain.from_iterable(nested)) if entry.media_type not in INDEX_TYPES]
    if len(images) != 1:
        raise UsageError(f"the saved archive holds {len(images)} images", remedy="save exactly one platform's image")
    manifest = Manifest(images[0].media_type, archive.small.get(_blob_name(images[0].digest), b""))
    if manifest.digest != images[0].digest:
        raise UsageError(f"the saved archive lacks the manifest {images[0].digest}", remedy="save it again")
    return SavedImage(manifest, archive.small.get(_blob_name(manifest.config.digest), b""), blobs)


def _blob_name(digest: str) -> str:
    return "blobs/" + digest.replace(":", "/")


def _from_docker(archive: _Archive, blobs: Path | None) -> SavedImage:
    images = archive.document("manifest.json")
    if not isinstance(images, list) or len(images) != 1 or not isinstance(images[0], dict):
        raise UsageError("the saved archive does not hold exactly one image", remedy="save one image")
    config = archive.small.get(posixpath.normpath(str(images[0].get("Config"))), b"")
    layers = [archive.file(posixpath.normpath(str(name))) for name in images[0].get("Layers") or ()]
    body = {
        "schemaVersion": 2,
        "mediaType": OCI_MANIFEST,
        "config": Descriptor.of(config, CONFIG_MEDIA_TYPE).to_json(),
        "layers": [Descriptor(LAYER_MEDIA_TYPE, digest, size).to_json() for digest, size in layers],
    }
    return SavedImage(Manifest(OCI_MANIFEST, canonical_json(body)), config, blobs)


def _blobs_of(manifest: Manifest) -> tuple[Descriptor, ...]:
    return (*manifest.list("layers"), manifest.config)


def _check_layers(image: SavedImage) -> None:
    """The configuration names its layers by the digest of their uncompressed content: hold the archive to it."""
    try:
        expected = json.loads(image.config)["rootfs"]["diff_ids"]
    except (ValueError, KeyError, TypeError):
        raise UsageError("the saved image has no readable configuration", remedy="save it again") from None
    layers = image.manifest.list("layers")
    plain = [entry.digest for entry in layers if entry.media_type == LAYER_MEDIA_TYPE]
    if len(layers) != len(expected) or any(digest not in expected for digest in plain):
        raise UsageError("the layers of the saved image are not those of its configuration", remedy="save it again")


# Publishing


@dataclass(frozen=True)
class Published:
    """What is in the registry now; `tag_moved` is False with the reason in `kept` when the tag was left alone."""

    reference: Reference
    manifest_digest: str
    receipt_digest: str
    bytes_sent: int
    tag_moved: bool
    kept: str


@dataclass(frozen=True)
class Candidate:
    """A reviewed receipt, as far as publishing needs it."""

    manifest_digest: str
    index_digest: str | None
    config_digest: str | None
    result: Result
    profile_digest: str
    finished_at: str
    files: Mapping[str, bytes]

    @classmethod
    def of(cls, receipt: Receipt, files: Mapping[str, bytes]) -> Candidate:
        """Raises UsageError for a receipt that is not of an image."""
        predicate = receipt.predicate
        if predicate.identity is not Identity.IMAGE or predicate.image is None:
            raise UsageError(
                f"the receipt is of a {predicate.identity.value}, not of an image",
                remedy="qualify the image first: qualify run --target image:REF",
            )
        subject = f"sha256:{receipt.subject[0].digest.sha256}"
        if subject != predicate.image.manifest_digest:
            raise UsageError("the receipt's subject is not the image that it describes", remedy="review the receipt")
        return cls(
            manifest_digest=subject,
            index_digest=predicate.image.index_digest,
            config_digest=predicate.image.config_digest,
            result=predicate.result,
            profile_digest=predicate.profile.digest.sha256,
            finished_at=predicate.finished_at,
            files=files,
        )


def publish(
    candidate: Candidate,
    reference: Reference,
    repository: Repository,
    export: Callable[[], SavedImage],
    progress: Progress,
) -> Published:
    """Push the image if the registry lacks it, attach the receipt, and move the tag if the receipt is PASSED.

    `export` gives the image, and is called only if the registry lacks it. Raises UsageError when image and receipt do
    not belong together, RegistryError when the registry refuses or breaks off; the tag is untouched in both cases.
    """
    wanted = candidate.manifest_digest
    if reference.digest and reference.digest != wanted:
        raise UsageError(
            f"the receipt is of {wanted}, not of {reference.digest}", remedy="publish it for its own image"
        )
    before = _tag_state(repository, reference.tag)
    sent = 0
    if not repository.has_manifest(wanted):
        progress("export the image")
        image = export()
        if image.manifest.digest != wanted:
            raise UsageError(
                f"the receipt is of {wanted}, the image is {image.manifest.digest}",
                remedy="publish it for its own image",
            )
        sent = _push_image(repository, image, progress)
    manifest = repository.manifest(wanted)
    progress("attach the receipt")
    receipt_digest = _attach(repository, manifest, candidate)
    tagged = _tagged_manifest(repository, manifest, candidate)
    kept = _reason_to_keep(candidate, reference.tag)
    if not kept and reference.tag:
        _move_tag(repository, reference.tag, tagged, before)
    return Published(reference, wanted, receipt_digest, sent, tag_moved=not kept, kept=kept)


def _tag_state(repository: Repository, tag: str | None) -> str | None:
    """The digest that a tag names now; None without a tag."""
    if tag is None:
        return None
    try:
        return repository.manifest(tag).digest
    except NotFound:
        return None


def _push_image(repository: Repository, image: SavedImage, progress: Progress) -> int:
    """Blobs first, the manifest last and by digest: until then nobody can pull any of it. Bytes sent."""
    sent = 0
    for descriptor in _blobs_of(image.manifest):
        progress(f"push {descriptor.digest[7:19]} ({descriptor.size >> 20} MiB)")
        if repository.push_blob(descriptor, image.blob(descriptor)):
            sent += descriptor.size
    repository.push_manifest(image.manifest)
    return sent


def _attach(repository: Repository, subject: Manifest, candidate: Candidate) -> str:
    """The digest of the referrer. It is a function of receipt and subject, so that publishing again adds nothing."""
    statement, bundle = candidate.files[STATEMENT], pack(candidate.files)
    layers = (
        (Descriptor.of(statement, STATEMENT_MEDIA_TYPE, {TITLE: STATEMENT}), statement),
        (Descriptor.of(bundle, BUNDLE_MEDIA_TYPE, {TITLE: "receipt.tar.gz"}), bundle),
    )
    empty = Descriptor.of(EMPTY_CONTENT, EMPTY_TYPE)
    for descriptor, content in (*layers, (empty, EMPTY_CONTENT)):
        repository.push_blob(descriptor, content)
    body = {
        "schemaVersion": 2,
        "mediaType": OCI_MANIFEST,
        "artifactType": ARTIFACT_TYPE,
        "config": empty.to_json(),
        "layers": [descriptor.to_json() for descriptor, _ in layers],
        "subject": subject.descriptor.to_json(),
        "annotations": {
            CREATED: candidate.finished_at,
            RESULT: candidate.result.value,
            PROFILE_DIGEST: candidate.profile_digest,
        },
    }
    referrer = Manifest(OCI_MANIFEST, canonical_json(body))
    repository.attach(referrer, subject.digest)
    if repository.manifest(referrer.digest).content != referrer.content:
        raise RegistryError("the receipt's manifest was not read back as it was sent")
    return referrer.digest


def _tagged_manifest(repository: Repository, manifest: Manifest, candidate: Candidate) -> Manifest:
    """What the tag will name: the platform manifest, or the index that holds it and no other runnable image."""
    if candidate.index_digest is None:
        return manifest
    index = repository.manifest(candidate.index_digest)
    others = [entry.digest for entry in runnable(index) if entry.digest != manifest.digest]
    if others or manifest.digest not in {entry.digest for entry in runnable(index)}:
        raise UsageError(
            f"the index {index.digest} holds images that this receipt is not of",
            remedy="qualify and publish one platform at a time",
        )
    return index


def _reason_to_keep(candidate: Candidate, tag: str | None) -> str:
    if tag is None:
        return "no tag was asked for"
    return "" if candidate.result is Result.PASSED else f"the receipt is {candidate.result.value}"


def _move_tag(repository: Repository, tag: str, manifest: Manifest, before: str | None) -> None:
    now = _tag_state(repository, tag)
    if now not in (before, manifest.digest):
        raise RegistryError(
            f"tag {tag} was moved to {now} by someone else meanwhile; it is left there",
            remedy="find out who publishes it, then run publish again",
        )
    repository.push_manifest(manifest, tag)
    if _tag_state(repository, tag) != manifest.digest:
        raise RegistryError(f"tag {tag} does not name {manifest.digest} after it was moved")


# The receipt as one blob


def pack(files: Mapping[str, bytes]) -> bytes:
    """A receipt folder as one archive; the same files give the same bytes."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for path, content in sorted(files.items()):
            member = tarfile.TarInfo(path)
            member.size = len(content)
            member.mode = 0o644
            tar.addfile(member, io.BytesIO(content))
    return compress(buffer.getvalue())


def unpack(bundle: bytes) -> dict[str, bytes]:
    """The files of a bundle that came from outside. Raises EvidenceError for anything but plain files in bounds."""
    limit = MAX_BYTES + (MAX_FILES << 10)  # a header and padding per file
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(bundle)) as compressed:
            content = compressed.read(limit + 1)
        if len(content) > limit:
            raise EvidenceError(f"the receipt's bundle expands to more than {limit} bytes")
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as tar:
            return _plain_files(tar)
    except (OSError, EOFError, tarfile.TarError) as error:
        raise EvidenceError(f"the receipt's bundle is not a whole archive: {error}") from None


def _plain_files(tar: tarfile.TarFile) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for member in tar:
        file = tar.extractfile(member) if member.isreg() else None
        if file is None or not SAFE_PATH.match(member.name) or member.name in files or len(files) == MAX_FILES:
            raise EvidenceError(f"the receipt's bundle has the entry {ascii(member.name)[:80]}, which is refused")
        files[member.name] = file.read()
    return files


# Finding it again


def fetch_receipt(reference: Reference, repository: Repository, folder: Path) -> Path:
    """Find the newest receipt of an image and write it to the new folder `folder`, ready for review.

    Raises NotFound if the image has none, RegistryError if what is attached is not a receipt of this image.
    """
    manifest = resolve(repository, reference).manifest
    found = repository.referrers(manifest.digest, ARTIFACT_TYPE)
    if not found:
        raise NotFound(f"{reference} has no receipt", remedy="publish one, or ask who published the image")
    newest = max(found, key=lambda entry: (entry.annotations.get(CREATED, ""), entry.digest))
    files = _read_referrer(repository, repository.manifest(newest.digest), manifest.digest)
    for path, content in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    return folder


def _read_referrer(repository: Repository, referrer: Manifest, subject: str) -> dict[str, bytes]:
    layers = {entry.media_type: entry for entry in referrer.list("layers")}
    if Descriptor.read(referrer.body.get("subject")).digest != subject:
        raise RegistryError(f"the receipt {referrer.digest} is attached to another image than {subject}")
    if set(layers) != {STATEMENT_MEDIA_TYPE, BUNDLE_MEDIA_TYPE}:
        raise RegistryError(f"{referrer.digest} is not a receipt of this project")
    statement = repository.blob(layers[STATEMENT_MEDIA_TYPE], MAX_STATEMENT)
    files = unpack(repository.blob(layers[BUNDLE_MEDIA_TYPE], MAX_BYTES))
    if files.get(STATEMENT) != statement:
        raise RegistryError(f"the statement of {referrer.digest} is not the one in its bundle")
    if _subject_of(statement) != subject:
        raise RegistryError(f"the receipt at {subject} is of another image", remedy="do not trust who attached it")
    return files


def _subject_of(statement: bytes) -> str:
    """Only as much as tells whose receipt it is; `review` judges the rest."""
    try:
        return f"sha256:{json.loads(statement)['subject'][0]['digest']['sha256']}"
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        raise RegistryError("the attached statement names no subject") from None


def open_repository(reference: Reference) -> Repository:
    """The repository of a reference, with the login that the docker configuration has for it."""
    return Repository(reference, credentials=credentials_for(reference.registry))


# What the command line calls


def publish_receipt(folder: Path, target: str, progress: Progress, docker: Docker | None = None) -> Published:
    """Review the receipt in `folder`, and publish it with its image, which the daemon or the registry has, as `target`.

    Needs free space for the image below the folder for temporary files. Raises UsageError for a receipt that does not
    verify, is not of an image, or not of this one.
    """
    reference = Reference.parse(target)
    candidate = load_candidate(folder)
    repository = open_repository(reference)
    try:
        with tempfile.TemporaryDirectory(prefix="qualify-publish-") as blobs:
            export = partial(_export, candidate, docker or Docker(), Path(blobs))
            return publish(candidate, reference, repository, export, progress)
    finally:
        repository.close()


def load_candidate(folder: Path) -> Candidate:
    """A receipt folder for which every verifier step holds. Raises UsageError."""
    from qualify.receipt.verify import review  # loads every claim, which reading a registry does not need

    receipt = review(folder).receipt
    if receipt is None:
        raise UsageError(f"the receipt in {folder} does not verify", remedy=f"run qualify review {folder}")
    return Candidate.of(receipt, read_folder(folder))


def fetch(target: str, folder: Path) -> Path:
    """The receipt of the image `target`, `oci://` before it or not, in the new folder `folder`, ready for review."""
    reference = Reference.parse(target.removeprefix("oci://"))
    repository = open_repository(reference)
    try:
        return fetch_receipt(reference, repository, folder)
    finally:
        repository.close()


def _export(candidate: Candidate, docker: Docker, blobs: Path) -> SavedImage:
    # Which of its digests a daemon knows an image by depends on the store that it uses.
    for name in (candidate.config_digest, candidate.manifest_digest):
        if name is not None and docker.inspect("image", name) is not None:
            with docker.save(name) as stream:
                return read_saved_image(stream, blobs)
    raise UsageError(
        f"neither the registry nor this machine has the image {candidate.manifest_digest}",
        remedy="publish from the machine that qualified it, or push the image first",
    )
