# SPDX-License-Identifier: Apache-2.0
"""The client's own ceiling: the same client, requests and slots against a server that costs nothing."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from qualify.errors import QualifyError
from qualify.load import null_server
from qualify.load.client import ClosedLoop, Supply, monotonic_clock
from qualify.model import Record

START_SECONDS = 10.0
TRIES = 3


class Ceiling(Record):
    """What the client can take in: tokens per second at this concurrency, one token an event."""

    concurrency: int
    seconds: float
    tokens: int
    tokens_per_second: float


@contextlib.contextmanager
def null_engine() -> Iterator[str]:
    """A null server while the context is open; gives its URL. Raises QualifyError if it does not start."""
    command = [sys.executable, str(Path(null_server.__file__))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            port = process.stdout.readline().strip() if process.stdout else ""
            if not port.isdigit():
                raise QualifyError("the null server did not start", remedy="file a bug")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def measure(base_url: str, concurrency: int, supply: Callable[[int], Supply], seconds: float) -> Ceiling:
    """The fastest of three tries of about `seconds` each, because what disturbs a try is not the client's limit.

    `supply` gives the requests of a slot. Raises QualifyError if the null server fails.
    """
    tries = [_try(base_url, [supply(slot) for slot in range(concurrency)], seconds) for _ in range(TRIES)]
    return max(tries, key=lambda one: one.tokens_per_second)


def _try(base_url: str, supplies: list[Supply], seconds: float) -> Ceiling:
    with ClosedLoop(base_url, supplies, monotonic_clock(), START_SECONDS) as loop:
        time.sleep(seconds)
        turns = loop.finish()
    if failure := loop.failure():
        raise QualifyError(f"the client's ceiling could not be measured: {failure}", remedy="file a bug")
    replies = [turn.reply for turn in turns]
    tokens = sum(reply.answer.completion_tokens or 0 for reply in replies)
    elapsed = max(reply.times.ended for reply in replies) - min(reply.times.sent for reply in replies)
    return Ceiling(
        concurrency=len(supplies),
        seconds=round(elapsed, 6),
        tokens=tokens,
        tokens_per_second=round(tokens / elapsed, 3),
    )
