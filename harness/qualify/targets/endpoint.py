# SPDX-License-Identifier: Apache-2.0
"""The `url:` target: a server that somebody else started. Nothing is started, stopped or changed there.

It can serve boots without a cache server and without speculation only, because both are chosen at its start. Evidence
from inside exists only where it offers /collective_rpc with our worker extension.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from qualify.errors import TargetError, UsageError
from qualify.profiles import Boot, Storage
from qualify.records import BootOutcome, BootRecord, EngineEnvironment
from qualify.targets import Launch

ANSWER_SECONDS = 10.0
"""Bound on each look at the server: it runs already, so it must answer at once."""


class EndpointTarget:
    """Raises UsageError for a URL that is not http(s) with a host."""

    def __init__(self, url: str, progress: Callable[[str], None]) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"{url!r} is no server's address", remedy="give url:http://HOST:PORT")
        self._url = url.rstrip("/").removesuffix("/v1")
        self._progress = progress
        self.label = f"url:{self._url}"

    def supports(self, boot: Boot) -> bool:
        return boot.cache is Storage.NONE and not boot.speculation

    def environment(self) -> EngineEnvironment | None:
        return None

    def contract(self) -> bytes | None:
        return None

    def boot(self, launch: Launch) -> EndpointRunning:
        """Look whether the server is there and serves. Raises TargetError."""
        if not self.supports(launch.boot):
            raise TargetError(
                f"boot {launch.boot.name} needs a start of its own",
                phase="reach the server",
                remedy="use --target local for boots with a cache or with speculation",
            )
        self._progress(f"asking {self._url}")
        model = self._model()
        self._first_request(model, launch.profile.timeouts.request_seconds)
        return EndpointRunning(self._url, model, self._has_extension(), launch)

    def _model(self) -> str:
        answer = self._request("GET", "/v1/models", None, ANSWER_SECONDS)
        try:
            return str(answer.json()["data"][0]["id"])
        except (ValueError, KeyError, IndexError, TypeError):
            raise TargetError(
                f"{self._url}/v1/models names no model", phase="reach the server", remedy="give an OpenAI-style server"
            ) from None

    def _first_request(self, model: str, seconds: float) -> None:
        body = {"model": model, "prompt": "ready?", "max_tokens": 1, "temperature": 0}
        self._request("POST", "/v1/completions", body, seconds)

    def _has_extension(self) -> bool:
        body = {"method": "qualify_describe", "args": ["{}"]}
        try:
            return httpx.post(f"{self._url}/collective_rpc", json=body, timeout=ANSWER_SECONDS).status_code == 200
        except httpx.HTTPError:
            return False

    def _request(self, method: str, path: str, body: object, seconds: float) -> httpx.Response:
        try:
            answer = httpx.request(method, f"{self._url}{path}", json=body, timeout=seconds)
        except httpx.HTTPError as error:
            raise TargetError(
                f"{method} {self._url}{path} failed: {type(error).__name__}",
                phase="reach the server",
                remedy="check the address, and that the server runs",
            ) from None
        if answer.status_code != 200:
            raise TargetError(
                f"{method} {self._url}{path} answered {answer.status_code}",
                phase="reach the server",
                remedy="check that it is an OpenAI-style server that needs no key",
            )
        return answer


class EndpointRunning:
    """One visit to the server."""

    cache_url: str | None = None
    storage: Path | None = None
    gpus: tuple[str, ...] = ()

    def __init__(self, url: str, model: str, extension: bool, launch: Launch) -> None:
        self.engine_url = url
        self.model = model
        self.extension = extension
        self._launch = launch
        self._began = time.monotonic()
        self._started_at = datetime.now(UTC).isoformat(timespec="seconds")
        self._record: BootRecord | None = None

    def died(self) -> str | None:
        try:
            status = httpx.get(f"{self.engine_url}/health", timeout=ANSWER_SECONDS).status_code
        except httpx.HTTPError as error:
            return f"the server at {self.engine_url} does not answer: {type(error).__name__}"
        return f"the server at {self.engine_url} says that it is dead (503)" if status == 503 else None

    def stop(self) -> BootRecord:
        """End the visit; the server goes on."""
        if self._record is None:
            seconds = round(time.monotonic() - self._began, 3)
            self._record = BootRecord(
                index=self._launch.index,
                name=self._launch.boot.name,
                started_at=self._started_at,
                ready_seconds=0.0,
                stop_requested_seconds=seconds,
                stopped_seconds=seconds,
                outcome=BootOutcome.STOPPED,
                processes=(),
            )
        return self._record
