# SPDX-License-Identifier: Apache-2.0
"""Asking: one request with its times, and a closed loop that keeps C slots busy."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import httpx

from qualify.load.answer import Answer, Fold
from qualify.load.sse import Decoder, StreamError
from qualify.model import Record

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


@dataclass(frozen=True)
class Request:
    path: str
    body: dict[str, Any]

    @property
    def streamed(self) -> bool:
        return bool(self.body.get("stream"))


class Times(Record):
    """Seconds on the clock of the asking side. `sent` differs from `intended` by the client's own delay."""

    intended: float
    sent: float
    first_token: float | None
    """When the first event with output arrived; for an answer in one document this is not known."""
    ended: float
    longest_silence: float | None
    """Longest time between two consecutive events with output; None below two."""


@dataclass(frozen=True)
class Reply:
    answer: Answer
    times: Times


@dataclass(frozen=True)
class Turn:
    """One request of a slot and its reply; `warmup` turns are outside every measurement."""

    slot: int
    warmup: bool
    request: Request
    reply: Reply


Observer = Callable[[Turn], None]
Supply = Iterator[tuple[bool, Request]]
"""The endless requests of one slot, each with whether it is warm-up."""


class Asker:
    """One connection to one engine; not shared between threads. `clock` gives seconds, `timeout` bounds a request."""

    def __init__(self, base_url: str, clock: Callable[[], float], timeout: float) -> None:
        headers = {"Accept-Encoding": "identity"}
        secure = base_url.startswith("https:")  # loading certificates costs more than a request, so only where used
        self._http = httpx.Client(base_url=base_url, timeout=timeout, trust_env=False, headers=headers, verify=secure)
        self._clock = clock
        self._timeout = timeout

    def close(self) -> None:
        self._http.close()

    def ask(
        self, request: Request, on_first_token: Callable[[], None] = lambda: None, intended: float | None = None
    ) -> Reply:
        """Send now and read to the end. A failure is in the answer's `error`; nothing is raised for it.

        `intended` is when the request was due on the same clock, now if not given.
        """
        fold = Fold(streamed=request.streamed)
        arrivals: list[float] = []
        sent = self._clock()
        try:
            with self._http.stream("POST", request.path, json=request.body) as response:
                fold.status = response.status_code
                if not response.is_success:
                    fold.fail(f"HTTP {response.status_code}: {response.read().decode('utf-8', 'replace')[:300]}")
                elif request.streamed:
                    self._read(response.iter_raw(), fold, sent + self._timeout, arrivals, on_first_token)
                else:
                    fold.document(response.read().decode("utf-8", "replace"))
        except httpx.TimeoutException:
            fold.fail(f"no byte for {self._timeout:g} s")
        except (httpx.HTTPError, StreamError) as error:
            fold.fail(f"{type(error).__name__}: {error}")
        if fold.error is None:
            _require_whole(fold)
        return Reply(fold.answer(), self._times(sent if intended is None else intended, sent, arrivals))

    def _read(
        self,
        chunks: Iterator[bytes],
        fold: Fold,
        deadline: float,
        arrivals: list[float],
        on_first_token: Callable[[], None],
    ) -> None:
        decoder = Decoder()
        for chunk in chunks:
            now = self._clock()
            for data in decoder.feed(chunk):
                if fold.event(data):
                    arrivals.append(now)
                    if len(arrivals) == 1:
                        on_first_token()
            if now > deadline:
                fold.fail(f"the stream did not end within {self._timeout:g} s")
                return
        for data in decoder.finish():
            fold.event(data)

    def _times(self, intended: float, sent: float, arrivals: list[float]) -> Times:
        gaps = [later - earlier for earlier, later in itertools.pairwise(arrivals)]
        return Times(
            intended=round(intended, 6),
            sent=round(sent, 6),
            first_token=round(arrivals[0], 6) if arrivals else None,
            ended=round(self._clock(), 6),
            longest_silence=round(max(gaps), 6) if gaps else None,
        )


def _require_whole(fold: Fold) -> None:
    if fold.streamed and not fold.done:
        fold.fail("the stream ended without its end mark")
    if fold.finish_reason is None:
        fold.fail("the answer ended without a finish reason")


class Slot(threading.Thread):
    """One kept-busy place: sends the next request when the last one has ended, until told to stop or a failure."""

    def __init__(self, number: int, asker: Asker, supply: Supply, stop: threading.Event, observe: Observer) -> None:
        super().__init__(name=f"slot-{number}", daemon=True)
        self.number = number
        self.decoding = threading.Event()
        """Set by the first token of the first request that is not warm-up, or when the slot has ended."""
        self.failed: str | None = None
        self.turns: list[Turn] = []
        self._asker = asker
        self._supply = supply
        self._halt = stop
        self._observe = observe

    def run(self) -> None:
        try:
            due: float | None = None
            for warmup, request in self._supply:
                reply = self._asker.ask(request, (lambda: None) if warmup else self.decoding.set, due)
                due = reply.times.ended  # a closed loop sends the next request the moment the last one has ended
                self.turns.append(Turn(self.number, warmup, request, reply))
                self._observe(self.turns[-1])
                self.failed = reply.answer.error
                if self.failed is not None or self._halt.is_set():
                    return
        except Exception as error:  # a slot that dies silently would look like an idle one
            self.failed = f"{type(error).__name__}: {error}"
        finally:
            self.decoding.set()
            self._asker.close()


class ClosedLoop:
    """Slots that run while the context is open, each with its own connection and supply.

    Leaving the context stops new requests without waiting; `finish` waits for those in flight.
    """

    def __init__(
        self,
        base_url: str,
        supplies: list[Supply],
        clock: Callable[[], float],
        timeout: float,
        observe: Observer = lambda turn: None,
    ) -> None:
        self._stop = threading.Event()
        self._slots = [
            Slot(number, Asker(base_url, clock, timeout), supply, self._stop, observe)
            for number, supply in enumerate(supplies)
        ]

    def __enter__(self) -> ClosedLoop:
        for slot in self._slots:
            slot.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()

    def wait_until_decoding(self) -> None:
        """Returns when every slot has its first token after warm-up, or has failed; a request's timeout bounds it."""
        for slot in self._slots:
            slot.decoding.wait()

    def failure(self) -> str | None:
        """Why a slot gave up; None while none did."""
        return next((slot.failed for slot in self._slots if slot.failed is not None), None)

    def finish(self) -> tuple[Turn, ...]:
        """No new requests; waits for those in flight and gives all turns, slot by slot."""
        self._stop.set()
        for slot in self._slots:
            slot.join()
        return tuple(turn for slot in self._slots for turn in slot.turns)


def monotonic_clock() -> Callable[[], float]:
    """Seconds since this call."""
    began = time.monotonic()
    return lambda: time.monotonic() - began
