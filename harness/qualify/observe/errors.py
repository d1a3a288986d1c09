# SPDX-License-Identifier: Apache-2.0
"""Meaning of error texts, and tracebacks told apart by process.

Texts are matched by meaning, because an out-of-memory error need not contain these words.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from qualify.observe.facts import Counts, ErrorKind, ErrorRecord, Phase, Source, Traceback
from qualify.observe.layers import Record
from qualify.observe.needles import Needles, any_of

MAX_RECORDS = 128
MAX_TRACEBACKS_PER_PROCESS = 3
MAX_TRACEBACKS = 64
MAX_OPEN = 64
MAX_MESSAGE = 600

_K = ErrorKind
_PATTERNS: tuple[tuple[ErrorKind, tuple[str, ...], str], ...] = (
    # Kind, substrings of which every such text has one, and the pattern. The specific comes before the general:
    # an admission refusal is a ValueError, a capture error is a CUDA error.
    (_K.XID, ("NVRM",), r"NVRM: Xid"),
    (
        _K.OOM_KILLER,
        ("Killed process", "oom-kill", "cgroup out"),
        r"Out of memory: Killed process|invoked oom-killer|oom-kill:|Memory cgroup out of memory",
    ),
    (
        _K.KV_REFUSED,
        ("max seq len",),
        r"To serve at least one request with the model's max seq len|model's max seq len \(\d+\) is larger",
    ),
    (_K.KV_NO_MEMORY, ("No available memory",), r"No available memory for the cache blocks"),
    (
        _K.KV_LOAD,
        ("less than the expected", "KV load", "load KV"),
        r"less than the expected number of tokens|KV load fail|[Ff]ailed to load KV",
    ),
    (
        _K.TEARDOWN,
        ("force killing", "destroy_process_group", "leaked semaphore", "leaked shared_memory", "nanobind: leaked"),
        r"force killing remaining process|force killing sub process|destroy_process_group\(\) was not called"
        r"|leaked semaphore|leaked shared_memory|^nanobind: leaked",
    ),
    (_K.CORE_EXITED, ("exited unexpectedly",), r"engine core exited unexpectedly"),
    (_K.CORE_INIT, ("initialization failed",), r"Engine core initialization failed"),
    (_K.CORE_START, ("failed to start",), r"EngineCore failed to start"),
    (_K.WORKER_START, ("failed to start",), r"WorkerProc failed to start"),
    (_K.WORKER_EXCEPTION, ("hit an exception",), r"WorkerProc hit an exception"),
    (_K.WORKER_DIED, ("died unexpectedly",), r"Worker proc .{0,80}died unexpectedly"),
    (_K.CORE_FATAL, ("fatal error",), r"EngineCore encountered a fatal error"),
    (_K.OUTPUT_HANDLER, ("output_handler failed",), r"AsyncLLM output_handler failed"),
    (_K.ENGINE_DEAD, ("EngineDeadError",), r"EngineDeadError"),
    (_K.RPC_TIMEOUT, ("RPC call to",), r"RPC call to .{0,80}timed out"),
    (
        _K.HIDDEN_ALLOCATION,
        ("torch_call_dispatcher(", "ALLOC_FAILED"),
        r"torch_call_dispatcher\(|CUBLAS_STATUS_ALLOC_FAILED",
    ),
    (_K.ALLOCATOR_WARNING, ("failed with OOM",), r"memory allocation failed with OOM"),
    (
        _K.SHARED_MEMORY,
        ("shared memory", "/dev/shm"),
        r"Error while creating shared memory segment|No space left on device.{0,200}/dev/shm"
        r"|/dev/shm.{0,200}No space left|unable to (?:open|mmap|resize).{0,60}shared memory"
        r"|unable to allocate shared memory",
    ),
    (
        _K.OUT_OF_MEMORY,
        ("out of memory", "OutOfMemoryError", "cudaErrorMemoryAllocation"),
        r"CUDA out of memory|HIP out of memory|OutOfMemoryError|CUDA error: out of memory"
        r"|cudaErrorMemoryAllocation|RuntimeError: .{0,80}out of memory",
    ),
    (
        _K.COLLECTIVE_WATCHDOG,
        ("atchdog", "DistBackendError"),
        r"[Ww]atchdog caught collective operation timeout|NCCL watchdog|DistBackendError.{0,200}timeout",
    ),
    (
        _K.CAPTURE,
        ("captur", "StreamCapture"),
        r"cudaErrorStreamCapture|when stream is capturing|while (?:stream )?captur(?:e|ing)"
        r"|during (?:stream |graph |CUDA graph )?capture|capture (?:was )?invalidated",
    ),
    (
        _K.ILLEGAL_ACCESS,
        ("illegal ", "misaligned address", "device-side assert", "launch failure"),
        r"illegal (?:memory access|address|instruction)|misaligned address|device-side assert"
        r"|unspecified launch failure",
    ),
    (
        _K.NCCL,
        ("NCCL error", "ncclSystem", "ncclInternal", "ncclUnhandled", "ncclRemote"),
        r"NCCL error|ncclSystemError|ncclInternalError|ncclUnhandledCudaError|ncclRemoteError",
    ),
    (
        _K.CUDA,
        ("CUDA error", "CUDA driver", "cudaError", "CUBLAS_", "CUDNN_"),
        r"CUDA error|CUDA driver error|cudaError[A-Z]|CUBLAS_STATUS_|CUDNN_STATUS_",
    ),
    (
        _K.CONTEXT_LENGTH,
        ("maximum context length", "maximum model length"),
        r"maximum context length is|longer than the maximum model length",
    ),
    (
        _K.CLIENT_REQUEST,
        ("Invalid HTTP", "ValidationError", "BadRequestError", "preprocessing"),
        r"Invalid HTTP request received|RequestValidationError|VLLMValidationError|BadRequestError"
        r"|Error in preprocessing prompt inputs",
    ),
    (_K.REQUEST_EXCEPTION, ("Exception caught",), r"Exception caught\. Request id"),
    (_K.PLUGIN, ("load plugin",), r"Failed to load plugin"),
    (
        _K.IMPORT,
        ("ModuleNotFoundError", "ImportError", "shared object", "undefined symbol"),
        r"^(?:\w+\.)*(?:ModuleNotFoundError|ImportError)\b|cannot open shared object file|undefined symbol:",
    ),
    (
        _K.USAGE,
        ("argument", "validation error", "ValidationError"),
        r"error: (?:unrecognized arguments|argument |the following arguments)|\bvalidation errors? for \w+Config"
        r"|^(?:\w+\.)*ValidationError\b",
    ),
    (_K.EXECUTOR_FAILED, ("Executor failed",), r"Executor failed"),
)
_MATCHERS = tuple(
    (needle.encode(), (kind, re.compile(text.encode()))) for kind, needles, text in _PATTERNS for needle in needles
)
ANY_ERROR = Needles(_MATCHERS)

WARNING_KINDS = frozenset(
    {_K.XID, _K.OOM_KILLER, _K.ALLOCATOR_WARNING, _K.CORE_EXITED, _K.TEARDOWN, _K.COLLECTIVE_WATCHDOG}
)
"""Kinds that count below ERROR level too: the allocator warns before anything raises."""
ANY_WARNING = Needles([one for one in _MATCHERS if one[1][0] in WARNING_KINDS])
FATAL_KINDS = frozenset({
    _K.CORE_FATAL, _K.OUTPUT_HANDLER, _K.ENGINE_DEAD, _K.CORE_EXITED, _K.EXECUTOR_FAILED, _K.WORKER_DIED,
    _K.WORKER_EXCEPTION, _K.ILLEGAL_ACCESS, _K.COLLECTIVE_WATCHDOG,
})  # fmt: skip
"""Kinds after which an engine that served does not serve any more."""
CLIENT_KINDS = frozenset({_K.CONTEXT_LENGTH, _K.CLIENT_REQUEST})
_QUIET_LEVELS = frozenset({"INFO", "DEBUG"})
ERROR_LEVELS = frozenset({"ERROR", "CRITICAL", "FATAL"})

TRACEBACK = b"Traceback (most recent call last)"
_CHAIN = (b"During handling of the above exception", b"The above exception was the direct cause")
_EXCEPTION = re.compile(rb"(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:: |:?$)")
_FRAME = (b" ", b"\t", b"|", b"+", b"^", b"~")
_WANTED = re.compile(rb"[Tt]ried to allocate ([\d.]+ [KMGT]i?B)|[Rr]equested:? ([\d.]+ [KMGT]i?B)")
_FREE = re.compile(rb"of which ([\d.]+ [KMGT]i?B) is free|[Ff]ree:? ([\d.]+ [KMGT]i?B)|([\d.]+ [KMGT]i?B) (?:is )?free")

_WARNS = any_of((*ANY_WARNING.all, TRACEBACK))

Writer = tuple[str | None, int | None, int | None]


def classify(message: bytes, below_error: bool = False) -> ErrorKind | None:
    """Kind of an error text, or None; `below_error` asks only for the kinds that count at any level."""
    candidates = (ANY_WARNING if below_error else ANY_ERROR).found(message)
    return next((kind for kind, pattern in candidates if pattern.search(message)), None)


@dataclass(slots=True)
class _Open:
    """A traceback that is being read. `exception` is set at the end of its first, innermost part."""

    level: str | None
    phase: Phase
    source: Source
    writer: Writer
    exception: str | None = None
    in_frames: bool = True
    client: bool = False


@dataclass(slots=True)
class ErrorBook:
    """Errors and tracebacks of one boot, bounded: the first of each kind per process, and totals."""

    records: dict[tuple[ErrorKind, int | None, Phase], ErrorRecord] = field(default_factory=dict)
    tracebacks: list[Traceback] = field(default_factory=list)
    fatal_serving: bool = False
    errors: int = 0
    warnings: int = 0
    error_tracebacks: int = 0
    warning_tracebacks: int = 0
    client_errors: int = 0
    open: dict[int | None, _Open] = field(default_factory=dict)

    def see(self, record: Record, label: str, phase: Phase) -> bool:
        """Take one record of the file `label`; True when it belongs to an error or a traceback."""
        if record.headed and record.level in _QUIET_LEVELS and b"exited unexpectedly" not in record.message:
            # Far the most frequent case: such a record can only end a traceback of its process.
            if self.open:
                self._close(record.pid)
            return False
        if record.level in ERROR_LEVELS:
            self.errors += 1
        elif record.level == "WARNING":
            self.warnings += 1
        if self._in_traceback(record, label, phase):
            return True
        erring = record.level in ERROR_LEVELS
        kind = classify(record.message, below_error=record.level is not None and not erring)
        if kind is None:
            if not erring:
                return False
            kind = ErrorKind.OTHER
        self._keep(kind, record, label, phase)
        # "Error in preprocessing" announces a traceback, which is counted when it ends.
        self.client_errors += kind in CLIENT_KINDS and b"preprocessing" not in record.message
        return True

    def pass_over(self, level: bytes, line: bytes) -> bool:
        """Count a record, outside tracebacks and without "exited unexpectedly", if it is no error; else say False."""
        warning = level == b"WARNING" and not _WARNS.search(line)
        self.warnings += warning
        return warning or level in (b"INFO", b"DEBUG")

    def finish(self) -> Counts:
        """Close the tracebacks that the end of the file cut, and give the totals."""
        for pid in list(self.open):
            self._close(pid)
        both = self.error_tracebacks + self.warning_tracebacks
        return Counts(
            self.errors, self.warnings, both, self.error_tracebacks, self.warning_tracebacks, self.client_errors
        )

    def _in_traceback(self, record: Record, label: str, phase: Phase) -> bool:
        current = self.open.get(record.pid)
        message = record.message
        if TRACEBACK in message[:200] or (current is None and TRACEBACK in message):
            if current is not None and current.in_frames:
                return True
            if current is None or not self._chained(current):
                self._begin(record, label, phase)
            else:
                current.in_frames = True
            return True
        if current is None:
            return False
        text = message.rstrip()
        if not text or text.startswith(_CHAIN):
            return True
        if message.startswith(_FRAME):
            return current.in_frames
        if current.in_frames and _EXCEPTION.match(text):
            self._exception(current, record, label)
            return True
        if not current.in_frames:
            self._close(record.pid)
            return False
        # Text of another writer between the frames of a process without prefix.
        return record.pid is not None

    def _chained(self, current: _Open) -> bool:
        return current.exception is not None and not current.in_frames

    def _begin(self, record: Record, label: str, phase: Phase) -> None:
        self._close(record.pid)
        if len(self.open) >= MAX_OPEN:
            self._close(next(iter(self.open)))
        writer = (record.process, record.pid, record.rank)
        self.open[record.pid] = _Open(record.level, phase, _source(label, record), writer)

    def _exception(self, current: _Open, record: Record, label: str) -> None:
        current.in_frames = False
        if current.exception is not None:
            return
        current.exception = _clip(record.message)
        kind = classify(record.message) or ErrorKind.EXCEPTION
        current.client = kind in CLIENT_KINDS
        if record.level != "WARNING":
            self._keep(kind, record, label, current.phase)

    def _close(self, pid: int | None) -> None:
        current = self.open.pop(pid, None)
        if current is None:
            return
        warned = current.level == "WARNING"
        self.warning_tracebacks += warned
        self.error_tracebacks += not warned
        self.client_errors += current.client
        mine = sum(1 for one in self.tracebacks if one.pid == pid)
        if mine < MAX_TRACEBACKS_PER_PROCESS and len(self.tracebacks) < MAX_TRACEBACKS:
            process, _, rank = current.writer
            self.tracebacks.append(
                Traceback(current.exception, current.level, current.phase, current.source, process, pid, rank)
            )

    def _keep(self, kind: ErrorKind, record: Record, label: str, phase: Phase) -> None:
        key = (kind, record.pid, phase)
        self.fatal_serving = self.fatal_serving or (phase is Phase.SERVE and kind in FATAL_KINDS)
        known = self.records.get(key)
        if known is not None:
            self.records[key] = replace(known, count=known.count + 1)
        elif len(self.records) < MAX_RECORDS:
            self.records[key] = ErrorRecord(
                kind,
                record.level,
                _clip(record.message),
                phase,
                _source(label, record),
                record.process,
                record.pid,
                record.rank,
                record.time,
                1,
                _first_group(_WANTED, record.message),
                _first_group(_FREE, record.message),
            )


def _source(label: str, record: Record) -> Source:
    return Source(label, record.line, record.offset)


def _first_group(pattern: re.Pattern[bytes], message: bytes) -> str | None:
    match = pattern.search(message)
    return next((group.decode() for group in match.groups() if group), None) if match else None


def _clip(message: bytes) -> str:
    return message[:MAX_MESSAGE].decode("utf-8", "replace").strip()


NOT_A_CAUSE = frozenset(
    {
        _K.CORE_INIT,
        _K.CORE_EXITED,
        _K.ENGINE_DEAD,
        _K.OUTPUT_HANDLER,
        _K.TEARDOWN,
        _K.CONTEXT_LENGTH,
        _K.CLIENT_REQUEST,
        _K.PLUGIN,
    }
)
"""Kinds that follow from another failure, belong to the client or are survived."""
_SECONDARY = frozenset({_K.CORE_INIT, _K.CORE_EXITED, _K.ENGINE_DEAD, _K.OUTPUT_HANDLER})
_ANNOUNCEMENTS = frozenset({_K.CORE_START, _K.WORKER_START, _K.WORKER_EXCEPTION, _K.CORE_FATAL})

_UNNAMED = frozenset({_K.EXCEPTION, _K.OTHER, _K.REQUEST_EXCEPTION})


def first_cause(errors: tuple[ErrorRecord, ...]) -> ErrorRecord | None:
    """The root cause: the innermost exception of the process that failed first, if the log shows one."""
    causes = [error for error in errors if error.kind not in NOT_A_CAUSE]
    if not causes:
        secondary = [error for error in errors if error.kind in _SECONDARY]
        return min(secondary, key=lambda error: error.source.line, default=None)
    first = min(causes, key=lambda error: error.source.line)
    mine = [error for error in causes if error.pid == first.pid]
    # "EngineCore encountered a fatal error." only announces what another process may have to say.
    for group in (mine, causes):
        named = [error for error in group if error.kind not in _ANNOUNCEMENTS | _UNNAMED]
        raised = [error for error in group if error.kind is _K.EXCEPTION]
        if named or raised:
            return min(named or raised, key=lambda error: error.source.line)
    return first
