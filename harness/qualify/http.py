# SPDX-License-Identifier: Apache-2.0
"""HTTP calls to the engine and the cache server, each one written down for `service.errors`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from qualify.errors import TargetError
from qualify.model import Record


class Exchange(Record):
    """One request of the harness and how it ended. `seconds` count from the send; `at` from the client's start."""

    boot: str
    phase: str
    method: str
    path: str
    at: float
    seconds: float
    status: int | None
    error: str | None = None


class Client:
    """A small synchronous client for one server of a boot; appends every exchange to `log` as JSON lines."""

    def __init__(self, base_url: str, log: Path, boot: str, *, timeout: float = 60.0) -> None:
        self.base_url = base_url.rstrip("/")
        self.boot = boot
        self.phase = "start"
        self._http = httpx.Client(base_url=self.base_url, timeout=timeout, trust_env=False)
        self._log = log
        self._start = time.monotonic()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def get(self, path: str) -> str:
        """The body of a GET. Raises TargetError unless the status is 200."""
        return self._call("GET", path, None).text

    def post(self, path: str, body: Any = None) -> Any:
        """The JSON answer of a POST, None if the answer is empty. Raises TargetError unless the status is 200."""
        answer = self._call("POST", path, {} if body is None else body)
        try:
            return answer.json() if answer.content else None
        except json.JSONDecodeError:
            raise TargetError(f"POST {path} answered something that is not JSON", phase=self.phase) from None

    def rpc(self, method: str, **options: Any) -> list[dict[str, Any]]:
        """Call a method of the worker extension: one result per rank, in rank order.

        Arguments travel as one JSON string, because the engine's endpoint passes strings only.
        """
        answer = self.post("/collective_rpc", {"method": method, "args": [json.dumps(options)]})
        results = answer.get("results") if isinstance(answer, dict) else None
        if not isinstance(results, list) or not all(isinstance(result, dict) for result in results):
            raise TargetError(f"worker method {method} gave no result per rank", phase=self.phase)
        return results

    def record(self, method: str, path: str, began: float, status: int | None, error: str | None = None) -> None:
        """Write down an exchange that was made elsewhere (the load generator's); `began` is time.monotonic()."""
        now = time.monotonic()
        exchange = Exchange(
            boot=self.boot,
            phase=self.phase,
            method=method,
            path=path,
            at=round(began - self._start, 6),
            seconds=round(now - began, 6),
            status=status,
            error=error,
        )
        with self._log.open("a", encoding="utf-8") as file:
            file.write(exchange.model_dump_json() + "\n")

    def _call(self, method: str, path: str, body: Any) -> httpx.Response:
        began = time.monotonic()
        try:
            answer = self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            self.record(method, path, began, None, f"{type(error).__name__}: {error}")
            raise TargetError(
                f"{method} {path} failed: {type(error).__name__}",
                phase=self.phase,
                remedy="see the last lines of the server's log",
            ) from error
        self.record(method, path, began, answer.status_code, None if answer.is_success else answer.text[:300])
        if answer.status_code != 200:
            raise TargetError(f"{method} {path} answered {answer.status_code}: {answer.text[:200]}", phase=self.phase)
        return answer
