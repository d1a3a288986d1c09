# SPDX-License-Identifier: Apache-2.0
"""Streaming reader of vLLM logs: bytes in, `LogFacts` out, in constant memory.

facts = read(Path("engine.log"))
facts.kv_tokens.value, facts.kv_tokens.source    # 3321847, engine.log:71
"""

from __future__ import annotations

import gzip
import io
import re
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO, cast

from qualify.observe.bars import find_bar
from qualify.observe.boot import MAX_FACTS, Boot
from qualify.observe.errors import ANY_ERROR, TRACEBACK, first_cause
from qualify.observe.facts import EarlierBoot, Extent, LogFacts, Source
from qualify.observe.finish import Finish
from qualify.observe.forms import (
    ANY_FORM,
    HEADED,
    STARTERS,
    UNKNOWN_START,
    Form,
    form_anywhere,
    form_at,
    form_of,
    refuse,
)
from qualify.observe.layers import (
    CACHE_PLAIN,
    DOCKER,
    ENVELOPE,
    HEADER_START,
    MAX_EXAMINED,
    Record,
    Unwrapper,
    bare_record,
    rank_of,
    records,
    without_colours,
)
from qualify.observe.needles import any_of

CHUNK = 1 << 20
MAX_BUFFERED = 1 << 21
"""A line without end is examined in pieces of this size, so that no input can fill the memory."""
MAX_EARLIER_BOOTS = 32

_HTTP = b" HTTP/1."
_SERVED = b' HTTP/1.1" 200 OK'
_MARKS = (b"\r", b"%|", b"]", b"Error")
"""What a record or a bar before an access line in the same physical line has at least one of."""
_PARTIAL = (b" stdout P ", b" stderr P ")
_LOUD = (b"WARNING", b"ERROR", b"CRITICAL", b"FATAL")
_MORE = any_of((b"\r", b"\x1b", b"%|", b"pid=", _HTTP, b"exited unexpectedly"))
"""What a message with a header has that may be more than one message, or an error at any level."""
_PARTS = (b"\r", b"\x1b", b"|", b"pid=", _HTTP)
_MANY = re.compile(any_of(_PARTS).pattern + b"|" + HEADER_START)
"""What a line without a header has that may be more than one message, or in an envelope."""
_SPEAKS = re.compile(any_of((*_PARTS, *_LOUD, TRACEBACK, *ANY_ERROR.all, *ANY_FORM.all)).pattern + b"|" + HEADER_START)
"""What a line without a header has that may say anything."""
_GZIP = b"\x1f\x8b"


def read(chunks: Iterable[bytes] | Path, label: str = "log") -> LogFacts:
    """Facts of one log, given as a path (plain or gzip; then `label` defaults to its name) or as chunks of bytes.

    Any bytes are a valid log. A damaged gzip file is read as far as it goes, and `extent.truncated` says why.
    Raises OSError when a path cannot be opened.
    """
    if isinstance(chunks, Path):
        with chunks.open("rb") as file:
            return read_file(file, chunks.name if label == "log" else label)
    reader = Reader(label)
    for chunk in chunks:
        reader.feed(chunk)
    return reader.finish()


def read_file(file: BinaryIO, label: str = "log") -> LogFacts:
    """Facts of an open binary file, plain or gzip; it need not be seekable."""
    reader = Reader(label)
    truncated = None
    buffered = io.BufferedReader(cast(io.RawIOBase, file), CHUNK)
    packed = buffered.peek(2).startswith(_GZIP)
    stream = gzip.GzipFile(fileobj=buffered) if packed else buffered
    try:
        while chunk := stream.read1(CHUNK):
            reader.feed(chunk)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        truncated = f"the gzip stream is damaged: {error}"
    return reader.finish(truncated)


