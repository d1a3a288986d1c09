# SPDX-License-Identifier: Apache-2.0
"""A registry stub in memory with faults to order, and an empty docker configuration."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

INDEX = "application/vnd.oci.image.index.v1+json"


@dataclass
class Registry:
    """What the stub holds and how it misbehaves. Tags and digests share one table, as the protocol has it."""

    blobs: dict[str, bytes] = field(default_factory=dict)
    manifests: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    with_referrers: bool = True
    page: int = 1
    """Referrers listed per answer; the rest follows through Link."""
    token: str | None = None
    """The bearer token for reading; writing needs it with `-push`. The token service gives both for `login`."""
    login: str = ""
    drop_upload: int | None = None
    """Break the connection in the middle of this upload, counted from 0."""
    other_bytes: bytes | None = None
    """Answered in place of every manifest."""
    before_manifest: Any = None
    """Called with the reference before a manifest is stored: another writer gets in between."""
    uploads: int = 0
    url: str = ""

    @property
    def host(self) -> str:
        return urlsplit(self.url).netloc

    def put(self, reference: str, media_type: str, content: bytes) -> str:
        digest = "sha256:" + hashlib.sha256(content).hexdigest()
        self.manifests[digest] = self.manifests[reference] = (media_type, content)
        return digest


@contextmanager
def serve(registry: Registry) -> Iterator[Registry]:
    class Handler(_Handler):
        state = registry

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    registry.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield registry
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    state: Registry
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        pass

    def _serve(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        self.state.requests.append((self.command, self.path, dict(self.headers)))
        if self.command == "PUT" and "/blobs/uploads/" in self.path:
            if self.state.drop_upload == self.state.uploads:
                self.rfile.read(length // 2)
                self.close_connection = True
                self.connection.close()
                return
            self.state.uploads += 1
        body = self.rfile.read(length)
        parts = urlsplit(self.path)
        if parts.path == "/token":
            self._answer(*self._issue(parse_qs(parts.query)["scope"][0]))
        elif self.state.token and not self._authorized():
            challenge = f'Bearer realm="{self.state.url}/token",service="stub",scope="repository:x:pull"'
            self._answer(401, {"WWW-Authenticate": challenge}, b"")
        else:
            self._answer(*self._route(parts.path, parse_qs(parts.query), body))

    do_GET = do_HEAD = do_PUT = do_POST = _serve

    def _authorized(self) -> bool:
        allowed = {f"Bearer {self.state.token}-push"}
        if self.command in ("GET", "HEAD"):
            allowed.add(f"Bearer {self.state.token}")
        return self.headers.get("Authorization") in allowed

    def _issue(self, scope: str) -> tuple[int, dict[str, str], bytes]:
        if self.headers.get("Authorization") != self.state.login:
            return 401, {}, b"{}"
        token = f"{self.state.token}-push" if scope.endswith("pull,push") else self.state.token
        return 200, {}, json.dumps({"token": token}).encode()

    def _route(self, path: str, query: dict[str, list[str]], body: bytes) -> tuple[int, dict[str, str], bytes]:
        state = self.state
        if found := re.fullmatch(r"/v2/.+?/blobs/uploads/(\w*)", path):
            if self.command == "POST":
                return 202, {"Location": f"{path}1?state=a"}, b""
            digest = query["digest"][0]
            if "sha256:" + hashlib.sha256(body).hexdigest() != digest:
                return 400, {}, b'{"errors":[{"code":"DIGEST_INVALID","message":"wrong"}]}'
            state.blobs[digest] = body
            return 201, {}, b""
        if found := re.fullmatch(r"/v2/.+?/blobs/(.+)", path):
            return (200, {}, state.blobs[found[1]]) if found[1] in state.blobs else (404, {}, b"{}")
        if found := re.fullmatch(r"/v2/.+?/referrers/(.+)", path):
            return self._referrers(path, found[1], int(query.get("from", ["0"])[0]))
        found = re.fullmatch(r"/v2/.+?/manifests/(.+)", path)
        assert found, path
        if self.command == "PUT":
            return self._store(found[1], body)
        if found[1] not in state.manifests:
            return 404, {}, b"{}"
        media_type, content = state.manifests[found[1]]
        return 200, {"Content-Type": media_type}, content if state.other_bytes is None else state.other_bytes

    def _store(self, reference: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        if self.state.before_manifest:
            self.state.before_manifest(reference)
        digest = self.state.put(reference, self.headers["Content-Type"], body)
        subject = json.loads(body).get("subject")
        linked = {"OCI-Subject": subject["digest"]} if subject and self.state.with_referrers else {}
        return 201, {"Docker-Content-Digest": digest} | linked, b""

    def _referrers(self, path: str, subject: str, start: int) -> tuple[int, dict[str, str], bytes]:
        if not self.state.with_referrers:
            return 404, {}, b"404 page not found"
        entries = []
        for reference, (media_type, content) in sorted(self.state.manifests.items()):
            value = json.loads(content)
            if reference.startswith("sha256:") and (value.get("subject") or {}).get("digest") == subject:
                entry = {"mediaType": media_type, "digest": reference, "size": len(content)}
                entries.append(entry | {key: value[key] for key in ("artifactType", "annotations") if key in value})
        listed = entries[start : start + self.state.page]
        more = start + self.state.page < len(entries)
        link = {"Link": f'<{path}?from={start + self.state.page}>; rel="next"'} if more else {}
        body = {"schemaVersion": 2, "mediaType": INDEX, "manifests": listed}
        return 200, {"Content-Type": INDEX} | link, json.dumps(body).encode()

    def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@pytest.fixture
def stub() -> Iterator[Callable[..., Registry]]:
    """Start stub registries: stub(with_referrers=False, ...)."""
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(serve(Registry(**options)))


@pytest.fixture
def docker_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty docker configuration folder that is in force during the test."""
    folder = tmp_path / "docker-config"
    folder.mkdir()
    monkeypatch.setenv("DOCKER_CONFIG", str(folder))
    return folder
