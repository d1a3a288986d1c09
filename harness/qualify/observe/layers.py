# SPDX-License-Identifier: Apache-2.0
"""Takes a physical log line apart: transport envelope, ANSI, carriage returns, process prefix, logger header.

Each layer may be absent, and other text may be glued before or behind a record, so every search but the common
case works anywhere in a segment.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

MAX_EXAMINED = 1 << 16
"""Bytes of one line that are looked at. The longest useful line, the engine's dump, has about 8 KiB."""

_ANSI = re.compile(rb"\x1b(?:\[[0-9;?]*[ -/]*[@-~]?|[@-Z\\^_])?")
DOCKER = (b'{"log":', b'{"stream":', b'{"time":', b'{"attrs":')
_TIME = rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:?\d\d)"
_CRI = re.compile(_TIME + rb" (stdout|stderr) ([PF])(?:$| )")
_STAMP = re.compile(_TIME + rb"(?:$| )")
_SYSLOG = re.compile(rb"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \S+ [^\s\[:]+(?:\[\d+\])?:(?:$| )")
_COMPOSE = re.compile(rb"[A-Za-z0-9][\w.-]* *\| ")

_PREFIX = rb"[(\[](?P<name>[A-Za-z][\w.-]*)(?: rank=(?P<rank>\d{1,9}))?,? pid=(?P<pid>\d{1,9})[)\]]:? ?"
_LEVELS = rb"DEBUG|INFO|WARNING|ERROR|CRITICAL|FATAL"
_HEADER = (
    rb"(?P<level>" + _LEVELS + rb"):? (?P<time>\d\d-\d\d \d\d:\d\d:\d\d)(?:[.,]\d+)?"
    rb" \[(?P<file>[^\]\s:]{1,200}):\d+\](?: |$)"
)
HEADER_START = b"|".join(level + rb":? \d" for level in _LEVELS.split(b"|"))
_RECORD = re.compile(rb"(?:" + _PREFIX + rb")?" + _HEADER)
_ANY_HEADER = re.compile(_HEADER)
_ANY_PREFIX = re.compile(_PREFIX)
_LAST_PREFIX = re.compile(_PREFIX + rb"$")
PLAIN = (
    rb"(?:\((?P<writer>[A-Za-z][\w.-]{0,60} pid=\d{1,9})\) )?(?P<level>" + _LEVELS + rb") "
    rb"(?P<time>\d\d-\d\d \d\d:\d\d:\d\d) \[[^\] \t\n\r\f\v:\x1b]{1,200}:\d+\] "
)
"""The commonest beginning of a line: no envelope, then the header of one record."""
CACHE_PLAIN = re.compile(
    rb"(?:\x1b\[[0-9;]{1,8}m)?\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+\] LMCache (?:INFO|DEBUG):(?:\x1b\[0m)? "
    rb"(?P<message>[^\x1b]*)(?:\x1b\[3m\([\w.:]+\)\x1b\[0m)?$"
)
"""A whole line of a cache server."""
ENVELOPE = re.compile(rb"\{|\d{4}-\d\d-\d\dT|[A-Z][a-z]{2} [ \d]\d ")
"""What a line in any envelope but compose's begins with."""
_OTHER_LEVEL = re.compile(
    rb"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[,.]\d+\] LMCache (?P<lmcache>" + _LEVELS + rb"):? ?"
    rb"|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[,.]\d+ - (?P<plain>" + _LEVELS + rb") - "
    rb"|(?P<uvicorn>" + _LEVELS + rb"): {4,}"
)
_NATIVE_RANK = re.compile(rb"\[rank(\d{1,9})\]:")
_NAME_RANK = re.compile(r"_TP(\d{1,9})|^VllmWorker-(\d{1,9})$")


@dataclass(slots=True)
class Record:
    """A message with what is known about its writer. `headed` tells whether a logger header preceded it.

    Not frozen, because one is made for nearly every line and freezing triples its cost.
    """

    line: int
    offset: int
    message: bytes
    process: str | None = None
    pid: int | None = None
    rank: int | None = None
    level: str | None = None
    time: str | None = None
    headed: bool = False


@dataclass(slots=True)
class _Partial:
    line: int
    offset: int
    text: bytes


