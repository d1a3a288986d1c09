# SPDX-License-Identifier: Apache-2.0
"""State of one boot of the engine while its log is read. Every list in it is bounded."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TypeVar

from qualify.observe.bars import JIT_WARMUP, capture_label
from qualify.observe.errors import ErrorBook
from qualify.observe.facts import (
    Bar,
    CacheServer,
    CaptureFinished,
    Fact,
    Heartbeats,
    Phase,
    Plugins,
    Readiness,
    Source,
    SpecDecode,
    Throughput,
)
from qualify.observe.layers import Record

T = TypeVar("T")

MAX_FACTS = 1024
"""Facts kept of one kind. A log with more ranks than this keeps the first ones."""
MAX_CAPTURES = 128
KEEP_LAST = 8
"""Statistics lines kept: enough to see how a run ended."""
MAX_NAMES = 64


@dataclass(slots=True)
class CaptureState:
    """A capture bar that is being drawn."""

    label: str
    ordinal: int
    first: Source
    drawn: Source
    done: int
    total: int
    elapsed: str


@dataclass(slots=True)
class Boot:
    """Everything read since the engine started last."""

    label: str
    start: Source
    errors: ErrorBook = field(default_factory=ErrorBook)
    starters: set[str] = field(default_factory=set)
    processes: dict[int, str] = field(default_factory=dict)
    ranks: dict[int, int] = field(default_factory=dict)
    single: dict[str, Fact[object]] = field(default_factory=dict)
    many: dict[str, list[Fact[object]]] = field(default_factory=dict)
    all_reduce: dict[str, Fact[tuple[str, ...]]] = field(default_factory=dict)
    announced_ranks: set[int] = field(default_factory=set)
    captures: list[CaptureState] = field(default_factory=list)
    finished: list[tuple[Fact[CaptureFinished], bool]] = field(default_factory=list)
    kv_seen: bool = False
    http: dict[int, int] = field(default_factory=dict)
    api_pids: set[int] = field(default_factory=set)
    api_seen: bool = False
    cache_server_seen: bool = False
    started: list[Fact[int]] = field(default_factory=list)
    pending_startups: list[int] = field(default_factory=list)
    completions: int = 0
    ready_source: Source | None = None
    shutdown: bool = False
    http_at_stop: dict[int, int] | None = None
    served_before_fatal: int | None = None
    throughput_count: int = 0
    throughput_last: deque[Fact[Throughput]] = field(default_factory=lambda: deque(maxlen=KEEP_LAST))
    max_generation: float | None = None
    stalls: dict[str | None, tuple[int, Source]] = field(default_factory=dict)
    longest_stall: tuple[int, Source | None] = (0, None)
    spec_count: int = 0
    spec_last: deque[Fact[SpecDecode]] = field(default_factory=lambda: deque(maxlen=KEEP_LAST))
    plugins: Plugins | None = None
    events: int = 0
    """Records, answers and bar states so far; tells what came directly behind what."""
    heartbeats: Heartbeats | None = None
    heartbeat_at: int = 0
    jit_begun: int = 0
    jit_completed: int = 0
    jit_after_ready: int = 0
    jit_modules: list[str] = field(default_factory=list)
    jit_monitor: bool = False
    jit_warmup: bool = False
    jit_during_inference: int = 0
    jit_last: Source | None = None
    jit_at: int = 0
    cache: CacheServer | None = None
    group_dump: list[int] | None = None
    last_bar: Fact[Bar] | None = None

    @property
    def phase(self) -> Phase:
        if self.shutdown:
            return Phase.STOPPING
        # A log that begins in the middle has answers but no ready line.
        served = self.ready_source is not None or 200 in self.http
        return Phase.SERVE if served else Phase.START

    def readiness(self) -> Readiness:
        if self.ready_source is not None:
            return Readiness.YES
        if self.cache_server_seen and "version" not in self.single:
            return Readiness.NOT_APPLICABLE  # the log of a cache server alone
        if any(200 <= status < 300 for status in self.http):
            return Readiness.UNKNOWN
        if "version" in self.single and not (self.api_seen or self.started):
            return Readiness.NOT_APPLICABLE
        return Readiness.NO

    def answered(self) -> int:
        return sum(count for status, count in self.http.items() if 200 <= status < 300)

    def note_fatal(self) -> None:
        """Remember how much was answered before the first fatal error of the serving phase."""
        if self.served_before_fatal is None and self.errors.fatal_serving:
            self.served_before_fatal = self.answered()

    def source(self, record: Record) -> Source:
        return Source(self.label, record.line, record.offset)

    def fact(self, value: T, record: Record, unit: str | None = None) -> Fact[T]:
        return Fact(value, self.source(record), unit, record.process, record.pid, record.rank)

    def set(self, name: str, value: object, record: Record, unit: str | None = None) -> None:
        """The last statement of a single fact wins."""
        self.single[name] = self.fact(value, record, unit)

    def set_first(self, name: str, value: object, record: Record) -> None:
        if name not in self.single:
            self.set(name, value, record)

    def add(self, name: str, value: object, record: Record, unit: str | None = None) -> None:
        facts = self.many.setdefault(name, [])
        if len(facts) < MAX_FACTS:
            facts.append(self.fact(value, record, unit))

    def meet(self, record: Record) -> None:
        """Learn process names, ranks and API servers from a prefix."""
        pid = record.pid
        if pid is None or record.process is None:
            return
        if pid not in self.processes and len(self.processes) >= MAX_FACTS:
            return
        self.processes[pid] = record.process
        if record.rank is not None and pid not in self.ranks:
            self.assign(pid, record.rank)
        if record.process.startswith(("APIServer", "ApiServer")):
            self.api_seen = True
            self.api_pids.add(pid)

    def assign(self, pid: int | None, rank: int) -> None:
        """A line of the process `pid` names its rank."""
        if pid is not None and (pid in self.ranks or len(self.ranks) < MAX_FACTS):
            self.ranks[pid] = rank

    def draw(self, bar: Bar, source: Source) -> None:
        """Take one state of a bar; the same count again is the same bar redrawn."""
        self.events += 1
        self.last_bar = Fact(bar, source)
        if bar.label.startswith(JIT_WARMUP):
            self.jit_warmup, self.jit_last, self.jit_at = True, source, self.events
        if capture_label(bar.label) is None:
            return
        current = next((state for state in reversed(self.captures) if state.label == bar.label), None)
        if current is None or bar.total != current.total or bar.done < current.done:
            if len(self.captures) < MAX_CAPTURES:
                ordinal = 1 if current is None else current.ordinal + 1
                state = CaptureState(bar.label, ordinal, source, source, bar.done, bar.total, bar.elapsed)
                self.captures.append(state)
        else:
            current.done, current.elapsed, current.drawn = bar.done, bar.elapsed, source

    def jit(self, record: Record, *, begun: int = 0, completed: int = 0) -> None:
        self.jit_begun += begun
        self.jit_completed += completed
        self.jit_after_ready += begun if self.ready_source is not None else 0
        self.jit_last, self.jit_at = self.source(record), self.events

    def cache_server(self) -> CacheServer:
        if self.cache is None:
            self.cache = CacheServer(None, None, None, None, (), None, None, 0, 0, (), 0, 0, (), ())
        return self.cache
