# SPDX-License-Identifier: Apache-2.0
"""Findings from the facts of a log: pure, by phase and side, each with a code, a verdict and a remedy.

A finding of verdict FAIL or INCONCLUSIVE keeps the whole from passing; PASS and FACT explain what is easily
misread. Where facts from outside the log decide (exit status, deadline, open requests), they are arguments.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import TypeVar

from qualify.observe.codes import CODES, EvidenceCode
from qualify.observe.errors import NOT_A_CAUSE, first_cause
from qualify.observe.facts import (
    Capture,
    CapturePass,
    ErrorKind,
    ErrorRecord,
    Fact,
    LogFacts,
    Phase,
    Readiness,
    Source,
)
from qualify.observe.graphs import Runner, Unknown, expected_sets

_C = EvidenceCode
_K = ErrorKind

STALL_LINES = 2
"""Consecutive statistics lines with running requests and both rates 0 that count as a stall (about 20 s)."""
SILENT_SECONDS = 30.0
"""Seconds without a token at which open requests of the client confirm a stall: three statistics intervals."""
POOL_FULL = 0.95
"""KV usage above which an out-of-memory error may come from a full pool rather than from outside it."""


class Verdict(StrEnum):
    PASS = "pass"
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"
    FACT = "fact"


class Side(StrEnum):
    """Who has to act on a finding."""

    ENGINE = "engine"
    CLIENT = "client"
    HOST = "host"
    IMAGE = "image"
    HARNESS = "harness"


@dataclass(frozen=True, slots=True)
class Finding:
    """One statement about a run. `source` is where the log says it; None when the log does not."""

    code: EvidenceCode
    phase: Phase | None
    side: Side
    verdict: Verdict
    source: Source | None
    detail: str
    rank: int | None = None

    @property
    def line(self) -> int | None:
        """Physical line of the log, from 1."""
        return self.source.line if self.source else None

    @property
    def remedy(self) -> str:
        return CODES[self.code].remedy


@dataclass(frozen=True, slots=True)
class ClientFacts:
    """What the client saw itself; None where it did not look."""

    open_requests: int | None = None
    seconds_without_token: float | None = None
    own_4xx: int | None = None
    answers_5xx: int | None = None
    unfinished_streams: int | None = None


def triage(
    facts: LogFacts,
    *,
    stop_requested_at: datetime | None,
    exit_status: int | None,
    kernel_log: str | None = None,
    client: ClientFacts | None = None,
    deadline_expired: bool = False,
) -> tuple[Finding, ...]:
    """Judge one boot. Findings come worst first, then by line.

    `stop_requested_at` is the harness's own stop time on the clock of the engine's host, without zone, or None
    when no stop was requested. `exit_status` None: still running, or not known. `deadline_expired`: the start
    took longer than it may. `kernel_log` None: not readable; an empty text: readable and silent.
    """
    case = _Case(facts, stop_requested_at, exit_status, kernel_log, client or ClientFacts(), deadline_expired)
    order = [Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.PASS, Verdict.FACT]
    return tuple(sorted(case.findings(), key=lambda one: (order.index(one.verdict), one.line or math.inf)))


def overall(findings: Iterable[Finding]) -> Verdict:
    """Worst verdict; facts do not count."""
    verdicts = {finding.verdict for finding in findings}
    return next((one for one in (Verdict.FAIL, Verdict.INCONCLUSIVE) if one in verdicts), Verdict.PASS)


def judge_kv_floor(facts: LogFacts, floor_tokens: int) -> Finding | None:
    """A finding when the admitted KV tokens are below a floor or unknown; None when they suffice."""
    admitted = facts.kv_tokens
    if admitted is None:
        return Finding(
            _C.KV_BELOW_FLOOR, Phase.START, Side.ENGINE, Verdict.INCONCLUSIVE, None, "the log does not state KV tokens"
        )
    if admitted.value >= floor_tokens:
        return None
    detail = f"{admitted.value:,} KV tokens, {floor_tokens:,} required"
    return Finding(_C.KV_BELOW_FLOOR, Phase.START, Side.ENGINE, Verdict.FAIL, admitted.source, detail)


@dataclass(frozen=True, slots=True)
class _Case:
    facts: LogFacts
    stop_requested_at: datetime | None
    exit_status: int | None
    kernel_log: str | None
    client: ClientFacts
    deadline_expired: bool

    def findings(self) -> Iterator[Finding]:
        failures = [*self._errors(), *self._kernel(), *self._stall(), *self._client_side()]
        yield from failures
        yield from self._ends(failures)
        yield from self._captures()
        yield from self._ranks()
        yield from self._memory()
        yield from self._harmless()

    # errors

    def _errors(self) -> Iterator[Finding]:
        stopped = [error for error in self.facts.errors if self._phase(error) is Phase.STOPPING]
        if stopped:
            first = stopped[0]
            yield self._of(
                _C.ERROR_AFTER_REQUESTED_STOP,
                Verdict.PASS,
                first,
                f"{_times(stopped)} after the requested stop: {first.message}",
            )
        live = tuple(error for error in self.facts.errors if self._phase(error) is not Phase.STOPPING)
        refused = bool(self.facts.http_class(4))
        # The API server logs a refused request as an exception; the answer tells that it was refused.
        live = tuple(error for error in live if not (refused and error.kind is _K.REQUEST_EXCEPTION))
        survived = [error for error in live if self._survived(error)]
        live = tuple(error for error in live if error not in survived)
        if survived:
            raised = any(error.kind is not _K.OTHER for error in survived)
            verdict = Verdict.INCONCLUSIVE if raised else Verdict.FACT
            yield self._of(_C.ERROR_BEFORE_READY, verdict, survived[0], survived[0].message)
        yield from self._plugins(live)
        yield from self._client_errors(live)
        cause = first_cause(live)
        if cause is not None:
            yield self._hidden(cause, live) or self._cause(cause, live)

    def _survived(self, error: ErrorRecord) -> bool:
        """Whether the server became ready in spite of an error of unknown meaning, such as a plugin's."""
        starting = self._phase(error) is Phase.START and self.facts.ready is Readiness.YES
        return starting and error.kind in (_K.OTHER, _K.EXCEPTION, _K.IMPORT)

    def _phase(self, error: ErrorRecord) -> Phase:
        stop = self.stop_requested_at
        if error.phase is Phase.STOPPING or stop is None or error.time is None:
            return error.phase
        return Phase.STOPPING if _on_clock(error.time, stop) >= stop.replace(microsecond=0) else error.phase

    def _hidden(self, cause: ErrorRecord, live: tuple[ErrorRecord, ...]) -> Finding | None:
        """An operator that allocated inside itself and failed: the allocator warns first, but does not say for whom."""
        hidden = (error for error in live if error.kind is _K.HIDDEN_ALLOCATION and _OPERATOR in error.message)
        failed = next(hidden, None)
        if failed is None or cause.kind not in (_K.ALLOCATOR_WARNING, _K.HIDDEN_ALLOCATION):
            return None
        if self._phase(failed) is Phase.START and self._capturing():
            return None
        detail = failed.message if cause.kind is failed.kind else f"{cause.message} Then: {failed.message}"
        return self._of(_C.RUNTIME_ALLOC_FAILURE, Verdict.FAIL, failed, detail)

    def _capturing(self) -> bool:
        return any(not fact.value.complete for fact in self.facts.captures)

    def _cause(self, cause: ErrorRecord, live: tuple[ErrorRecord, ...]) -> Finding:
        code, side = self._code(cause, live)
        detail = cause.message
        if cause.wanted or cause.free:
            detail += f" (wanted {cause.wanted or 'unknown'}, free {cause.free or 'unknown'})"
        refusal = self.facts.kv_refusal
        if code is _C.KV_ADMISSION_REFUSED and refusal is not None:
            detail = (
                f"one request of {refusal.value.max_model_len} tokens needs {refusal.value.needed_gib} GiB, "
                f"{refusal.value.available_gib} GiB are available; estimated maximum {refusal.value.estimated_max_len}"
            )
        return self._of(code, Verdict.FAIL, cause, detail, side)

    def _code(self, cause: ErrorRecord, live: tuple[ErrorRecord, ...]) -> tuple[EvidenceCode, Side]:
        kinds = {error.kind for error in live}
        phase = self._phase(cause)
        started = self.facts.version is not None or self.facts.world_size is not None
        direct = _BY_KIND.get(cause.kind)
        if cause.kind in (_K.OUT_OF_MEMORY, _K.HIDDEN_ALLOCATION, _K.ALLOCATOR_WARNING) and phase is Phase.START:
            return (_C.CAPTURE_OOM if self._capturing() else _C.OUT_OF_MEMORY), Side.ENGINE
        if cause.kind is _K.OUT_OF_MEMORY and _K.ALLOCATOR_WARNING not in kinds:
            return self._oom_code(cause), Side.ENGINE
        if cause.kind is _K.OUT_OF_MEMORY:
            return _C.OOM_WARNING_LEVEL, Side.ENGINE
        if direct is not None:
            return direct
        if cause.kind is _K.IMPORT and not started:
            return _C.IMAGE_DEPENDENCY_MISMATCH, Side.IMAGE
        if cause.kind is _K.USAGE and phase is Phase.START:
            return _C.USAGE_ERROR, Side.HARNESS
        if phase is Phase.START:
            return _C.ENGINE_START_FAILED, Side.ENGINE
        alive = bool(self.facts.answered_after_fatal)
        return (_C.ENGINE_DEAD_HTTP_ALIVE if alive else _C.ENGINE_FAILED_SERVING), Side.ENGINE

    def _oom_code(self, cause: ErrorRecord) -> EvidenceCode:
        lines = self.facts.throughput.last if self.facts.throughput else ()
        before = [fact.value.kv_usage for fact in lines if fact.source.line < cause.source.line]
        usage = before[-1] if before else None
        return _C.OOM_OUTSIDE_KV_POOL if usage is not None and usage < POOL_FULL else _C.OUT_OF_MEMORY

    def _plugins(self, live: tuple[ErrorRecord, ...]) -> Iterator[Finding]:
        for error in live:
            if error.kind is _K.PLUGIN:
                yield self._of(_C.PLUGIN_FAILED, Verdict.INCONCLUSIVE, error, error.message, Side.IMAGE)

    def _client_errors(self, live: tuple[ErrorRecord, ...]) -> Iterator[Finding]:
        refused = self.facts.http_class(4) or 0
        count = self.facts.counts.client_errors
        if not (refused or count) or any(error.kind not in NOT_A_CAUSE for error in live):
            return
        first = next((error for error in live if error.kind in (_K.CONTEXT_LENGTH, _K.CLIENT_REQUEST)), None)
        detail = f"{refused} answers with 4xx, {count} client errors logged"
        yield Finding(
            _C.CLIENT_ERROR_ONLY, Phase.SERVE, Side.CLIENT, Verdict.PASS, first.source if first else None, detail
        )

    # outside the log

    def _kernel(self) -> Iterator[Finding]:
        xids = [error for error in self.facts.errors if error.kind is _K.XID]
        texts: list[tuple[Source | None, str]] = [(error.source, error.message) for error in xids]
        texts += [(None, line) for line in _lines(self.kernel_log, "NVRM: Xid")]
        for source, text in texts[:1]:
            served = self.facts.ready is Readiness.YES and bool(self.facts.captures)
            code = _C.XID_DURING_REPLAY if served else _C.GPU_XID
            yield Finding(code, Phase.SERVE if served else Phase.START, Side.HOST, Verdict.FAIL, source, text)
        for text in _lines(self.kernel_log, *_OOM_KILLER)[:1]:
            yield Finding(_C.HOST_OOM_KILLED, None, Side.HOST, Verdict.FAIL, None, text)

    def _stall(self) -> Iterator[Finding]:
        lines, client = self.facts.throughput, self.client
        silent = (client.seconds_without_token or 0) >= SILENT_SECONDS and bool(client.open_requests)
        if silent:
            detail = f"{client.open_requests} open requests, no token for {client.seconds_without_token:.0f} s"
            source = lines.stall_start if lines else None
            yield Finding(_C.STALL_ZERO_THROUGHPUT, Phase.SERVE, Side.ENGINE, Verdict.FAIL, source, detail)
        elif lines is not None and lines.longest_stall >= STALL_LINES:
            hung = lines.open_stall >= STALL_LINES
            failed = any(error.kind in _STALL_KINDS for error in self.facts.errors)
            detail = f"{lines.longest_stall} statistics lines in a row with running requests and no token"
            verdict = Verdict.FAIL if hung or failed else Verdict.INCONCLUSIVE
            yield Finding(_C.STALL_ZERO_THROUGHPUT, Phase.SERVE, Side.ENGINE, verdict, lines.stall_start, detail)
        elif self._ends_busy():
            beats = self.facts.heartbeats
            detail = "the log ends in reports of a busy worker with nothing between them"
            source = beats.last if beats else None
            yield Finding(_C.STALL_ZERO_THROUGHPUT, Phase.SERVE, Side.ENGINE, Verdict.INCONCLUSIVE, source, detail)

    def _ends_busy(self) -> bool:
        """Whether a server that was ready ends with reports of a busy worker and no progress."""
        beats = self.facts.heartbeats
        return self.facts.ready is Readiness.YES and beats is not None and beats.trailing >= STALL_LINES

    def _client_side(self) -> Iterator[Finding]:
        client = self.client
        late = sum(count for status, count in self.facts.http_after_stop.items() if status // 100 == 5)
        logged = (self.facts.http_class(5) or 0) - late
        answers = client.answers_5xx if client.answers_5xx is not None else logged
        for count, code, side, text in (
            (answers, _C.SERVER_ERRORS, Side.ENGINE, "answers with 5xx"),
            (client.unfinished_streams, _C.STREAM_UNFINISHED, Side.ENGINE, "streams without a finish reason"),
            (client.own_4xx, _C.OWN_REQUEST_REFUSED, Side.HARNESS, "of the harness's own requests refused with 4xx"),
        ):
            if count:
                yield Finding(code, Phase.SERVE, side, Verdict.FAIL, None, f"{count} {text}")

    def _ends(self, failures: list[Finding]) -> Iterator[Finding]:
        """What the end of the log and of the process says, as far as nothing has said it before."""
        facts = self.facts
        failed = any(finding.verdict is Verdict.FAIL for finding in failures)
        stopped = facts.shutdown_requested is not None or self.stop_requested_at is not None
        for boot in facts.earlier_boots:
            bad = boot.error is not None or (boot.ready is Readiness.YES and not boot.stopped)
            verdict = Verdict.FAIL if bad else Verdict.INCONCLUSIVE
            cause = f": {boot.error.message}" if boot.error else ""
            yield Finding(
                _C.ENGINE_RESTARTED,
                None,
                Side.ENGINE,
                verdict,
                boot.start,
                f"an earlier start, ready: {boot.ready}{cause}",
            )
        if failed:
            return
        if facts.core_exited is not None and not stopped:
            yield self._end(_C.ENGINE_FAILED_SERVING, Verdict.FAIL, facts.core_exited.source, facts.core_exited.value)
        elif self.exit_status is not None and not stopped and facts.ready is not Readiness.NOT_APPLICABLE:
            yield self._end(_C.PROCESS_DIED_SILENTLY, Verdict.FAIL, facts.end.last_line, _exit_text(self.exit_status))
        elif facts.ready is Readiness.NO and self.deadline_expired:
            yield from self._deadline()
        elif facts.ready is Readiness.NO:
            yield from self._jit()
            yield self._end(_C.NOT_READY_AT_END, Verdict.INCONCLUSIVE, facts.end.last_line, self._last_words())
        elif facts.ready is Readiness.UNKNOWN:
            count = facts.http_class(2)
            detail = f"{count} successful answers, no ready line"
            yield self._end(_C.READY_LINE_MISSING, Verdict.INCONCLUSIVE, None, detail)

    def _deadline(self) -> Iterator[Finding]:
        busy = self.facts.jit is not None and self.facts.jit.in_progress
        heard = busy or self.facts.end.open_bar is not None
        code = _C.START_TIMEOUT if heard else _C.START_TIMEOUT_SILENT
        yield self._end(code, Verdict.FAIL, self.facts.end.last_line, self._last_words())
        yield from self._jit()

    def _jit(self) -> Iterator[Finding]:
        jit = self.facts.jit
        if jit is not None and jit.in_progress:
            detail = f"{jit.begun} kernel compiles begun, {jit.completed} completed"
            yield self._end(_C.JIT_IN_PROGRESS, Verdict.FACT, jit.last, detail)

    def _last_words(self) -> str:
        if self.facts.empty:
            return "no line of a vLLM engine"
        bar = self.facts.end.open_bar
        if bar is not None:
            return f"last progress: {bar.value.label} {bar.value.done}/{bar.value.total}"
        return f"last line: {self.facts.end.last_message or 'none'}"

    def _end(self, code: EvidenceCode, verdict: Verdict, source: Source | None, detail: str) -> Finding:
        phase = Phase.SERVE if self.facts.ready in (Readiness.YES, Readiness.UNKNOWN) else Phase.START
        return Finding(code, phase, Side.ENGINE, verdict, source, detail)

    # capture

    def _captures(self) -> Iterator[Finding]:
        facts = self.facts
        for finished in facts.capture_finished:
            if not finished.value.memory_known:
                detail = f"capture took {finished.value.gib} GiB: graph memory is unknown"
                yield self._capture(_C.GRAPH_MEMORY_NEGATIVE, Verdict.PASS, finished, detail)
        if _graphs_off(facts):
            yield Finding(
                _C.CAPTURE_NOT_APPLICABLE, Phase.START, Side.ENGINE, Verdict.FACT, None, "graphs are switched off"
            )
        elif facts.captures:
            yield from self._bars()
        elif facts.version is not None or facts.kv_tokens is not None or facts.capture_finished:
            yield from self._no_bars()

    def _no_bars(self) -> Iterator[Finding]:
        facts = self.facts
        reached = facts.kv_tokens or facts.init_seconds or (facts.capture_finished or (None,))[0]
        if reached is None and facts.ready is Readiness.NO:
            return  # the start ended before capture could begin
        if facts.kv_refusal is not None:
            return
        if facts.configured_counts:
            counts = facts.configured_counts[0]
            detail = f"configured, not captured: PIECEWISE {counts.value.piecewise}, FULL {counts.value.full}"
            yield self._capture(_C.CAPTURE_CONFIGURED_ONLY, Verdict.INCONCLUSIVE, counts, detail)
        else:
            yield Finding(
                _C.CAPTURE_BARS_ABSENT,
                Phase.START,
                Side.ENGINE,
                Verdict.INCONCLUSIVE,
                None,
                "no capture bar: counts are unknown",
            )

    def _bars(self) -> Iterator[Finding]:
        facts = self.facts
        last = tuple(facts.final_captures().values())
        first = min(last, key=lambda fact: fact.source.line)
        counts = _counts(last)
        open_ones = [fact for fact in last if not fact.value.complete]
        if open_ones:
            code = _C.CAPTURE_INCOMPLETE_EOF
            yield self._capture(code, Verdict.INCONCLUSIVE, open_ones[0], f"the log ends at {_counts(open_ones)}")
        elif all(fact.capture_pass is CapturePass.PROFILING for fact in last):
            detail = f"only the profiling pass ended ({counts})"
            yield self._capture(_C.CAPTURE_PROFILING_ONLY, Verdict.INCONCLUSIVE, first, detail)
        elif any(fact.capture_pass is None for fact in last) or _piecewise_differs(facts):
            detail = f"which pass the bars show is not known ({counts})"
            yield self._capture(_C.CAPTURE_PASS_UNKNOWN, Verdict.INCONCLUSIVE, first, detail)
        else:
            yield self._capture(_C.CAPTURE_FINAL_PASS, Verdict.PASS, first, counts)
            yield from self._established(last)
        yield from self._runner(first)

    def _established(self, last: tuple[Fact[Capture], ...]) -> Iterator[Finding]:
        """What is easily misread about a capture that is complete."""
        facts = self.facts
        behind = [fact for fact in last if fact.value.after_finished]
        if behind:
            yield self._capture(
                _C.STDERR_REORDERED, Verdict.PASS, behind[0], "bars stand behind the records that close them"
            )
        totals = {fact.value.kind: fact.value.total for fact in last if fact.value.role == "target"}
        if len(set(totals.values())) > 1:
            yield self._capture(_C.CAPTURE_SETS_DIFFER_BY_KIND, Verdict.PASS, last[0], _counts(last))
        world = facts.world_size.value if facts.world_size else None
        if _runner(facts) is Runner.V1 and world is not None and world > 1 and facts.finished_ranks() <= {0, None}:
            detail = f"ranks 1 to {world - 1} are unknown from the log"
            yield self._capture(_C.V1_RANK0_ONLY, Verdict.PASS, last[0], detail)
        yield from self._rounded(last)

    def _rounded(self, last: tuple[Fact[Capture], ...]) -> Iterator[Finding]:
        facts = self.facts
        sizes, tokens = facts.configured_sizes, facts.spec_tokens
        piecewise = next((fact for fact in last if fact.value.kind == "PIECEWISE"), None)
        if sizes is None or piecewise is None or tokens is None or _runner(facts) is not Runner.V1:
            return
        mode = facts.configured_mode.value if facts.configured_mode else ""
        oracle = expected_sets(
            runner=Runner.V1,
            mode=mode,
            sizes=sizes.value,
            max_num_seqs=max(sizes.value, default=1),
            spec_tokens=tokens.value,
        )
        configured, captured = len(sizes.value), piecewise.value.total
        if not isinstance(oracle, Unknown) and captured == len(oracle.piecewise) != configured:
            detail = f"{configured} sizes configured, {captured} captured: multiples of {tokens.value + 1}"
            yield self._capture(_C.SIZES_ROUNDED_FOR_SPEC, Verdict.PASS, piecewise, detail)

    def _runner(self, first: Fact[Capture]) -> Iterator[Finding]:
        facts = self.facts
        named, labelled = facts.runner, facts.runner_from_labels
        if named is not None and labelled is not None and named.value is not labelled:
            detail = f"the log names runner {named.value}, the bars belong to {labelled}"
            yield self._capture(_C.RUNNER_CONFLICT, Verdict.INCONCLUSIVE, first, detail)
        elif labelled is Runner.V1 and _release(facts) >= _FIRST_V2:
            yield self._capture(_C.LABEL_FOLLOWS_RUNNER, Verdict.PASS, first, f"V1 labels in version {_version(facts)}")

    def _capture(self, code: EvidenceCode, verdict: Verdict, fact: Fact[_AnyFact], detail: str) -> Finding:
        return Finding(code, Phase.START, Side.ENGINE, verdict, fact.source, detail, fact.rank)

    # ranks and memory

    def _ranks(self) -> Iterator[Finding]:
        facts = self.facts
        if facts.world_size is not None and facts.announced_ranks:
            missing = sorted(set(range(facts.world_size.value)) - facts.announced_ranks)
            if missing:
                yield Finding(
                    _C.RANK_MISSING, Phase.START, Side.ENGINE, Verdict.INCONCLUSIVE, facts.world_size.source,
                    f"no world_size line of rank {_some(missing)} of {facts.world_size.value}",
                )  # fmt: skip
        yield from self._unequal_capture()
        yield from _unequal("graph memory estimate", facts.graph_estimate)
        yield from _unequal("graph pool memory", facts.pool)
        yield from _unequal("available KV memory", facts.available_kv)
        yield from _unequal("model memory", facts.model_memory)

    def _unequal_capture(self) -> Iterator[Finding]:
        """On V2 every rank says that its capture ended; one that does not is behind, or died."""
        facts = self.facts
        if _runner(facts) is not Runner.V2 or facts.world_size is None or not facts.finished_ranks():
            return
        missing = sorted(
            set(range(facts.world_size.value)) - {rank for rank in facts.finished_ranks() if rank is not None}
        )
        if missing and len(facts.ranks) >= facts.world_size.value:
            detail = f"capture ended on some ranks, not on rank {_some(missing)}"
            yield Finding(_C.RANKS_DISAGREE, Phase.START, Side.ENGINE, Verdict.INCONCLUSIVE, None, detail)

    def _memory(self) -> Iterator[Finding]:
        facts = self.facts
        over = [fact for fact in facts.pool if fact.value.actual_gib > fact.value.estimated_gib]
        estimates = [fact.value for fact in facts.graph_estimate]
        taken = [
            fact
            for fact in facts.capture_finished
            if fact.value.memory_known and fact.capture_pass is CapturePass.FINAL
        ]
        if over:
            value = over[0].value
            detail = f"{value.actual_gib} GiB taken, {value.estimated_gib} GiB estimated"
            yield self._capture(_C.GRAPH_MEMORY_ABOVE_ESTIMATE, Verdict.PASS, over[0], detail)
        elif not facts.pool and estimates and taken and taken[-1].value.gib > max(estimates):
            detail = f"{taken[-1].value.gib} GiB taken, {max(estimates)} GiB estimated"
            yield self._capture(_C.GRAPH_MEMORY_ABOVE_ESTIMATE, Verdict.PASS, taken[-1], detail)
        for blocks in facts.profiling_blocks[:1]:
            detail = f"{blocks.value} blocks belong to memory profiling"
            yield self._capture(_C.PROFILING_OVERRIDE, Verdict.FACT, blocks, detail)
        for summary in facts.memory_summary[:1]:
            detail = "figures behind --kv-cache-memory and --gpu-memory-utilization are suggestions"
            yield self._capture(_C.ADVICE_NUMBERS_IGNORED, Verdict.FACT, summary, detail)
        for reservation in facts.kv_reservation[:1]:
            detail = f"{reservation.value.gib} GiB set for KV, not profiled"
            yield self._capture(_C.KV_NOT_PROFILED, Verdict.FACT, reservation, detail)

    # harmless

    def _harmless(self) -> Iterator[Finding]:
        facts = self.facts
        beats = facts.heartbeats
        if beats is not None and beats.trailing == 0:
            detail = f"{beats.count} reports of a busy worker, work went on"
            yield Finding(_C.HEARTBEAT_BENIGN, Phase.START, Side.ENGINE, Verdict.PASS, beats.first, detail)
        warned = [one for one in facts.tracebacks if one.level == "WARNING"]
        if warned:
            detail = warned[0].exception or "unfinished traceback"
            yield Finding(_C.WARNING_TRACEBACK, warned[0].phase, Side.ENGINE, Verdict.PASS, warned[0].source, detail)
        if facts.bare_bars:
            detail = "progress bars lack the prefix of the records: " + ", ".join(sorted(facts.envelopes))
            yield Finding(_C.ENVELOPE_PARTIAL, None, Side.HOST, Verdict.PASS, None, detail)

    def _of(
        self, code: EvidenceCode, verdict: Verdict, error: ErrorRecord, detail: str, side: Side = Side.ENGINE
    ) -> Finding:
        return Finding(code, self._phase(error), side, verdict, error.source, detail, error.rank)


_AnyFact = TypeVar("_AnyFact")
_BY_KIND: dict[ErrorKind, tuple[EvidenceCode, Side]] = {
    _K.KV_REFUSED: (_C.KV_ADMISSION_REFUSED, Side.ENGINE),
    _K.KV_NO_MEMORY: (_C.KV_NO_MEMORY, Side.ENGINE),
    _K.HIDDEN_ALLOCATION: (_C.RUNTIME_ALLOC_FAILURE, Side.ENGINE),
    _K.ALLOCATOR_WARNING: (_C.OOM_WARNING_LEVEL, Side.ENGINE),
    _K.SHARED_MEMORY: (_C.SHM_EXHAUSTED, Side.HOST),
    _K.CAPTURE: (_C.CAPTURE_ERROR_RANK, Side.ENGINE),
    _K.OOM_KILLER: (_C.HOST_OOM_KILLED, Side.HOST),
    _K.KV_LOAD: (_C.RESTORE_PARTIAL, Side.ENGINE),
}
_OPERATOR = "torch_call_dispatcher("
"""How an operator of the stable ABI says that a call of its own failed; a library's failed allocation is not one."""
_STALL_KINDS = frozenset({_K.COLLECTIVE_WATCHDOG, _K.RPC_TIMEOUT, _K.EXECUTOR_FAILED})
_OOM_KILLER = ("Out of memory: Killed process", "invoked oom-killer", "oom-kill:", "Memory cgroup out of memory")
_FIRST_V2 = (0, 25)
"""First release in which the V2 runner was seen."""
_SIGNALS = {-6: "SIGABRT", -9: "SIGKILL", -11: "SIGSEGV", -15: "SIGTERM", -7: "SIGBUS"}


def _lines(text: str | None, *marks: str) -> list[str]:
    return [line.strip() for line in (text or "").splitlines() if any(mark in line for mark in marks)]


def _some(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"{shown} and {len(ranks) - 8} more" if len(ranks) > 8 else shown


def _times(errors: list[ErrorRecord]) -> str:
    count = sum(error.count for error in errors)
    return f"{count} record{'' if count == 1 else 's'}"


def _on_clock(time: str, near: datetime) -> datetime:
    """A log time without year as the moment nearest to `near`; `near` itself when it is no date."""
    candidates = []
    for year in (near.year - 1, near.year, near.year + 1):
        try:
            candidates.append(datetime.strptime(f"{year}-{time}", "%Y-%m-%d %H:%M:%S"))
        except ValueError:
            continue
    return min(candidates, key=lambda moment: abs(moment - near), default=near - timedelta(days=1))


def _exit_text(status: int) -> str:
    number = 128 - status if status > 128 else status
    name = _SIGNALS.get(number)
    return f"exit status {status}{f' ({name})' if name else ''} without a requested stop and without an error line"


def _graphs_off(facts: LogFacts) -> bool:
    eager = facts.eager is not None and facts.eager.value
    mode = facts.configured_mode.value if facts.configured_mode else None
    return eager or mode == "NONE"


def _runner(facts: LogFacts) -> Runner | None:
    return facts.runner.value if facts.runner else facts.runner_from_labels


def _version(facts: LogFacts) -> str:
    return facts.version.value if facts.version else "unknown"


def _release(facts: LogFacts) -> tuple[int, int]:
    numbers = re.match(r"(\d+)\.(\d+)", _version(facts))
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)


def _counts(captures: Iterable[Fact[Capture]]) -> str:
    parts = []
    for fact in captures:
        value = fact.value
        role = "" if value.role == "target" else f"{value.role} "
        parts.append(f"{role}{value.kind or 'unlabelled'} {value.captured} of {value.total}")
    return ", ".join(parts)


def _piecewise_differs(facts: LogFacts) -> bool:
    """PIECEWISE is captured whole in both passes; different totals mean that they are not two passes."""
    totals: dict[str, set[int]] = {}
    for fact in facts.captures:
        if fact.value.kind == "PIECEWISE" and fact.value.role == "target":
            totals.setdefault(fact.value.label, set()).add(fact.value.total)
    return any(len(found) > 1 for found in totals.values())


def _unequal(name: str, values: tuple[Fact[_AnyFact], ...]) -> Iterator[Finding]:
    by_rank = {fact.rank: fact for fact in values if fact.rank is not None}
    if len({repr(fact.value) for fact in by_rank.values()}) > 1:
        text = ", ".join(f"rank {rank}: {_short(by_rank[rank].value)}" for rank in sorted(by_rank))
        source = next(iter(by_rank.values())).source
        yield Finding(_C.RANKS_DISAGREE, Phase.START, Side.ENGINE, Verdict.FACT, source, f"{name}: {text}")


def _short(value: object) -> str:
    actual = getattr(value, "actual_gib", None)
    return f"{actual} GiB" if actual is not None else f"{value} GiB"