class Unwrapper:
    """Removes transport envelopes and joins the records that a transport has split."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self._partial: dict[bytes, _Partial] = {}

    @property
    def waiting(self) -> bool:
        return bool(self._partial)

    def unwrap(self, line: int, offset: int, raw: bytes) -> tuple[int, int, bytes] | None:
        """The line without envelopes, with the place where it began; None while its end is missing."""
        if raw.startswith(DOCKER):
            decoded = _docker(raw)
            if decoded is not None:
                self.seen.add("dockerJson")
                stream, text = decoded
                joined = self._join(stream, line, offset, text.removesuffix(b"\n"), text.endswith(b"\n"))
                return joined and (joined[0], joined[1], self._inner(joined[2]))
        cri = _CRI.match(raw) if raw[:1].isdigit() else None
        if cri is not None:
            self.seen.add("cri")
            joined = self._join(cri[1], line, offset, raw[cri.end() :], cri[2] == b"F")
            return joined and (joined[0], joined[1], self._inner(joined[2]))
        return line, offset, self._inner(raw)

    def flush(self) -> Iterator[tuple[int, int, bytes]]:
        """Records whose last part never came."""
        for part in self._partial.values():
            yield part.line, part.offset, self._inner(part.text)
        self._partial.clear()

    def _join(self, stream: bytes, line: int, offset: int, text: bytes, ends: bool) -> tuple[int, int, bytes] | None:
        part = self._partial.get(stream)
        if part is not None:
            part.text = (part.text + text)[:MAX_EXAMINED]
        elif ends:
            return line, offset, text
        else:
            part = self._partial[stream] = _Partial(line, offset, text[:MAX_EXAMINED])
        if not ends:
            return None
        del self._partial[stream]
        return part.line, part.offset, part.text

    def _inner(self, text: bytes) -> bytes:
        if b"\x1b" in text:
            self.seen.add("ansi")
            text = without_colours(text)
        if b" | " in text[:64]:
            compose = _COMPOSE.match(text)
            if compose is not None:
                self.seen.add("compose")
                text = text[compose.end() :]
        if text[:2].isdigit():
            stamp = _STAMP.match(text)
            if stamp is not None:
                self.seen.add("timestamps")
                text = text[stamp.end() :]
        elif text[3:4] == b" " and text[6:7] == b" ":
            syslog = _SYSLOG.match(text)
            if syslog is not None:
                self.seen.add("syslog")
                text = text[syslog.end() :]
        return text


def without_colours(text: bytes) -> bytes:
    return _ANSI.sub(b"", text)


def _docker(raw: bytes) -> tuple[bytes, bytes] | None:
    try:
        record = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    text = record.get("log")
    if not isinstance(text, str):
        return None
    return str(record.get("stream", "")).encode("utf-8", "replace"), text.encode("utf-8", "replace")


def records(line: int, offset: int, segment: bytes) -> Iterable[Record]:
    """The records of one segment, in order; text without any known header is one bare record."""
    first = _RECORD.match(segment)
    if first is None:
        return _glued_records(line, offset, segment)
    message = segment[first.end() :]
    if b"pid=" in message:
        return _glued_records(line, offset, segment)
    return (_headed(line, offset, first, message),)


def _glued_records(line: int, offset: int, segment: bytes) -> Iterator[Record]:
    """Records anywhere in a segment, with other text before, between and behind them."""
    first = _RECORD.search(segment) if _ANY_HEADER.search(segment) else None
    if first is None:
        if segment.strip():
            yield bare_record(line, offset, segment)
        return
    glued = segment[: first.start()]
    if glued.strip() and not _envelope_like(glued):
        yield bare_record(line, offset, glued)
    while first is not None:
        rest = segment[first.end() :]
        # A second record behind the first one was written without a line end; both have their own header.
        second = _RECORD.search(rest) if b"pid=" in rest else None
        message = rest if second is None else rest[: second.start()]
        yield _headed(line, offset, first, message)
        segment, first = rest, second


def _envelope_like(glued: bytes) -> bool:
    """Whether text before a header is only an unknown prefix, such as one of syslog."""
    return len(glued) < 80 and glued.rstrip().endswith((b":", b"]", b")", b"|", b">"))


def _headed(line: int, offset: int, match: re.Match[bytes], message: bytes) -> Record:
    name, rank, pid, level, time = match.group("name", "rank", "pid", "level", "time")
    if name is None:
        return Record(line, offset, message, None, None, None, level.decode(), time.decode(), True)
    process = name.decode("utf-8", "replace")
    known = int(rank) if rank else rank_of(process)
    return Record(line, offset, message, process, int(pid), known, level.decode(), time.decode(), True)


def bare_record(line: int, offset: int, text: bytes) -> Record:
    """The record of text without the engine's header; it may have a prefix and the level of another logger."""
    process, pid, rank = None, None, None
    if b"pid=" in text[:200]:
        prefix = _ANY_PREFIX.search(text, 0, 200)
        if prefix is not None:
            process, pid = _text(prefix["name"]), int(prefix["pid"])
            rank = int(prefix["rank"]) if prefix["rank"] else rank_of(process)
            text = text[prefix.end() :]
    level = None
    other = _OTHER_LEVEL.match(text) or (_OTHER_LEVEL.search(text) if b"LMCache " in text else None)
    if other is not None:
        level = (other["lmcache"] or other["plain"] or other["uvicorn"]).decode()
        text = text[other.end() :]
    elif text.startswith(b"[rank"):
        native = _NATIVE_RANK.match(text)
        rank = int(native[1]) if native else rank
    return Record(line, offset, text, process, pid, rank, level)


@lru_cache(maxsize=256)
def rank_of(process: str | None) -> int | None:
    """Rank that a process name carries: `Worker_TP1`, `Worker_PP0_TP3_EP3`, `VllmWorker-0`."""
    found = _NAME_RANK.search(process) if process else None
    return int(found[1] or found[2]) if found else None


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("utf-8", "replace")
