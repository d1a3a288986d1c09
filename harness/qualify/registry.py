# SPDX-License-Identifier: Apache-2.0
"""A client for OCI registries: blobs, manifests, tags and referrers (OCI distribution specification 1.1).

Every digest is computed here from the bytes that travelled; what a registry says about a digest is only compared.
Credentials come from the docker configuration, go to their registry and its token service only, and are never shown.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import ipaddress
import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

import httpx

from qualify.errors import QualifyError, UsageError

OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
OCI_INDEX = "application/vnd.oci.image.index.v1+json"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_INDEX = "application/vnd.docker.distribution.manifest.list.v2+json"
INDEX_TYPES = (OCI_INDEX, DOCKER_INDEX)
MANIFEST_TYPES = (OCI_MANIFEST, DOCKER_MANIFEST, *INDEX_TYPES)

EMPTY_CONTENT = b"{}"
"""The content of the empty descriptor, which stands for "this artifact has no configuration"."""
EMPTY_TYPE = "application/vnd.oci.empty.v1+json"

MAX_MANIFEST = 4 << 20
"""Bytes of a manifest or index; the limit that the specification asks registries to accept."""
REFERRER_ATTEMPTS = 5
"""Rounds of the fallback tag's read-modify-write: each lost round means that another writer won one."""
PIECE = 1 << 20
TIMEOUT = httpx.Timeout(60.0, read=300.0)
"""Seconds for one step of an exchange; a registry may take minutes to file a large blob after its last byte."""

