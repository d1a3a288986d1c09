# SPDX-License-Identifier: Apache-2.0
"""The registry client: references, digests, logins and referrers."""

import base64
import json

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from qualify.errors import UsageError
from qualify.registry import (
    OCI_INDEX,
    OCI_MANIFEST,
    Credentials,
    Descriptor,
    Manifest,
    Reference,
    RegistryError,
    Repository,
    canonical_json,
    credentials_for,
    digest_of,
    fallback_tag,
    resolve,
)

SUBJECT = "sha256:" + "5" * 64
KIND = "application/vnd.test"


def referrer(number: int) -> Manifest:
    empty = Descriptor.of(b"{}", "application/vnd.oci.empty.v1+json").to_json()
    body = {
        "schemaVersion": 2,
        "mediaType": OCI_MANIFEST,
        "artifactType": KIND,
        "config": empty,
        "layers": [empty],
        "subject": {"mediaType": OCI_MANIFEST, "digest": SUBJECT, "size": 1},
        "annotations": {"number": str(number)},
    }
    return Manifest(OCI_MANIFEST, canonical_json(body))


def open_stub(registry, **options) -> Repository:
    return Repository(Reference(registry.host, "a/b"), **options)


PART = st.from_regex(r"\A[a-z0-9]{1,8}([._-][a-z0-9]{1,4})?\Z")


@settings(deadline=None)
@given(
    registry=st.sampled_from(["localhost", "127.0.0.1:5000", "[::1]:5000", "ghcr.io", "docker.io"]),
    path=st.lists(PART, min_size=2, max_size=3),
    tag=st.none() | st.from_regex(r"\A[A-Za-z0-9_][A-Za-z0-9._-]{0,20}\Z"),
    digest=st.none() | st.from_regex(r"\Asha256:[0-9a-f]{64}\Z"),
)
def test_reference_survives_print_and_parse(registry, path, tag, digest):
    """A reference is read back from its own text; without tag and digest the tag is `latest`."""
    reference = Reference(registry, "/".join(path), tag, digest)
    expected = reference if tag or digest else Reference(registry, "/".join(path), "latest")
    assert expected == Reference.parse(str(reference))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("debian", Reference("docker.io", "library/debian", "latest")),
        ("vllm/vllm-openai:v1", Reference("docker.io", "vllm/vllm-openai", "v1")),
        ("localhost/x", Reference("localhost", "x", "latest")),
    ],
)
def test_short_references_mean_what_docker_means(text, expected):
    """A first part without dot, colon and `localhost` is no registry."""
    assert expected == Reference.parse(text)


@pytest.mark.parametrize(
    "text", ["", "A/b", "a:b:c", "a/b@sha256:12", "a/b@", "a/b:", "http://a/b", "a/../b", "a b", "evil.org:99999999/x"]
)
def test_bad_reference_is_refused(text):
    """What is not a reference is a usage error, not a request to some server."""
    with pytest.raises(UsageError):
        Reference.parse(text)


def test_http_is_for_loopback_only():
    """Plain http is used where nothing leaves the machine, https for every other registry."""
    seen = []

    def answer(request):
        seen.append(f"{request.url.scheme}://{request.url.host}")
        return httpx.Response(200)

    for host in ("localhost:5", "127.0.0.9:5", "[::1]:5", "registry.example", "127.evil.example", "localhost.example"):
        Repository(Reference(host, "x"), transport=httpx.MockTransport(answer)).has_blob(SUBJECT)
    assert [place.split(":")[0] for place in seen] == ["http", "http", "http", "https", "https", "https"]


def test_wrong_bytes_are_refused(stub):
    """A manifest whose bytes are not those of its digest is never used, whatever the registry says about it."""
    registry = stub()
    digest = registry.put("tag", OCI_MANIFEST, b'{"schemaVersion":2}')
    registry.other_bytes = b'{"schemaVersion":2,"layers":[]}'
    with pytest.raises(RegistryError, match="answered for sha256"):
        open_stub(registry).manifest(digest)


def test_wrong_blob_is_refused(stub):
    """A blob of another digest, or larger than announced, is refused."""
    registry = stub()
    wanted = Descriptor.of(b"right", "x")
    registry.blobs[wanted.digest] = b"wrong"
    with pytest.raises(RegistryError, match="arrived as"):
        open_stub(registry).blob(wanted, 100)
    registry.blobs[wanted.digest] = b"right and more"
    with pytest.raises(RegistryError, match="more than the 5 bytes"):
        open_stub(registry).blob(wanted, 100)


def test_tag_and_digest_must_agree(stub):
    """A tag that was moved away from the digest beside it is refused, and the message names both."""
    registry = stub()
    old = registry.put("v1", OCI_MANIFEST, b'{"schemaVersion":2,"layers":[]}')
    new = registry.put("v1", OCI_MANIFEST, b'{"schemaVersion":2,"layers":[] }')
    with pytest.raises(RegistryError, match=f"is {new}, not {old}"):
        resolve(open_stub(registry), Reference(registry.host, "a/b", "v1", old))


