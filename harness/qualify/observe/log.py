# SPDX-License-Identifier: Apache-2.0
"""Streaming reader of vLLM logs: bytes in, `LogFacts` out, in constant memory.

    facts = read(Path("engine.log"))
    facts.kv_tokens.value, facts.kv_tokens.source    # 3321847, engine.log:70
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

from qualify.observe.bars import JIT_WARMUP, capture_label, find_bar
from qualify.observe.boot import STARTERS, Boot, capture_facts, form_anywhere, form_at_start, refuse
from qualify.observe.facts import (
    Bar,
    Capture,
    CaptureFinished,
    CapturePass,
    EarlierBoot,
    EndOfFile,
    ErrorKind,
    ErrorRecord,
    Extent,
    Fact,
    Heartbeats,
    Jit,
    LogFacts,
    Source,
    SpecDecodeLines,
    ThroughputLines,
    Traceback,
)
from qualify.observe.graphs import Runner
from qualify.observe.layers import MAX_EXAMINED, Record, Unwrapper, records

CHUNK = 1 << 20
MAX_BUFFERED = 1 << 21
"""A line without end is examined in pieces of this size, so that no input can fill the memory."""
MAX_EARLIER_BOOTS = 32

_HTTP = b" HTTP/1."
_SERVED = b' HTTP/1.1" 200 OK'
_GZIP = b"\x1f\x8b"

T = TypeVar("T")


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
        while chunk := stream.read(CHUNK):
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
            self._block(self._tail + b"\n")
            self._offset -= 1
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
        return _Finish(self._boot, self._last).facts(
            extent, self._unwrapper, self._bare_bar, tuple(self._earlier)
        )

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
        number, offset = self._lines, self._offset
        lines = block.split(b"\n")
        lines.pop()
        starts = list(accumulate((len(line) + 1 for line in lines), initial=offset))
        if self._skipping:
            lines[0] = b""  # the rest of a line whose beginning was examined
            self._skipping = False
            self._clipped += 1
        self._inside_line = False
        previous = -1
        for index, line in _unusual(block, lines):
            self._served(index - previous - 1)
            previous = index
            if line:
                self._full(number + index + 1, starts[index], line)
        self._served(len(lines) - previous - 1)
        self._note_last(lines, number, starts)
        self._lines += len(lines)
        self._offset += len(block)

    def _served(self, count: int) -> None:
        if count:
            self._boot.http[200] = self._boot.http.get(200, 0) + count

    def _note_last(self, lines: list[bytes], number: int, starts: list[int]) -> None:
        for index in range(len(lines) - 1, -1, -1):
            if lines[index].strip():
                self._last = (number + index + 1, starts[index], lines[index][-1000:])
                return

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
        drawn = find_bar(segment)
        if drawn is not None:
            self._bare_bar = self._bare_bar or bare
            if drawn.before.strip():
                self._records(line, offset, drawn.before)
            self._boot.draw(drawn.bar, Source(self._label, line, offset))
            segment = drawn.after
            if not segment.strip():
                return
            if find_bar(segment) is not None:
                self._segment(line, offset, segment, bare)
                return
        self._records(line, offset, segment)

    def _records(self, line: int, offset: int, segment: bytes) -> None:
        for record in records(line, offset, segment):
            self._record(record)

    def _record(self, record: Record) -> None:
        boot, message = self._boot, record.message
        if not record.headed and _HTTP in message:
            status = _status(message)
            if status:
                boot.http[status] = boot.http.get(status, 0) + 1
                return
        if record.pid is not None and boot.processes.get(record.pid) != record.process:
            boot.meet(record)
        erred = boot.errors.see(record, self._label, boot.phase)
        if erred:
            boot.note_fatal()
            if b"max seq len" in message:
                refuse(boot, record, message)
        if record.headed and message[:1] not in (b" ", b"\xe2"):
            found = form_at_start(message)
        elif erred:
            return
        else:
            found = form_anywhere(message)
        if found is not None:
            form, at = found
            if form.needle in STARTERS:
                self._start(f"{form.start}:{record.process}", record)
            form.handler(self._boot, record, message[at:])

    def _start(self, key: str, record: Record) -> None:
        """A process that starts a second time begins a new boot."""
        if key in self._boot.starters:
            old = self._boot
            old.errors.finish()
            cause = first_cause(tuple(old.errors.records.values()))
            self._earlier.append(EarlierBoot(old.start, old.readiness(), old.shutdown, cause))
            self._boot = Boot(self._label, old.source(record))
            self._boot.meet(record)
        self._boot.starters.add(key)


def _unusual(block: bytes, lines: list[bytes]) -> list[tuple[int, bytes]]:
    """The lines that need to be taken apart; the others are successful requests, nearly all of a long log."""
    rest = [(index, line) for index, line in enumerate(lines) if not line.endswith(_SERVED)]
    # Whatever else such a physical line holds was drawn by a bar, which these two counts reveal.
    for mark in (b"\r", b"%|"):
        if block.count(mark) != sum(line.count(mark) for _, line in rest):
            return list(enumerate(lines))
    return rest


def _status(line: bytes) -> int:
    """Status code behind the protocol of an access line; 0 when there is none."""
    at = line.rfind(_HTTP)
    text = line[at + 11 : at + 14]
    if line[at + 9 : at + 11] == b'" ' and len(text) == 3 and text.isdigit():
        return int(text)
    return 0


NOT_A_CAUSE = frozenset(
    {
        ErrorKind.CORE_INIT,
        ErrorKind.CORE_EXITED,
        ErrorKind.ENGINE_DEAD,
        ErrorKind.OUTPUT_HANDLER,
        ErrorKind.TEARDOWN,
        ErrorKind.CONTEXT_LENGTH,
        ErrorKind.CLIENT_REQUEST,
        ErrorKind.PLUGIN,
    }
)
"""Kinds that follow from another failure, belong to the client or are survived."""
_SECONDARY = frozenset({ErrorKind.CORE_INIT, ErrorKind.CORE_EXITED, ErrorKind.ENGINE_DEAD, ErrorKind.OUTPUT_HANDLER})
_FRAMES = frozenset({ErrorKind.CORE_START, ErrorKind.WORKER_START, ErrorKind.WORKER_EXCEPTION, ErrorKind.CORE_FATAL})


def first_cause(errors: tuple[ErrorRecord, ...]) -> ErrorRecord | None:
    """The root cause: the innermost exception of the process that failed first, if the log shows one."""
    causes = [error for error in errors if error.kind not in NOT_A_CAUSE]
    if not causes:
        secondary = [error for error in errors if error.kind in _SECONDARY]
        return min(secondary, key=lambda error: error.source.line, default=None)
    first = min(causes, key=lambda error: error.source.line)
    mine = [error for error in causes if error.pid == first.pid]
    named = [error for error in mine if error.kind not in _FRAMES and error.kind is not ErrorKind.OTHER]
    other = [error for error in mine if error.kind is ErrorKind.OTHER]
    return min(named or other or mine, key=lambda error: error.source.line)


class _Finish:
    """Turns the state at the end of a file into facts."""

    def __init__(self, boot: Boot, last: tuple[int, int, bytes] | None) -> None:
        self._boot = boot
        self._last = last
        self._counts = boot.errors.finish()

    def facts(
        self, extent: Extent, unwrapper: Unwrapper, bare_bar: bool, earlier: tuple[EarlierBoot, ...]
    ) -> LogFacts:
        boot = self._boot
        finished = self._finished()
        captures = self._captures(finished)
        many = {name: tuple(self._ranked(fact) for fact in facts) for name, facts in boot.many.items()}
        single = {name: self._ranked(fact) for name, fact in boot.single.items()}
        values: dict[str, Any] = {**many, **single}
        return LogFacts(
            label=boot.label,
            extent=extent,
            envelopes=frozenset(unwrapper.seen),
            bare_bars=bare_bar and bool(unwrapper.seen - {"ansi"}),
            earlier_boots=earlier,
            processes=dict(boot.processes),
            ranks=dict(boot.ranks),
            runner_from_labels=self._runner(),
            all_reduce={group: self._ranked(fact) for group, fact in boot.all_reduce.items()},
            announced_ranks=frozenset(boot.announced_ranks),
            captures=captures,
            capture_finished=finished,
            server_started=tuple(boot.started),
            ready=boot.readiness(),
            ready_source=boot.ready_source,
            throughput=self._throughput(),
            spec_decode=SpecDecodeLines(boot.spec_count, tuple(boot.spec_last)) if boot.spec_count else None,
            http=dict(sorted(boot.http.items())),
            plugins=boot.plugins,
            heartbeats=self._heartbeats(),
            jit=self._jit(),
            cache_server=boot.cache,
            errors=tuple(self._ranked_error(error) for error in self._sorted_errors()),
            tracebacks=tuple(self._ranked_traceback(one) for one in boot.errors.tracebacks),
            counts=self._counts,
            answered_after_fatal=self._answered_after_fatal(),
            last_bar=boot.last_bar,
            end=self._end(),
            **values,
        )

    def _answered_after_fatal(self) -> int | None:
        before = self._boot.served_before_fatal
        return None if before is None else self._boot.answered() - before

    def _sorted_errors(self) -> list[ErrorRecord]:
        return sorted(self._boot.errors.records.values(), key=lambda error: error.source.line)

    def _ranked(self, fact: Fact[T]) -> Fact[T]:
        rank = self._rank(fact.pid)
        return fact if rank is None or rank == fact.rank else replace(fact, rank=rank)

    def _rank(self, pid: int | None) -> int | None:
        return None if pid is None else self._boot.ranks.get(pid)

    def _ranked_error(self, error: ErrorRecord) -> ErrorRecord:
        rank = self._rank(error.pid)
        return error if rank is None else replace(error, rank=rank)

    def _ranked_traceback(self, one: Traceback) -> Traceback:
        rank = self._rank(one.pid)
        return one if rank is None else replace(one, rank=rank)

    def _finished(self) -> tuple[Fact[CaptureFinished], ...]:
        passes = {True: CapturePass.FINAL, False: CapturePass.PROFILING if self._boot.kv_seen else None}
        return tuple(
            replace(self._ranked(fact), capture_pass=passes[after_kv]) for fact, after_kv in self._boot.finished
        )

    def _captures(self, finished: tuple[Fact[CaptureFinished], ...]) -> tuple[Fact[Capture], ...]:
        finals = [fact for fact in finished if fact.capture_pass is CapturePass.FINAL]
        profiled = any(fact.capture_pass is CapturePass.PROFILING for fact in finished)
        states = capture_facts(self._boot, finals)
        newest = {capture.label: capture.ordinal for _, capture in states}
        own_bars = any(self._profiling(capture) for _, capture in states)
        facts = []
        for state, capture in states:
            if self._profiling(capture) or capture.ordinal != newest[capture.label]:
                which: CapturePass | None = CapturePass.PROFILING
            else:
                which = self._last_pass(capture, bool(finals), profiled, own_bars)
            facts.append(Fact(capture, state.drawn, "sizes", rank=0, capture_pass=which))
        return tuple(facts)

    def _last_pass(self, capture: Capture, ended: bool, profiled: bool, own_bars: bool) -> CapturePass | None:
        """Pass of the last bar of a label. Records decide, never the position of the bar."""
        label = capture_label(capture.label)
        if label is not None and label.runner is Runner.V1:
            return CapturePass.FINAL  # V1 profiles without bars
        if not ended:
            return CapturePass.PROFILING if profiled else None
        # Two passes ended, but one bar is there: which of the two it shows is not known.
        return None if profiled and capture.ordinal == 1 and not own_bars else CapturePass.FINAL

    def _profiling(self, capture: Capture) -> bool:
        label = capture_label(capture.label)
        return label is not None and label.profiling

    def _runner(self) -> Runner | None:
        labels = (capture_label(state.label) for state in self._boot.captures)
        runners = {label.runner for label in labels if label is not None and label.runner is not None}
        return runners.pop() if len(runners) == 1 else None

    def _throughput(self) -> ThroughputLines | None:
        boot = self._boot
        if not boot.throughput_count:
            return None
        return ThroughputLines(
            boot.throughput_count,
            tuple(boot.throughput_last),
            boot.max_generation,
            boot.longest_stall[0],
            boot.longest_stall[1],
        )

    def _heartbeats(self) -> Heartbeats | None:
        found = self._boot.heartbeats
        if found is None or self._last is None or self._last[0] == found.last.line:
            return found
        return replace(found, trailing=0)

    def _jit(self) -> Jit | None:
        boot = self._boot
        if boot.jit_last is None and not boot.jit_monitor:
            return None
        bar = boot.last_bar.value if boot.last_bar else None
        open_warmup = bar is not None and bar.label.startswith(JIT_WARMUP) and bar.done < bar.total
        starting = boot.ready_source is None and not boot.http
        return Jit(
            boot.jit_begun,
            boot.jit_completed,
            boot.jit_after_ready,
            tuple(boot.jit_modules),
            boot.jit_warmup,
            boot.jit_monitor,
            boot.jit_during_inference,
            (starting and open_warmup) or boot.jit_begun > boot.jit_completed or (starting and self._jit_is_last()),
            boot.jit_last,
        )

    def _jit_is_last(self) -> bool:
        """Nothing but heartbeats came after the last sign of compilation."""
        last, beats = self._boot.jit_last, self._boot.heartbeats
        if last is None or self._last is None:
            return False
        return self._last[0] <= last.line + (beats.trailing if beats and beats.last.line == self._last[0] else 0)

    def _end(self) -> EndOfFile:
        if self._last is None:
            return EndOfFile(None, None, None)
        number, offset, raw = self._last
        message = raw.split(b"\r")[-1].decode("utf-8", "replace").strip()
        bar = self._boot.last_bar
        still_open = bar if bar is not None and bar.value.done < bar.value.total else None
        return EndOfFile(Source(self._boot.label, number, offset), message[-300:], still_open)
