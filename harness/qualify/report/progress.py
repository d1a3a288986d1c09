# SPDX-License-Identifier: Apache-2.0
"""Live progress on stderr: one moving line on a terminal, one plain line an event elsewhere. Times of day are UTC."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from datetime import UTC, datetime
from typing import TextIO

from qualify.records import Outcome
from qualify.report.terminal import paint, printable, wants_colour

TICK_SECONDS = 0.5
OUTCOME_STYLE = {Outcome.COMPLETED: "green", Outcome.FAILED: "red", Outcome.INTERRUPTED: "yellow"}


class Progress:
    """Shows what runs now, for how long, and the engine's own progress text. Used from one thread at a time."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()
        self._colour = wants_colour(self._stream)
        self._lock = threading.Lock()
        self._name = ""
        self._note = ""
        self._began = 0.0
        self._ended = threading.Event()
        self._ticker: threading.Thread | None = None

    def phase(self, name: str) -> None:
        """A phase begins. A phase within a phase takes over the line."""
        self._stop_ticking()
        self._name, self._note, self._began = printable(name), "", time.monotonic()
        if not self._live:
            self._line(f"{_clock()} {self._name}")
            return
        self._ended.clear()
        self._ticker = threading.Thread(target=self._tick, name="progress", daemon=True)
        self._ticker.start()

    def note(self, text: str) -> None:
        """What the phase is doing, in the engine's words or ours; a repeated text is shown once."""
        text = printable(text).strip()
        if text == self._note:
            return
        self._note = text
        if self._live:
            self._draw()
        else:
            self._line(f"{_clock()} {self._name}: {text}")

    def done(self, outcome: Outcome) -> None:
        """The phase ended."""
        self._stop_ticking()
        word = paint(outcome, OUTCOME_STYLE[outcome], self._colour)
        seconds = time.monotonic() - self._began
        self._line(f"{_clock()} {self._name}: {word} after {_elapsed(seconds)}")

    def _tick(self) -> None:
        while True:
            self._draw()
            if self._ended.wait(TICK_SECONDS):
                return

    def _stop_ticking(self) -> None:
        self._ended.set()
        ticker, self._ticker = self._ticker, None
        if ticker is not None:
            ticker.join()
            self._write("\r\x1b[K")

    def _draw(self) -> None:
        elapsed = _elapsed(time.monotonic() - self._began)
        text = f"{elapsed:>6}  {self._name}" + (f": {self._note}" if self._note else "")
        width = shutil.get_terminal_size().columns - 1
        self._write(f"\r\x1b[K{text[:width]}")

    def _line(self, text: str) -> None:
        self._write(text + "\n")

    def _write(self, text: str) -> None:
        """A stream that went away (closed pipe) must not end a run."""
        with self._lock:
            try:
                self._stream.write(text)
                self._stream.flush()
            except (OSError, ValueError):
                self._live = False


def _clock() -> str:
    return datetime.now(UTC).strftime("%H:%M:%SZ")


def _elapsed(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02d}"
