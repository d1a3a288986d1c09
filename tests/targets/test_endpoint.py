# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from qualify import profiles
from qualify.errors import TargetError, UsageError
from qualify.evidence import EvidenceWriter
from qualify.profiles import Boot, Storage
from qualify.records import BootOutcome
from qualify.targets import Launch
from qualify.targets.endpoint import EndpointTarget
from qualify.targets.process import free_ports


class Server(ThreadingHTTPServer):
    """Answers each path with its (status, document); an unknown path is 404."""

    answers: dict[str, tuple[int, object]]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._answer()

    def _answer(self) -> None:
        status, document = self.server.answers.get(self.path, (404, {}))
        content = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server(("127.0.0.1", 0), Handler)
    found.answers = {
        "/v1/models": (200, {"data": [{"id": "mine"}]}),
        "/v1/completions": (200, {"choices": [{"text": "x"}]}),
        "/health": (200, {}),
    }
    thread = threading.Thread(target=found.serve_forever)
    thread.start()
    yield found
    found.shutdown()
    thread.join()
    found.server_close()


def launch(tmp_path: Path, cache: Storage = Storage.NONE, speculation: bool = False) -> Launch:
    boot = Boot(name="b", cache=cache, speculation=speculation, probes=())
    return Launch(profiles.load("cpu-smoke"), boot, 1, tmp_path, tmp_path, EvidenceWriter(tmp_path))


def target(server: Server) -> EndpointTarget:
    return EndpointTarget(f"http://127.0.0.1:{server.server_port}/v1", lambda _: None)


def test_a_visit_starts_and_stops_nothing(server: Server, tmp_path: Path) -> None:
    """The model is found by asking; the record has no process of ours; the server still runs afterwards."""
    running = target(server).boot(launch(tmp_path))
    assert (running.model, running.extension, running.cache_url) == ("mine", False, None)
    record = running.stop()
    assert (record.outcome, record.processes) == (BootOutcome.STOPPED, ())
    assert running.died() is None


def test_the_extension_is_used_where_it_answers(server: Server, tmp_path: Path) -> None:
    """Evidence from inside is taken only where /collective_rpc knows our method."""
    server.answers["/collective_rpc"] = (200, {"results": [{}]})
    assert target(server).boot(launch(tmp_path)).extension


@pytest.mark.parametrize(
    ("path", "answer", "words"),
    [
        ("/v1/models", (200, {"data": []}), "names no model"),
        ("/v1/models", (200, [1]), "names no model"),
        ("/v1/models", (401, {}), "answered 401"),
        ("/v1/completions", (500, {}), "answered 500"),
    ],
)
def test_a_server_that_does_not_serve_is_refused(
    server: Server, tmp_path: Path, path: str, answer: tuple[int, object], words: str
) -> None:
    """A server without a model, or that cannot answer one request, is not ready."""
    server.answers[path] = answer
    with pytest.raises(TargetError, match=words):
        target(server).boot(launch(tmp_path))


@pytest.mark.parametrize(
    ("cache", "speculation"), [(Storage.EMPTY, False), (Storage.KEPT, False), (Storage.NONE, True)]
)
def test_boots_that_need_a_start_are_refused(server: Server, tmp_path: Path, cache: Storage, speculation: bool) -> None:
    """Cache and speculation are chosen at the server's start, so a running server cannot offer them."""
    wanted = launch(tmp_path, cache, speculation)
    assert not target(server).supports(wanted.boot)
    with pytest.raises(TargetError, match="needs a start of its own"):
        target(server).boot(wanted)


def test_nobody_there_is_one_line(tmp_path: Path) -> None:
    """A wrong address is an error that names it."""
    (port,) = free_ports(1)
    with pytest.raises(TargetError, match=rf"127\.0\.0\.1:{port}.*ConnectError"):
        EndpointTarget(f"http://127.0.0.1:{port}", lambda _: None).boot(launch(tmp_path))


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "ftp://host", "http://", "http:///v1"])
def test_what_is_no_address_is_a_usage_error(url: str) -> None:
    """Only http and https addresses with a host are taken."""
    with pytest.raises(UsageError):
        EndpointTarget(url, lambda _: None)
