# SPDX-License-Identifier: Apache-2.0
"""Turns what was read of a boot into facts: ranks by pid, and passes of graph capture by records."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from qualify.observe.bars import JIT_WARMUP, capture_label
from qualify.observe.boot import Boot, CaptureState
from qualify.observe.facts import (
    Capture,
    CaptureFinished,
    CapturePass,
    EarlierBoot,
    EndOfFile,
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
from qualify.observe.layers import Unwrapper

T = TypeVar("T")


def _capture_facts(boot: Boot, finals: list[Fact[CaptureFinished]]) -> list[tuple[CaptureState, Capture]]:
    """The bars as values; `finals` are the records that ended the final pass."""
    last_final = max((fact.source.line for fact in finals), default=None)
    found = []
    for state in boot.captures:
        label = capture_label(state.label)
        if label is None:
            continue
        behind = last_final is not None and state.first.line > last_final
        value = Capture(
            state.label, label.kind, label.role, state.ordinal, state.done, state.total, state.elapsed, behind
        )
        found.append((state, value))
    return found


class Finish:
    """Turns the state at the end of a file into facts."""

    def __init__(self, boot: Boot, last: tuple[int, int, bytes] | None) -> None:
        self._boot = boot
        self._last = last
        self._counts = boot.errors.finish()

    def facts(self, extent: Extent, unwrapper: Unwrapper, bare_bar: bool, earlier: tuple[EarlierBoot, ...]) -> LogFacts:
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
            http_after_stop=self._http_after_stop(),
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

    def _http_after_stop(self) -> dict[int, int]:
        before = self._boot.http_at_stop
        if before is None:
            return {}
        left = {status: count - before.get(status, 0) for status, count in sorted(self._boot.http.items())}
        return {status: count for status, count in left.items() if count}

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
        states = _capture_facts(self._boot, finals)
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
            max((length for length, _ in boot.stalls.values()), default=0),
        )

    def _heartbeats(self) -> Heartbeats | None:
        boot = self._boot
        if boot.heartbeats is None or boot.events == boot.heartbeat_at:
            return boot.heartbeats
        return replace(boot.heartbeats, trailing=0)

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
        boot, beats = self._boot, self._heartbeats()
        return boot.jit_last is not None and boot.events <= boot.jit_at + (beats.trailing if beats else 0)

    def _end(self) -> EndOfFile:
        if self._last is None:
            return EndOfFile(None, None, None)
        number, offset, raw = self._last
        message = raw.split(b"\r")[-1].decode("utf-8", "replace").strip()
        bar = self._boot.last_bar
        still_open = bar if bar is not None and bar.value.done < bar.value.total else None
        return EndOfFile(Source(self._boot.label, number, offset), message[-300:], still_open)