def test_index_leads_to_its_platform_manifest(stub):
    """Of an index the manifest for the platform is taken; build attestations beside it do not count."""
    registry = stub()
    wanted = registry.put("x", OCI_MANIFEST, b'{"schemaVersion":2,"layers":[]}')
    proof = registry.put("y", OCI_MANIFEST, b'{"schemaVersion":2,"layers":[] }')
    children = [
        {"digest": wanted, "platform": {"os": "linux", "architecture": "amd64"}},
        {
            "digest": proof,
            "platform": {"os": "unknown", "architecture": "unknown"},
            "annotations": {"vnd.docker.reference.type": "attestation-manifest"},
        },
    ]
    entries = [{"mediaType": OCI_MANIFEST, "size": 1} | child for child in children]
    index = registry.put("v1", OCI_INDEX, json.dumps({"schemaVersion": 2, "manifests": entries}).encode())
    found = resolve(open_stub(registry), Reference(registry.host, "a/b", "v1"))
    assert found.index is not None
    assert (wanted, index) == (found.manifest.digest, found.index.digest)


@pytest.mark.parametrize("with_referrers", [True, False])
def test_referrers_are_found_both_ways(stub, with_referrers):
    """By the interface over several pages, and by the fallback tag, the same referrers are found."""
    registry = stub(with_referrers=with_referrers)
    repository = open_stub(registry)
    sent = [referrer(number) for number in range(3)]
    for manifest in sent:
        repository.attach(manifest, SUBJECT)
        repository.attach(manifest, SUBJECT)
    found = repository.referrers(SUBJECT, KIND)
    assert sorted(manifest.digest for manifest in sent) == sorted(entry.digest for entry in found)
    assert {"0", "1", "2"} == {entry.annotations["number"] for entry in found}
    assert repository.referrers(SUBJECT, "application/vnd.other") == ()
    assert (fallback_tag(SUBJECT) in registry.manifests) is not with_referrers


def test_fallback_tag_survives_a_race(stub):
    """Another writer who overwrites the fallback tag costs a round, not an entry."""
    registry = stub(with_referrers=False)
    other, ours = referrer(1), referrer(2)
    tag = fallback_tag(SUBJECT)
    real_put = registry.put

    def overwrite(reference, media_type, content):
        digest = real_put(reference, media_type, content)
        if reference == tag and other.digest.encode() not in content:
            entry = Descriptor(OCI_MANIFEST, other.digest, 1, KIND).to_json()
            real_put(tag, OCI_INDEX, canonical_json({"schemaVersion": 2, "manifests": [entry]}))
        return digest

    registry.put = overwrite
    repository = open_stub(registry)
    repository.attach(ours, SUBJECT)
    assert {other.digest, ours.digest} == {entry.digest for entry in repository.referrers(SUBJECT, KIND)}


def test_fallback_tag_that_is_an_image_is_left_alone(stub):
    """A tag of the fallback's name that is not an index is an error, and is not overwritten."""
    registry = stub(with_referrers=False)
    digest = registry.put(fallback_tag(SUBJECT), OCI_MANIFEST, b'{"schemaVersion":2}')
    with pytest.raises(RegistryError, match="left as it is"):
        open_stub(registry).attach(referrer(1), SUBJECT)
    assert digest == digest_of(registry.manifests[fallback_tag(SUBJECT)][1])


def test_token_is_fetched_with_the_docker_login(stub, docker_config):
    """A bearer challenge is answered with the login of the docker configuration: once to read, once to write."""
    login = base64.b64encode(b"user:s3cret").decode()
    registry = stub(token="t0ken", login=f"Basic {login}")
    (docker_config / "config.json").write_text(json.dumps({"auths": {registry.host: {"auth": login}}}))
    repository = open_stub(registry, credentials=credentials_for(registry.host))
    assert repository.push_blob(Descriptor.of(b"content", "x"), b"content")
    assert not repository.has_blob(SUBJECT)
    assert b"content" in registry.blobs.values()
    tokens = [path for _, path, _ in registry.requests if path.startswith("/token")]
    assert ["push" in path for path in tokens] == [False, True]


def test_refused_login_does_not_show_the_secret(stub):
    """Neither the error nor the printed credentials contain what is secret."""
    registry = stub(token="t0ken", login="Basic other")
    login = Credentials("user", "s3cret", identity_token="")
    with pytest.raises(RegistryError, match="docker login") as caught:
        open_stub(registry, credentials=login).has_blob(SUBJECT)
    assert "s3cret" not in str(caught.value) + repr(login)


def test_login_stays_with_its_registry():
    """An upload that is sent on to another host goes there without our login, and never over plain http."""
    seen = {}

    def answer(request):
        seen[str(request.url.host)] = request.headers.get("Authorization")
        if request.method == "HEAD":
            return httpx.Response(404)
        if "Authorization" not in request.headers and request.url.host == "registry.example":
            return httpx.Response(401, headers={"WWW-Authenticate": 'Basic realm="x"'})
        if request.method == "POST":
            return httpx.Response(202, headers={"Location": place})
        return httpx.Response(201)

    def push():
        login = Credentials("user", "s3cret")
        reference = Reference("registry.example", "x")
        repository = Repository(reference, credentials=login, transport=httpx.MockTransport(answer))
        repository.push_blob(Descriptor.of(b"content", "x"), b"content")

    place = "https://store.example/upload?x=1"
    push()
    assert seen["store.example"] is None and seen["registry.example"].startswith("Basic ")
    place = "http://store.example/upload"
    with pytest.raises(RegistryError, match="cannot be used"):
        push()


@pytest.mark.parametrize("content", ["{", '{"auths":{"r.example":{"auth":"!!"}}}', '{"credsStore":"no-such-helper"}'])
def test_broken_docker_configuration_is_one_clear_line(docker_config, content):
    """A configuration that cannot be used is a usage error that names it, not a traceback or an anonymous request."""
    (docker_config / "config.json").write_text(content)
    with pytest.raises(UsageError):
        credentials_for("r.example")