_DIGEST = re.compile(r"^sha256:[0-9a-f]{64}$")
_TAG = re.compile(r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$")
_REPOSITORY = re.compile(r"^[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*)*$")
_HOST = re.compile(r"^(?:\[[0-9a-fA-F:]+\]|[A-Za-z0-9.-]+)(?::\d{1,5})?$")


class RegistryError(QualifyError):
    """A registry refused, broke off, or answered with something else than it promised."""


class NotFound(RegistryError):
    """The registry does not have the named manifest or blob."""


def digest_of(content: bytes) -> str:
    return "sha256:" + hashlib.sha256(content).hexdigest()


def canonical_json(value: Any) -> bytes:
    """The bytes under which a manifest of ours is named."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


@dataclass(frozen=True)
class Reference:
    """An image by registry and repository, and by tag, digest or both."""

    registry: str
    repository: str
    tag: str | None = None
    digest: str | None = None

    @classmethod
    def parse(cls, text: str) -> Reference:
        """Read `[REGISTRY/]REPOSITORY[:TAG][@sha256:HEX]` as docker does. Raises UsageError."""
        name, _, digest = text.partition("@")
        head, slash, rest = name.partition("/")
        named = bool(slash) and ("." in head or ":" in head or head == "localhost")
        registry, path = (head, rest) if named else ("docker.io", name)
        path, colon, tag = path.partition(":")
        if registry == "docker.io" and "/" not in path:
            path = f"library/{path}"
        if not _HOST.match(registry) or not _REPOSITORY.match(path):
            raise UsageError(f"{text!r} is not an image reference", remedy="write REGISTRY/REPOSITORY:TAG")
        if colon and not _TAG.match(tag):
            raise UsageError(f"{text!r}: {tag!r} is not a tag", remedy="use letters, digits, '.', '_' and '-'")
        if "@" in text and not _DIGEST.match(digest):
            raise UsageError(f"{text!r}: {digest!r} is not a digest", remedy="write sha256: and 64 hex digits")
        return cls(registry, path, tag or (None if digest else "latest"), digest or None)

    @property
    def name(self) -> str:
        """The repository with its registry, without tag and digest."""
        return f"{self.registry}/{self.repository}"

    def __str__(self) -> str:
        return self.name + (f":{self.tag}" if self.tag else "") + (f"@{self.digest}" if self.digest else "")

    def at(self, digest: str) -> Reference:
        return replace(self, tag=None, digest=digest)


@dataclass(frozen=True)
class Descriptor:
    """What an index or manifest says about one piece of content; `size` in bytes."""

    media_type: str
    digest: str
    size: int
    artifact_type: str | None = None
    annotations: Mapping[str, str] = field(default_factory=dict)
    platform: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, content: bytes, media_type: str, annotations: Mapping[str, str] | None = None) -> Descriptor:
        return cls(media_type, digest_of(content), len(content), annotations=annotations or {})

    @classmethod
    def read(cls, value: Any) -> Descriptor:
        """Check and take over a descriptor that came from outside. Raises RegistryError."""
        entry = value if isinstance(value, dict) else {}
        media_type, digest, size = entry.get("mediaType"), entry.get("digest"), entry.get("size")
        annotations, platform = entry.get("annotations") or {}, entry.get("platform") or {}
        if (
            not isinstance(media_type, str)
            or not (isinstance(digest, str) and _DIGEST.match(digest))
            or not (isinstance(size, int) and size >= 0)
            or not isinstance(annotations, dict)
            or not isinstance(platform, dict)
        ):
            raise RegistryError("a manifest contains something that is not a sha256 descriptor")
        return cls(media_type, digest, size, entry.get("artifactType"), annotations, platform)

    def to_json(self) -> dict[str, Any]:
        optional = {
            "artifactType": self.artifact_type,
            "annotations": dict(self.annotations),
            "platform": dict(self.platform),
        }
        known = {"mediaType": self.media_type, "digest": self.digest, "size": self.size}
        return known | {key: value for key, value in optional.items() if value}


@dataclass(frozen=True)
class Manifest:
    """An image manifest or an index, as the bytes that its digest names."""

    media_type: str
    content: bytes

    @property
    def digest(self) -> str:
        return digest_of(self.content)

    @property
    def descriptor(self) -> Descriptor:
        return Descriptor(self.media_type, self.digest, len(self.content))

    @property
    def body(self) -> dict[str, Any]:
        """The parsed content. Raises RegistryError."""
        try:
            body = json.loads(self.content)
        except ValueError:
            raise RegistryError(f"manifest {self.digest} is not JSON") from None
        if not isinstance(body, dict):
            raise RegistryError(f"manifest {self.digest} is not a JSON object")
        return body

    @property
    def is_index(self) -> bool:
        return self.media_type in INDEX_TYPES

    def list(self, key: str) -> tuple[Descriptor, ...]:
        """The descriptors under `layers` or `manifests`. Raises RegistryError."""
        entries = self.body.get(key)
        if not isinstance(entries, list):
            raise RegistryError(f"manifest {self.digest} has no {key}")
        return tuple(Descriptor.read(entry) for entry in entries)

    @property
    def config(self) -> Descriptor:
        return Descriptor.read(self.body.get("config"))


@dataclass(frozen=True)
class Credentials:
    """What the docker configuration holds for one registry."""

    user: str
    secret: str = field(repr=False)
    identity_token: str = field(default="", repr=False)


def credentials_for(registry: str, folder: Path | None = None) -> Credentials | None:
    """Read the docker configuration: credential helpers, then the credential store, then the stored entry.

    None where it has nothing for this registry. Raises UsageError for a configuration that cannot be read.
    """
    path = (folder or Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker")) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        raise UsageError(f"docker configuration {path} cannot be read", remedy="repair or remove it") from None
    key = "https://index.docker.io/v1/" if registry == "docker.io" else registry
    helper = (config.get("credHelpers") or {}).get(registry) or config.get("credsStore")
    if helper and (found := _ask_helper(str(helper), key)):
        return found
    auths = config.get("auths") or {}
    return _stored_entry(auths.get(key) or auths.get(f"https://{key}") or {}, registry)


def _ask_helper(helper: str, key: str) -> Credentials | None:
    try:
        answer = subprocess.run(
            [f"docker-credential-{helper}", "get"], input=key, capture_output=True, text=True, timeout=60, check=False
        )
        found = json.loads(answer.stdout) if answer.returncode == 0 else {}
    except (OSError, ValueError, subprocess.TimeoutExpired):
        raise UsageError(
            f"credential helper docker-credential-{helper} does not work", remedy="install it or run docker login"
        ) from None
    user, secret = found.get("Username", ""), found.get("Secret", "")
    if not secret:
        return None
    return Credentials("", "", identity_token=secret) if user == "<token>" else Credentials(user, secret)


def _stored_entry(entry: Mapping[str, Any], registry: str) -> Credentials | None:
    if token := entry.get("identitytoken"):
        return Credentials("", "", identity_token=str(token))
    if not entry.get("auth"):
        return None
    try:
        user, _, secret = base64.b64decode(str(entry["auth"]), validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError):
        raise UsageError(f"the stored login for {registry} is damaged", remedy="run docker login again") from None
    return Credentials(user, secret.rstrip("\0"))


def is_loopback(host: str) -> bool:
    """Whether a host, with or without a port, can only be this machine."""
    name = urlsplit(f"//{host}").hostname or ""
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


def _origin(registry: str) -> str:
    """https everywhere; plain http only where nothing leaves this machine."""
    host = "registry-1.docker.io" if registry == "docker.io" else registry
    return f"{'http' if is_loopback(host) else 'https'}://{host}"


class Repository:
    """One repository of one registry. Methods raise RegistryError with one clear line."""

    def __init__(
        self,
        reference: Reference,
        *,
        credentials: Credentials | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.name = reference.repository
        self.registry = reference.registry
        self._origin = _origin(reference.registry)
        self._credentials = credentials
        self._authorization: str | None = None
        self._http = httpx.Client(timeout=TIMEOUT, follow_redirects=True, transport=transport)

    def close(self) -> None:
        self._http.close()

    # Manifests

    def manifest(self, reference: str) -> Manifest:
        """The manifest or index under a tag or digest. Raises NotFound; RegistryError if the bytes are not its own."""
        answer = self._call("GET", f"manifests/{reference}", headers={"Accept": ", ".join(MANIFEST_TYPES)})
        if answer.status_code == 404:
            raise NotFound(f"{self.registry}/{self.name} has no {reference}", remedy="check repository and tag")
        self._expect(answer, (200,), f"manifest {reference}")
        if len(answer.content) > MAX_MANIFEST:
            raise RegistryError(f"manifest {reference} is larger than {MAX_MANIFEST} bytes")
        media_type = answer.headers.get("Content-Type", "").partition(";")[0].strip()
        manifest = Manifest(media_type, answer.content)
        stated = answer.headers.get("Docker-Content-Digest", manifest.digest)
        promised = reference if reference.startswith("sha256:") else manifest.digest
        if manifest.digest != stated or manifest.digest != promised:
            raise RegistryError(
                f"the registry answered for {reference} with bytes of {manifest.digest}",
                remedy="do not use this registry's content until that is explained",
            )
        if media_type not in MANIFEST_TYPES:
            raise RegistryError(f"{reference} is a {media_type or 'nameless type'}, not an image manifest or index")
        return manifest

    def has_manifest(self, digest: str) -> bool:
        answer = self._call("HEAD", f"manifests/{digest}", headers={"Accept": ", ".join(MANIFEST_TYPES)})
        self._expect(answer, (200, 404), f"manifest {digest}")
        return answer.status_code == 200

    def push_manifest(self, manifest: Manifest, tag: str | None = None) -> bool:
        """Store a manifest under its digest, or under a tag; True if the registry linked its subject."""
        answer = self._call(
            "PUT",
            f"manifests/{tag or manifest.digest}",
            headers={"Content-Type": manifest.media_type},
            body=lambda: iter((manifest.content,)),
            length=len(manifest.content),
        )
        self._expect(answer, (201,), f"the manifest {manifest.digest}")
        stated = answer.headers.get("Docker-Content-Digest", manifest.digest)
        if stated != manifest.digest:
            raise RegistryError(f"the registry stored {manifest.digest} as {stated}")
        return "OCI-Subject" in answer.headers

    # Blobs

    def has_blob(self, digest: str) -> bool:
        answer = self._call("HEAD", f"blobs/{digest}")
        self._expect(answer, (200, 404), f"blob {digest}")
        return answer.status_code == 200

    def push_blob(self, descriptor: Descriptor, source: Path | bytes) -> bool:
        """Upload unless it is there; True if bytes were sent. The registry checks them against the digest."""
        if self.has_blob(descriptor.digest):
            return False
        begun = self._call("POST", "blobs/uploads/", length=0)
        self._expect(begun, (202,), f"an upload to {self.registry}/{self.name}")
        place = self._same_registry(begun, begun.headers.get("Location", ""))
        answer = self._send(
            "PUT",
            str(httpx.URL(place).copy_merge_params({"digest": descriptor.digest})),
            headers={"Content-Type": "application/octet-stream"},
            body=lambda: _pieces(source),
            length=descriptor.size,
        )
        self._expect(answer, (201,), f"blob {descriptor.digest}")
        return True

    def blob(self, descriptor: Descriptor, limit: int) -> bytes:
        """The content, of at most `limit` bytes. Raises RegistryError if size or digest is not as described."""
        if descriptor.size > limit:
            raise RegistryError(f"blob {descriptor.digest} has {descriptor.size} bytes, more than {limit}")
        answer = self._call("GET", f"blobs/{descriptor.digest}", limit=descriptor.size)
        if answer.status_code == 404:
            raise NotFound(f"{self.registry}/{self.name} has no blob {descriptor.digest}")
        self._expect(answer, (200,), f"blob {descriptor.digest}")
        if digest_of(answer.content) != descriptor.digest:
            raise RegistryError(f"blob {descriptor.digest} arrived as {digest_of(answer.content)}")
        return answer.content

    # Referrers

    def referrers(self, subject: str, artifact_type: str) -> tuple[Descriptor, ...]:
        """What refers to `subject`: by the referrers interface, else by the fallback tag. Filtered here."""
        found = self._referrers_interface(subject, artifact_type)
        if found is None:
            index = self._fallback_index(subject)
            found = index.list("manifests") if index else ()
        return tuple(entry for entry in found if entry.artifact_type == artifact_type)

    def attach(self, manifest: Manifest, subject: str) -> None:
        """Push a referrer of `subject` so that `referrers` finds it, also on a registry without the interface.

        The fallback tag has no locking: after each write it is read back, and a round that another writer undid is
        repeated. Raises RegistryError when the entry is not there in the end.
        """
        linked = self.push_manifest(manifest)
        if not linked:
            self._add_to_fallback_index(manifest, subject)
        artifact_type = str(manifest.body.get("artifactType", ""))
        if manifest.digest not in {entry.digest for entry in self.referrers(subject, artifact_type)}:
            raise RegistryError(
                f"the registry took {manifest.digest} but does not list it under {subject}",
                remedy="run publish again; file a bug with the registry if it stays so",
            )

    def _referrers_interface(self, subject: str, artifact_type: str) -> tuple[Descriptor, ...] | None:
        found: list[Descriptor] = []
        place: str | None = f"{self._origin}/v2/{self.name}/referrers/{subject}?artifactType={artifact_type}"
        seen: set[str] = set()
        while place:
            seen.add(place)
            answer = self._send("GET", place, headers={"Accept": OCI_INDEX}, limit=MAX_MANIFEST)
            if answer.status_code == 404:
                return None
            self._expect(answer, (200,), f"referrers of {subject}")
            found += Manifest(OCI_INDEX, answer.content).list("manifests")
            following = answer.links.get("next", {}).get("url")
            place = self._same_registry(answer, following) if following else None
            if place in seen:
                raise RegistryError(f"the list of referrers of {subject} never ends")
        return tuple(found)

    def _fallback_index(self, subject: str) -> Manifest | None:
        tag = fallback_tag(subject)
        try:
            index = self.manifest(tag)
        except NotFound:
            return None
        if index.media_type != OCI_INDEX:
            raise RegistryError(f"tag {tag} is a {index.media_type}, not an index of referrers; it is left as it is")
        return index

    def _add_to_fallback_index(self, manifest: Manifest, subject: str) -> None:
        body = manifest.body
        entry = replace(
            manifest.descriptor,
            artifact_type=body.get("artifactType"),
            annotations=body.get("annotations") or {},
        ).to_json()
        for _ in range(REFERRER_ATTEMPTS):
            index = self._fallback_index(subject)
            listed = list(index.body.get("manifests", [])) if index else []
            if entry in listed:
                return
            kept = [other for other in listed if other.get("digest") != manifest.digest]
            value = {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [*kept, entry]}
            self.push_manifest(Manifest(OCI_INDEX, canonical_json(value)), fallback_tag(subject))
        # The last round's write has not been read back yet: `attach` does that through `referrers`.

    # Transport

    def _call(
        self,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: Callable[[], Iterator[bytes]] | None = None,
        length: int | None = None,
        limit: int | None = None,
    ) -> httpx.Response:
        url = f"{self._origin}/v2/{self.name}/{path}"
        return self._send(method, url, headers=headers, body=body, length=length, limit=limit)

    def _send(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: Callable[[], Iterator[bytes]] | None = None,
        length: int | None = None,
        limit: int | None = None,
    ) -> httpx.Response:
        """Send, and once more after a challenge. `body` is a factory, because a stream can be read only once."""
        answer = self._once(method, url, headers, body, length, limit)
        if answer.status_code == 401:
            self._answer_challenge(answer.headers.get("WWW-Authenticate", ""), push=method not in ("GET", "HEAD"))
            answer = self._once(method, url, headers, body, length, limit)
        return answer

    def _once(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str] | None,
        body: Callable[[], Iterator[bytes]] | None,
        length: int | None,
        limit: int | None,
    ) -> httpx.Response:
        sent = dict(headers or {})
        if length is not None:
            sent["Content-Length"] = str(length)
        if self._authorization and self._is_ours(url):
            sent["Authorization"] = self._authorization
        try:
            request = self._http.build_request(method, url, headers=sent, content=body() if body else None)
            answer = self._http.send(request, stream=True)
            try:
                content = _read(answer, MAX_MANIFEST if limit is None else limit)
            finally:
                answer.close()
        except httpx.HTTPError as error:
            raise RegistryError(
                f"the connection to {self.registry} broke ({type(error).__name__}) at {method} of {self.name}",
                remedy="run the command again; what is already there is not sent twice",
            ) from None
        return httpx.Response(answer.status_code, headers=_plain(answer.headers), content=content, request=request)

    def _answer_challenge(self, challenge: str, *, push: bool) -> None:
        scheme, _, rest = challenge.partition(" ")
        self._authorization = None
        if scheme.lower() == "basic" and self._credentials:
            login = f"{self._credentials.user}:{self._credentials.secret}"
            self._authorization = "Basic " + base64.b64encode(login.encode()).decode()
        elif scheme.lower() == "bearer":
            self._authorization = "Bearer " + self._token(dict(re.findall(r'(\w+)="([^"]*)"', rest)), push)

    def _token(self, challenge: Mapping[str, str], push: bool) -> str:
        realm = challenge.get("realm", "")
        parts = urlsplit(realm)
        if parts.scheme != "https" and not (parts.scheme == "http" and is_loopback(parts.netloc)):
            raise RegistryError(f"{self.registry} wants a login at an unencrypted address", remedy="use https")
        scope = f"repository:{self.name}:{'pull,push' if push else 'pull'}"
        query = {"service": challenge.get("service", ""), "scope": scope}
        login = self._credentials
        try:
            if login and login.identity_token:
                form = query | {"grant_type": "refresh_token", "refresh_token": login.identity_token}
                answer = self._http.post(realm, data=form | {"client_id": "vllm-qualify"}, follow_redirects=False)
            else:
                basic = httpx.BasicAuth(login.user, login.secret) if login else None
                answer = self._http.get(realm, params=query, auth=basic, follow_redirects=False)
            body = answer.json() if answer.status_code == 200 else {}
        except (httpx.HTTPError, ValueError):
            raise RegistryError(f"the token service of {self.registry} does not answer") from None
        token = body.get("token") or body.get("access_token") if isinstance(body, dict) else None
        if not token:
            raise RegistryError(
                f"{self.registry} refused the login for {self.name} with status {answer.status_code}",
                remedy=f"run docker login {self.registry}",
            )
        return str(token)

    def _expect(self, answer: httpx.Response, statuses: tuple[int, ...], what: str) -> None:
        if answer.status_code in statuses:
            return
        if answer.status_code in (401, 403):
            raise RegistryError(
                f"{self.registry} does not let this login use {self.name} ({answer.status_code})",
                remedy=f"run docker login {self.registry} with an account that may",
            )
        raise RegistryError(
            f"{self.registry} answered {answer.status_code} for {what}{_reason(answer.content)}",
            remedy="see the registry's log",
        )

    def _is_ours(self, url: str) -> bool:
        return url.startswith(self._origin + "/")

    def _same_registry(self, answer: httpx.Response, location: str) -> str:
        """An address that the registry sent, made absolute; refused where it would leave https for http."""
        place = urljoin(str(answer.request.url), location)
        if not location or (urlsplit(place).scheme != "https" and not self._is_ours(place)):
            raise RegistryError(f"{self.registry} sent an address that cannot be used")
        return place


def fallback_tag(subject: str) -> str:
    """The tag under which registries without a referrers interface list what refers to a digest."""
    return subject.replace(":", "-", 1)


def runnable(index: Manifest) -> tuple[Descriptor, ...]:
    """The platform manifests of an index, without the build attestations that travel beside them."""
    return tuple(
        entry
        for entry in index.list("manifests")
        if entry.annotations.get("vnd.docker.reference.type") != "attestation-manifest"
        and entry.platform.get("os") != "unknown"
    )


@dataclass(frozen=True)
class Resolved:
    """What a reference leads to: one platform's image manifest, and the index that it was found in, if any."""

    manifest: Manifest
    index: Manifest | None


def resolve(repository: Repository, reference: Reference, architecture: str = "amd64") -> Resolved:
    """Tag or digest → index, if there is one → the one platform manifest for Linux. Raises RegistryError.

    Where the reference has both a tag and a digest they must agree, so that a tag that was moved is noticed.
    """
    found = repository.manifest(reference.tag or reference.digest or "latest")
    fits = [found.descriptor]
    if found.is_index:
        fits = [
            entry
            for entry in runnable(found)
            if entry.platform.get("os") == "linux" and entry.platform.get("architecture") == architecture
        ]
        if len(fits) != 1:
            raise RegistryError(
                f"{reference} has {len(fits)} images for linux/{architecture}", remedy="name one by its digest"
            )
    if reference.digest and reference.digest not in (found.digest, fits[0].digest):
        raise RegistryError(
            f"tag {reference.tag} of {reference.name} is {found.digest}, not {reference.digest}",
            remedy="the tag was moved: name the image that you mean",
        )
    return Resolved(repository.manifest(fits[0].digest), found) if found.is_index else Resolved(found, None)


def _pieces(source: Path | bytes) -> Iterator[bytes]:
    if isinstance(source, bytes):
        yield source
        return
    with source.open("rb") as file:
        while piece := file.read(PIECE):
            yield piece


def _read(answer: httpx.Response, limit: int) -> bytes:
    content = bytearray()
    for piece in answer.iter_bytes():
        content += piece
        if len(content) > limit:
            raise RegistryError(f"the registry sent more than the {limit} bytes that were announced")
    return bytes(content)


def _plain(headers: httpx.Headers) -> httpx.Headers:
    """The headers for content that is already decoded."""
    return httpx.Headers([(key, value) for key, value in headers.multi_items() if key.lower() != "content-encoding"])


def _reason(content: bytes) -> str:
    """The registry's own error codes; its free text may quote what was sent and is left out."""
    try:
        codes = [str(entry["code"]) for entry in json.loads(content)["errors"]]
    except (ValueError, KeyError, TypeError):
        return ""
    return f": {', '.join(codes)}"[:200]