class Reader:
    """Feed it chunks of one log in any cut; `finish` returns the facts."""

    def __init__(self, label: str = "log") -> None:
        self._label = label
        self._unwrapper = Unwrapper()
        self._boot = Boot(label, Source(label, 1, 0))
        self._earlier: deque[EarlierBoot] = deque(maxlen=MAX_EARLIER_BOOTS)
        self._tail = b""
        self._lines = 0
        self._offset = 0
        self._returns = 0
        self._escapes = 0
        self._clipped = 0
        self._skipping = False
        self._inside_line = False
        self._bare_bar = False
        self._last: tuple[int, int, bytes] | None = None

    def feed(self, chunk: bytes) -> None:
        self._returns += chunk.count(b"\r")
        self._escapes += chunk.count(b"\x1b")
        end = chunk.rfind(b"\n")
        if end < 0:
            self._tail += chunk
            if len(self._tail) > MAX_BUFFERED:
                self._piece()
            return
        block = self._tail + chunk[: end + 1]
        self._tail = chunk[end + 1 :]
        self._block(block)

    def finish(self, truncated: str | None = None) -> LogFacts:
        ends_with_newline = not self._tail and not self._inside_line
        if not ends_with_newline:
            # A number at the very end may be cut: unknown is better than a wrong value.
            whole = _without_cut_number(self._tail)
            self._block(whole + b"\n")
            self._offset += len(self._tail) - len(whole) - 1
        for line, offset, text in self._unwrapper.flush():
            self._text(line, offset, text)
        extent = Extent(
            self._lines,
            self._offset,
            self._returns,
            self._escapes,
            self._clipped,
            ends_with_newline,
            truncated,
        )
        return Finish(self._boot, self._last).facts(extent, self._unwrapper, self._bare_bar, tuple(self._earlier))

    def _piece(self) -> None:
        """Examine the beginning of a line that does not end; what cannot be a bar is skipped to its end."""
        cut = self._tail.rfind(b"\r")
        piece = self._tail if cut < 0 else self._tail[:cut]
        if not self._skipping:
            self._full(self._lines + 1, self._offset, piece)
        self._skipping = cut < 0
        self._inside_line = True
        self._offset += len(piece)
        self._tail = self._tail[len(piece) :]

    def _block(self, block: bytes) -> None:
        number, offset = self._lines + 1, self._offset
        lines = block.split(b"\n")
        lines.pop()
        before = list(accumulate(map(len, lines), initial=0))
        text = block
        if b"\r" in block:
            text = block.replace(b"\r\n", b"\n")
            lines = text.split(b"\n")
            lines.pop()
        if self._skipping:
            lines[0] = b""  # the rest of a line whose beginning was examined
            self._skipping = False
        self._inside_line = False
        previous = -1
        for index, line in self._unusual(text, lines):
            if index > previous + 1:
                self._answer(index - previous - 1)
            previous = index
            if line:
                row, start = number + index, offset + before[index] + index
                # The short ways past the layers give what the long way gives.
                short = len(line) <= MAX_EXAMINED
                if not (short and (self._headed(row, start, line) or self._unheaded(row, start, line))):
                    self._full(row, start, line)
        self._answer(len(lines) - previous - 1)
        self._note_last(lines, before)
        self._lines += len(lines)
        self._offset += len(block)

    def _unusual(self, block: bytes, lines: list[bytes]) -> Iterator[tuple[int, bytes]]:
        """The lines that need to be taken apart; the others are successful requests, nearly all of a long log."""
        rest = [(index, line) for index, line in enumerate(lines) if not line.endswith(_SERVED)]
        if len(rest) == len(lines):
            yield from rest
            return
        # Counting over the whole block is far cheaper than looking for the marks in every line, if access lines abound.
        if (
            len(rest) < len(lines) // 2
            and not self._unwrapper.waiting
            and not any(mark in block for mark in _PARTIAL)
            and not any(line.startswith(DOCKER) for _, line in rest)  # it may be a part of a record, too
            and _hold_all_marks(block, rest)
        ):
            yield from rest
            return
        for index, line in enumerate(lines):
            # An access line may also be the end of a record that the transport has split.
            if not line.endswith(_SERVED) or self._unwrapper.waiting or not _served(line):
                yield index, line

    def _answer(self, count: int) -> None:
        if count:
            self._boot.events += count
            self._boot.http[200] = self._boot.http.get(200, 0) + count

    def _note_last(self, lines: list[bytes], before: list[int]) -> None:
        """Remember the last line with text; called before the counts move past the block."""
        for index in range(len(lines) - 1, -1, -1):
            if lines[index].strip():
                start = self._offset + before[index] + index
                self._last = (self._lines + index + 1, start, lines[index][-1000:])
                return

    def _headed(self, number: int, offset: int, line: bytes) -> bool:
        """Take a line that is one record with the engine's header; False if it may be anything else."""
        head = HEADED.match(line)
        if head is None or _MORE.search(line, head.end("at")):
            return False
        boot, kind = self._boot, head.lastgroup
        writer, level, time = head.group(1, 2, 3)
        process, pid, rank = _writer(writer)
        known = pid is None or boot.processes.get(pid) == process
        calm = known and pid not in boot.errors.open and kind != "drawn"
        if calm and level != b"INFO":
            calm = boot.errors.pass_over(level, line)
        boot.events += 1
        if calm and kind == "at":
            return True  # most records of an engine are such; making records of them takes five times as long
        message = line[head.end("at") :]
        record = Record(number, offset, message, process, pid, rank, level.decode(), time.decode(), True)
        if calm:
            self._fit(form_of(head), record, message)
        else:
            self._take(record)
        return True

    def _unheaded(self, number: int, offset: int, line: bytes) -> bool:
        """Take a line that is one message, not of the engine's logger; False if it may be anything else."""
        if line.isspace():
            return True
        cache = CACHE_PLAIN.match(line)
        if cache is None and ENVELOPE.match(line):
            return False
        boot = self._boot
        begin, end = (0, len(line)) if cache is None else cache.span("message")
        says = None in boot.errors.open or _SPEAKS.search(line, begin, end)
        if says and _MANY.search(line, begin, end):
            return False
        boot.events += 1
        if says:
            self._take(bare_record(number, offset, line if cache is None else without_colours(line)))
        if cache is not None and b"\x1b" in line:
            self._unwrapper.seen.add("ansi")
        return True

    def _full(self, number: int, offset: int, raw: bytes) -> None:
        """One physical line through all layers."""
        unwrapped = self._unwrapper.unwrap(number, offset, raw)
        if unwrapped is not None:
            line, start, text = unwrapped
            self._text(line, start, text, bare=text is raw)

    def _text(self, line: int, offset: int, text: bytes, bare: bool = False) -> None:
        if b"\r" not in text:
            self._segment(line, offset, text, bare)
            return
        for segment in text.split(b"\r"):
            if segment:
                self._segment(line, offset, segment, bare)

    def _segment(self, line: int, offset: int, segment: bytes, bare: bool) -> None:
        if len(segment) > MAX_EXAMINED:
            self._clipped += 1
            segment = segment[:MAX_EXAMINED]
        # Several bars may stand in one segment when a writer does not return the carriage.
        while (drawn := find_bar(segment)) is not None:
            bar, before, segment = drawn
            self._bare_bar = self._bare_bar or bare
            self._records(line, offset, before)
            self._boot.draw(bar, Source(self._label, line, offset))
        self._records(line, offset, segment)

    def _records(self, line: int, offset: int, segment: bytes) -> None:
        if not segment or segment.isspace():
            return
        for record in records(line, offset, segment):
            self._record(record)

    def _record(self, record: Record) -> None:
        """Take one record from anywhere in a line; the answer to a request is counted only."""
        boot, message = self._boot, record.message
        boot.events += 1
        if _HTTP in message and (not record.headed or b' - "' in message):
            status = _status(message)
            if status:
                boot.http[status] = boot.http.get(status, 0) + 1
                if b"Error" not in message or status != 200:
                    return
        self._take(record)

    def _take(self, record: Record) -> None:
        boot, message = self._boot, record.message
        if record.pid is not None and boot.processes.get(record.pid) != record.process:
            boot.meet(record)
        erred = boot.errors.see(record, self._label, boot.phase)
        if erred:
            boot.note_fatal()
            if b"max seq len" in message:
                refuse(boot, record, message)
        if record.headed and not message.startswith(UNKNOWN_START):
            form = form_at(message)
            if form is not None:
                self._fit(form, record, message)
        elif not erred:
            found = form_anywhere(message)
            if found is not None:
                self._fit(found[0], record, message[found[1] :])

    def _fit(self, form: Form, record: Record, text: bytes) -> None:
        """Take what a text says, which begins with its form."""
        if form.needle in STARTERS:
            self._start(f"{form.start}:{record.process}", record)
        form.handler(self._boot, record, text)

    def _start(self, key: str, record: Record) -> None:
        """A process that starts a second time begins a new boot."""
        if key in self._boot.starters:
            old = self._boot
            old.errors.finish()
            cause = first_cause(tuple(old.errors.records.values()))
            self._earlier.append(EarlierBoot(old.start, old.readiness(), old.shutdown, cause))
            self._boot = Boot(self._label, old.source(record))
            self._boot.meet(record)
        if len(self._boot.starters) < MAX_FACTS:
            self._boot.starters.add(key)


