# SPDX-License-Identifier: Apache-2.0
"""Meaning of error texts, and tracebacks told apart by process.

Texts are matched by meaning, because an out-of-memory error need not contain these words.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from qualify.observe.facts import Counts, ErrorKind, ErrorRecord, Phase, Source, Traceback
from qualify.observe.layers import Record

MAX_RECORDS = 128
MAX_TRACEBACKS_PER_PROCESS = 3
MAX_TRACEBACKS = 64
MAX_OPEN = 64
MAX_MESSAGE = 600

_K = ErrorKind
_PATTERNS: tuple[tuple[ErrorKind, str], ...] = (
    # The specific comes before the general: an admission refusal is a ValueError, a capture error a CUDA error.
    (_K.XID, r"NVRM: Xid"),
    (_K.OOM_KILLER, r"Out of memory: Killed process|invoked oom-killer|oom-kill:|Memory cgroup out of memory"),
    (_K.KV_REFUSED, r"To serve at least one request with the model's max seq len|model's max seq len \(\d+\) is larger"),
    (_K.KV_NO_MEMORY, r"No available memory for the cache blocks"),
    (_K.KV_LOAD, r"less than the expected number of tokens|KV load fail|[Ff]ailed to load KV|kv_load_failure"),
    (_K.TEARDOWN, r"force killing remaining process|force killing sub process|destroy_process_group\(\) was not called"
                  r"|leaked semaphore|leaked shared_memory|^nanobind: leaked"),
    (_K.CORE_EXITED, r"engine core exited unexpectedly"),
    (_K.CORE_INIT, r"Engine core initialization failed"),
    (_K.CORE_START, r"EngineCore failed to start"),
    (_K.WORKER_START, r"WorkerProc failed to start"),
    (_K.WORKER_EXCEPTION, r"WorkerProc hit an exception"),
    (_K.WORKER_DIED, r"Worker proc .{0,80}died unexpectedly"),
    (_K.CORE_FATAL, r"EngineCore encountered a fatal error"),
    (_K.OUTPUT_HANDLER, r"AsyncLLM output_handler failed"),
    (_K.ENGINE_DEAD, r"EngineDeadError|MQEngineDeadError|AsyncEngineDeadError"),
    (_K.RPC_TIMEOUT, r"RPC call to .{0,80}timed out"),
    (_K.HIDDEN_ALLOCATION, r"torch_call_dispatcher\(|CUBLAS_STATUS_ALLOC_FAILED"),
    (_K.ALLOCATOR_WARNING, r"memory allocation failed with OOM"),
    (_K.SHARED_MEMORY, r"Error while creating shared memory segment|No space left on device.{0,200}/dev/shm"
                       r"|/dev/shm.{0,200}No space left|unable to (?:open|mmap|resize).{0,60}shared memory"
                       r"|unable to allocate shared memory"),
    (_K.OUT_OF_MEMORY, r"CUDA out of memory|HIP out of memory|OutOfMemoryError|CUDA error: out of memory"
                       r"|cudaErrorMemoryAllocation|RuntimeError: .{0,80}out of memory"),
    (_K.COLLECTIVE_WATCHDOG, r"[Ww]atchdog caught collective operation timeout|NCCL watchdog|DistBackendError.{0,200}timeout"),
    (_K.CAPTURE, r"cudaErrorStreamCapture|when stream is capturing|while (?:stream )?captur(?:e|ing)"
                 r"|during (?:stream |graph |CUDA graph )?capture|capture (?:was )?invalidated"),
    (_K.ILLEGAL_ACCESS, r"illegal (?:memory access|address|instruction)|misaligned address|device-side assert"
                        r"|unspecified launch failure"),
    (_K.NCCL, r"NCCL error|ncclSystemError|ncclInternalError|ncclUnhandledCudaError|ncclRemoteError"),
    (_K.CUDA, r"CUDA error|CUDA driver error|cudaError[A-Z]|CUBLAS_STATUS_|CUDNN_STATUS_"),
    (_K.CONTEXT_LENGTH, r"maximum context length is|longer than the maximum model length"),
    (_K.CLIENT_REQUEST, r"Invalid HTTP request received|RequestValidationError|VLLMValidationError|BadRequestError"
                        r"|Error in preprocessing prompt inputs"),
    (_K.PLUGIN, r"Failed to load plugin"),
    (_K.IMPORT, r"^(?:\w+\.)*(?:ModuleNotFoundError|ImportError)\b|cannot open shared object file|undefined symbol:"),
    (_K.USAGE, r"error: (?:unrecognized arguments|argument |the following arguments)|\bvalidation errors? for \w+Config"
               r"|^(?:\w+\.)*ValidationError\b"),
    (_K.EXECUTOR_FAILED, r"Executor failed"),
)
_MATCHERS = tuple((kind, re.compile(text.encode())) for kind, text in _PATTERNS)
_HINTS = (
    b"rror", b"fail", b"Fail", b"memory", b"OOM", b"oom", b"died", b"unexpectedly", b"imed out", b"imeout",
    b"leaked", b"killing", b"destroy_process_group", b"illegal", b"misaligned", b"assert", b"captur", b"ncclS",
    b"CUBLAS", b"CUDNN", b"dispatcher(", b"NVRM", b"less than the expected", b"max seq len", b"maximum",
    b"Invalid HTTP", b"shared object", b"undefined symbol", b"/dev/shm",
)  # fmt: skip
"""Every known error text contains one of these; substring tests are ten times faster than the patterns."""

WARNING_KINDS = frozenset({_K.XID, _K.OOM_KILLER, _K.ALLOCATOR_WARNING, _K.CORE_EXITED, _K.TEARDOWN, _K.COLLECTIVE_WATCHDOG})
"""Kinds that count below ERROR level too: the allocator warns before anything raises."""
FATAL_KINDS = frozenset({
    _K.CORE_FATAL, _K.OUTPUT_HANDLER, _K.ENGINE_DEAD, _K.CORE_EXITED, _K.EXECUTOR_FAILED, _K.WORKER_DIED,
    _K.WORKER_EXCEPTION, _K.ILLEGAL_ACCESS, _K.COLLECTIVE_WATCHDOG,
})  # fmt: skip
"""Kinds after which an engine that served does not serve any more."""
CLIENT_KINDS = frozenset({_K.CONTEXT_LENGTH, _K.CLIENT_REQUEST})
_QUIET_LEVELS = frozenset({"INFO", "DEBUG"})
ERROR_LEVELS = frozenset({"ERROR", "CRITICAL", "FATAL"})

_TRACEBACK = b"Traceback (most recent call last)"
_CHAIN = (b"During handling of the above exception", b"The above exception was the direct cause")
_EXCEPTION = re.compile(rb"(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:: |:?$)")
_FRAME = (b" ", b"\t", b"|", b"+", b"^", b"~")
_WANTED = re.compile(rb"[Tt]ried to allocate ([\d.]+ [KMGT]i?B)|[Rr]equested:? ([\d.]+ [KMGT]i?B)")
_FREE = re.compile(rb"of which ([\d.]+ [KMGT]i?B) is free|[Ff]ree:? ([\d.]+ [KMGT]i?B)|([\d.]+ [KMGT]i?B) (?:is )?free")

Writer = tuple[str | None, int | None, int | None]


def classify(message: bytes) -> ErrorKind | None:
    """Kind of an error text; None when nothing in it is known."""
    for hint in _HINTS:
        if hint in message:
            break
    else:
        return None
    return next((kind for kind, pattern in _MATCHERS if pattern.search(message)), None)


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
    _open: dict[int | None, _Open] = field(default_factory=dict)

    def see(self, record: Record, label: str, phase: Phase) -> bool:
        """Take one record of the file `label`; True when it belongs to an error or a traceback."""
        if record.headed and record.level in _QUIET_LEVELS and b"exited unexpectedly" not in record.message:
            # Far the most frequent case: such a record can only end a traceback of its process.
            if self._open:
                self._close(record.pid)
            return False
        source = Source(label, record.line, record.offset)
        if record.level in ERROR_LEVELS:
            self.errors += 1
        elif record.level == "WARNING":
            self.warnings += 1
        if self._in_traceback(record, source, phase):
            return True
        kind = classify(record.message)
        if record.level in ERROR_LEVELS:
            kind = kind or ErrorKind.OTHER
        elif kind is None or (record.level is not None and kind not in WARNING_KINDS):
            return False
        self._keep(kind, record, source, phase)
        # "Error in preprocessing" announces a traceback, which is counted when it ends.
        self.client_errors += kind in CLIENT_KINDS and b"preprocessing" not in record.message
        return True

    def finish(self) -> Counts:
        """Close the tracebacks that the end of the file cut, and give the totals."""
        for pid in list(self._open):
            self._close(pid)
        both = self.error_tracebacks + self.warning_tracebacks
        return Counts(
            self.errors, self.warnings, both, self.error_tracebacks, self.warning_tracebacks, self.client_errors
        )

    def _in_traceback(self, record: Record, source: Source, phase: Phase) -> bool:
        current = self._open.get(record.pid)
        message = record.message
        if _TRACEBACK in message[:200] or (current is None and _TRACEBACK in message):
            if current is not None and current.in_frames:
                return True
            if current is None or not self._chained(current):
                self._begin(record, source, phase)
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
            self._exception(current, record, source)
            return True
        if not current.in_frames:
            self._close(record.pid)
            return False
        # Text of another writer between the frames of a process without prefix.
        return record.pid is not None

    def _chained(self, current: _Open) -> bool:
        return current.exception is not None and not current.in_frames

    def _begin(self, record: Record, source: Source, phase: Phase) -> None:
        self._close(record.pid)
        if len(self._open) >= MAX_OPEN:
            self._close(next(iter(self._open)))
        writer = (record.process, record.pid, record.rank)
        self._open[record.pid] = _Open(record.level, phase, source, writer)

    def _exception(self, current: _Open, record: Record, source: Source) -> None:
        current.in_frames = False
        if current.exception is not None:
            return
        current.exception = _clip(record.message)
        kind = classify(record.message) or ErrorKind.OTHER
        current.client = kind in CLIENT_KINDS
        if record.level != "WARNING":
            self._keep(kind, record, source, current.phase)

    def _close(self, pid: int | None) -> None:
        current = self._open.pop(pid, None)
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

    def _keep(self, kind: ErrorKind, record: Record, source: Source, phase: Phase) -> None:
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
                source,
                record.process,
                record.pid,
                record.rank,
                record.time,
                1,
                _first_group(_WANTED, record.message),
                _first_group(_FREE, record.message),
            )


def _first_group(pattern: re.Pattern[bytes], message: bytes) -> str | None:
    match = pattern.search(message)
    return next((group.decode() for group in match.groups() if group), None) if match else None


def _clip(message: bytes) -> str:
    return message[:MAX_MESSAGE].decode("utf-8", "replace").strip()