def _hold_all_marks(block: bytes, rest: list[tuple[int, bytes]]) -> bool:
    joined = b"\n".join([line for _, line in rest])
    return all(block.count(mark) == joined.count(mark) for mark in _MARKS)


def _served(line: bytes) -> bool:
    """Whether a line is nothing but a successful request."""
    return (
        line.endswith(_SERVED)
        and not any(mark in line for mark in _MARKS)
        and not any(mark in line for mark in _PARTIAL)
    )


@lru_cache(maxsize=256)
def _writer(text: bytes | None) -> tuple[str | None, int | None, int | None]:
    """Process, pid and rank of a writer such as `Worker_TP0 pid=7`."""
    if text is None:
        return None, None, None
    process, _, pid = text.decode().rpartition(" pid=")
    return process, int(pid), rank_of(process)


def _without_cut_number(text: bytes) -> bytes:
    """Text without its last word, if that has a digit in it."""
    last = text[-200:].split()[-1:] if text and not text[-1:].isspace() else []
    cut = last and any(48 <= byte <= 57 for byte in last[0])
    return text[: len(text) - len(last[0])] if cut else text


def _status(line: bytes) -> int:
    """Status code behind the protocol of an access line; 0 when there is none."""
    at = line.rfind(_HTTP)
    text = line[at + 11 : at + 14]
    if line[at + 9 : at + 11] == b'" ' and len(text) == 3 and text.isdigit():
        return int(text)
    return 0
