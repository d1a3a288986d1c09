# SPDX-License-Identifier: Apache-2.0
"""What a vLLM log says, as typed facts with their origin.

A fact that the log does not state is None or an empty tuple, never 0. `CapturePass.PROFILING` marks a value of
the memory profiling pass, `CapturePass.FINAL` one of the capture that serves requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypeVar

from qualify.observe.graphs import Runner

T = TypeVar("T")


class CapturePass(StrEnum):
    PROFILING = "profiling"
    FINAL = "final"


class Phase(StrEnum):
    """Start: until ready. Serve: until a requested stop. Stopping: after it."""

    START = "start"
    SERVE = "serve"
    STOPPING = "stopping"


class Readiness(StrEnum):
    YES = "yes"
    NO = "no"
    UNKNOWN = "unknown"
    NOT_APPLICABLE = "notApplicable"
    """An offline run has no server that could become ready."""


class Role(StrEnum):
    """Whose graphs a capture bar counts."""

    TARGET = "target"
    DRAFTER = "drafter"
    DRAFTER_PREFILL = "drafterPrefill"
    DRAFTER_DECODE = "drafterDecode"
    CONTEXT_KV = "contextKv"


class ErrorKind(StrEnum):
    """What an error text means. The wording differs by version, the kind does not."""

    CORE_START = "core_start"
    CORE_INIT = "core_init"
    WORKER_START = "worker_start"
    WORKER_EXCEPTION = "worker_exception"
    WORKER_DIED = "worker_died"
    KV_NO_MEMORY = "kv_no_memory"
    KV_REFUSED = "kv_refused"
    CORE_FATAL = "core_fatal"
    OUTPUT_HANDLER = "output_handler"
    ENGINE_DEAD = "engine_dead"
    CORE_EXITED = "core_exited"
    EXECUTOR_FAILED = "executor_failed"
    RPC_TIMEOUT = "rpc_timeout"
    COLLECTIVE_WATCHDOG = "collective_watchdog"
    OUT_OF_MEMORY = "out_of_memory"
    ALLOCATOR_WARNING = "allocator_warning"
    HIDDEN_ALLOCATION = "hidden_allocation"
    ILLEGAL_ACCESS = "illegal_access"
    CUDA = "cuda"
    NCCL = "nccl"
    CAPTURE = "capture"
    SHARED_MEMORY = "shared_memory"
    XID = "xid"
    OOM_KILLER = "oom_killer"
    IMPORT = "import"
    USAGE = "usage"
    CONTEXT_LENGTH = "context_length"
    CLIENT_REQUEST = "client_request"
    KV_LOAD = "kv_load"
    PLUGIN = "plugin"
    TEARDOWN = "teardown"
    REQUEST_EXCEPTION = "request_exception"
    """The API server answered a request with an error: 4xx or 5xx, which only the answer tells."""
    EXCEPTION = "exception"
    """An exception of a traceback whose text is not known."""
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Source:
    """Where a fact stands: file label, physical line (from 1) and byte offset of that line."""

    file: str
    line: int
    offset: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class Fact(Generic[T]):
    """One value with its unit and origin."""

    value: T
    source: Source
    unit: str | None = None
    process: str | None = None
    pid: int | None = None
    rank: int | None = None
    capture_pass: CapturePass | None = None


@dataclass(frozen=True, slots=True)
class Extent:
    """Size of the file as read. `escapes` counts ESC bytes, `clipped` lines longer than the reader examines."""

    lines: int
    bytes: int
    carriage_returns: int
    escapes: int
    clipped: int
    ends_with_newline: bool
    truncated: str | None = None
    """Why reading stopped early, for example a damaged gzip stream."""


@dataclass(frozen=True, slots=True)
class Concurrency:
    """`times` requests of `tokens` tokens fit, as logged."""

    times: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """KV admission refused: one request of `max_model_len` needs `needed_gib`, `available_gib` are there."""

    max_model_len: int | None
    needed_gib: float | None
    available_gib: float | None
    estimated_max_len: int | None


@dataclass(frozen=True, slots=True)
class Reservation:
    """KV memory that was set, not profiled: no peak was measured."""

    gib: float
    of_gib: float | None


@dataclass(frozen=True, slots=True)
class MemorySummary:
    """Memory of one rank in GiB. `consumed` is weights and non-torch memory together."""

    consumed_gib: float | None
    weights_gib: float | None
    non_torch_gib: float | None
    peak_activation_gib: float | None
    graph_gib: float | None
    kv_gib: float | None


@dataclass(frozen=True, slots=True)
class PoolMemory:
    actual_gib: float
    estimated_gib: float


@dataclass(frozen=True, slots=True)
class ConfiguredCounts:
    """Graphs that the V1 profiler plans. Configured, not captured."""

    piecewise: int | None
    full: int | None


@dataclass(frozen=True, slots=True)
class CaptureFinished:
    """A rank says that a capture ended. Negative memory was freed by somebody else: unknown."""

    seconds: float
    gib: float
    memory_known: bool


@dataclass(frozen=True, slots=True)
class Capture:
    """One progress bar of graph capture: `captured` of `total` sizes.

    `ordinal` numbers the bars of a label from 1; the last one of a label is the final pass. `after_finished`: the
    bar stands behind the record that closed its pass, which is what separate streams do to a merged file.
    """

    label: str
    kind: str | None
    role: Role
    ordinal: int
    captured: int
    total: int
    elapsed: str
    after_finished: bool

    @property
    def complete(self) -> bool:
        return self.captured == self.total


@dataclass(frozen=True, slots=True)
class Bar:
    """State of a progress bar of any label."""

    label: str
    done: int
    total: int
    elapsed: str


@dataclass(frozen=True, slots=True)
class Throughput:
    """One statistics line of the engine. Rates are tokens per second, ratios are fractions."""

    engine: str | None
    prompt_rate: float | None
    generation_rate: float | None
    running: int | None
    waiting: int | None
    kv_usage: float | None
    prefix_hit_rate: float | None
    external_hit_rate: float | None

    @property
    def stalled(self) -> bool:
        return bool(self.running) and self.prompt_rate == 0 and self.generation_rate == 0


@dataclass(frozen=True, slots=True)
class ThroughputLines:
    """All statistics lines in constant memory: count, extremes, and the last few."""

    count: int
    last: tuple[Fact[Throughput], ...] = ()
    max_generation_rate: float | None = None
    longest_stall: int = 0
    """Most consecutive lines of one engine with running requests and both rates 0."""
    stall_start: Source | None = None
    open_stall: int = 0
    """Length of the stall in which the file ends."""


@dataclass(frozen=True, slots=True)
class SpecDecode:
    """One window of speculative decoding. Totals come from counters only: the last window is not logged."""

    acceptance_length: float | None
    acceptance_rate: float | None
    accepted: int | None
    drafted: int | None
    per_position: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class SpecDecodeLines:
    count: int
    last: tuple[Fact[SpecDecode], ...] = ()


@dataclass(frozen=True, slots=True)
class Heartbeats:
    """60-second reports of a busy worker. `trailing`: how many ended the file with nothing else between."""

    count: int
    first: Source
    last: Source
    trailing: int


@dataclass(frozen=True, slots=True)
class Jit:
    """Compilation activity. `in_progress`: a compile or a warm-up bar was open when the file ended."""

    begun: int
    completed: int
    begun_after_ready: int
    modules: tuple[str, ...]
    warmup_started: bool
    monitor: bool
    during_inference: int
    in_progress: bool
    last: Source | None


@dataclass(frozen=True, slots=True)
class Plugins:
    available: tuple[str, ...]
    loaded: tuple[str, ...]
    failed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CacheServer:
    """What LMCache writes, in its own log or in the engine's. Tokens are per line as logged, never joined."""

    version: Fact[str] | None
    hash_algorithm: Fact[str] | None
    chunk_tokens: Fact[int] | None
    transfer_mode: Fact[str] | None
    registered_layers: tuple[Fact[int], ...]
    kernel_groups: int | None
    engine_groups: int | None
    stored_lines: int
    stored_tokens: int
    stored: tuple[Fact[int], ...]
    retrieved_lines: int
    retrieved_tokens: int
    retrieved: tuple[Fact[int], ...]
    prefetches: tuple[Fact[Prefetch], ...]


@dataclass(frozen=True, slots=True)
class Prefetch:
    retained: int
    wanted: int
    from_l1: int
    from_l2: int


@dataclass(frozen=True, slots=True)
class ErrorRecord:
    """The first of its kind in one process. `exception` is the innermost one of its traceback."""

    kind: ErrorKind
    level: str | None
    message: str
    phase: Phase
    source: Source
    process: str | None
    pid: int | None
    rank: int | None
    time: str | None
    count: int
    wanted: str | None = None
    free: str | None = None


@dataclass(frozen=True, slots=True)
class Traceback:
    """The first tracebacks of each process. `level` WARNING is a report, not a crash."""

    exception: str | None
    level: str | None
    phase: Phase
    source: Source
    process: str | None
    pid: int | None
    rank: int | None


@dataclass(frozen=True, slots=True)
class Counts:
    """Totals behind the bounded lists of errors and tracebacks."""

    errors: int = 0
    warnings: int = 0
    tracebacks: int = 0
    error_tracebacks: int = 0
    warning_tracebacks: int = 0
    client_errors: int = 0


@dataclass(frozen=True, slots=True)
class EarlierBoot:
    """A start of the engine that ended before the last one in the same file."""

    start: Source
    ready: Readiness
    stopped: bool
    """Whether a stop was requested before the engine started again."""
    error: ErrorRecord | None


@dataclass(frozen=True, slots=True)
class EndOfFile:
    """The state in which the file stops."""

    last_line: Source | None
    last_message: str | None
    open_bar: Fact[Bar] | None
    """A bar below its total with no fatal line after it."""


@dataclass(frozen=True, slots=True)
class LogFacts:
    """Facts of the last boot in one log; `earlier_boots` summarises those before it."""

    label: str
    extent: Extent
    envelopes: frozenset[str]
    """Transport layers seen: compose, cri, dockerJson, timestamps, syslog, ansi."""
    bare_bars: bool
    """Whether progress bars came without the envelope that the records carry."""
    earlier_boots: tuple[EarlierBoot, ...]
    processes: Mapping[int, str]
    """Last name of each process by pid."""
    ranks: Mapping[int, int]
    """Rank of each worker by pid."""
    version: Fact[str] | None = None
    runner: Fact[Runner] | None = None
    runner_from_labels: Runner | None = None
    model: Fact[str] | None = None
    world_size: Fact[int] | None = None
    tensor_parallel: Fact[int] | None = None
    announced_ranks: frozenset[int] = frozenset()
    """Ranks that printed their `world_size=` line."""
    distributed_backend: Fact[str] | None = None
    nccl: Fact[str] | None = None
    all_reduce: Mapping[str, Fact[tuple[str, ...]]] = field(default_factory=dict)
    attention_backend: Fact[str] | None = None
    drafter: Fact[str] | None = None
    spec_tokens: Fact[int] | None = None
    configured_mode: Fact[str] | None = None
    configured_sizes: Fact[tuple[int, ...]] | None = None
    eager: Fact[bool] | None = None
    model_memory: tuple[Fact[float], ...] = ()
    available_kv: tuple[Fact[float], ...] = ()
    kv_reservation: tuple[Fact[Reservation], ...] = ()
    kv_tokens: Fact[int] | None = None
    kv_device: Fact[str] | None = None
    concurrency: Fact[Concurrency] | None = None
    kv_group_block_sizes: Fact[tuple[int, ...]] | None = None
    kv_refusal: Fact[Refusal] | None = None
    profiling_blocks: tuple[Fact[int], ...] = ()
    memory_summary: tuple[Fact[MemorySummary], ...] = ()
    captures: tuple[Fact[Capture], ...] = ()
    capture_finished: tuple[Fact[CaptureFinished], ...] = ()
    drafter_announced: Fact[str] | None = None
    dispatch_keys_missing: Fact[bool] | None = None
    graph_estimate: tuple[Fact[float], ...] = ()
    pool: tuple[Fact[PoolMemory], ...] = ()
    configured_counts: tuple[Fact[ConfiguredCounts], ...] = ()
    init_seconds: Fact[float] | None = None
    server_started: tuple[Fact[int], ...] = ()
    ready: Readiness = Readiness.UNKNOWN
    ready_source: Source | None = None
    shutdown_requested: Fact[str] | None = None
    core_exited: Fact[str] | None = None
    throughput: ThroughputLines | None = None
    spec_decode: SpecDecodeLines | None = None
    http: Mapping[int, int] = field(default_factory=dict)
    """Answered requests by status code, from access lines."""
    http_after_stop: Mapping[int, int] = field(default_factory=dict)
    """Those of them that stand behind the requested stop."""
    plugins: Plugins | None = None
    heartbeats: Heartbeats | None = None
    jit: Jit | None = None
    cache_server: CacheServer | None = None
    errors: tuple[ErrorRecord, ...] = ()
    tracebacks: tuple[Traceback, ...] = ()
    counts: Counts = Counts()
    answered_after_fatal: int | None = None
    """Successful answers behind the first fatal error of the serving phase; None when there was none."""
    last_bar: Fact[Bar] | None = None
    end: EndOfFile = EndOfFile(None, None, None)

    @property
    def empty(self) -> bool:
        """Whether no line of an engine or a cache server was recognised."""
        stated = (self.version, self.runner, self.world_size, self.kv_tokens, self.cache_server, self.throughput)
        seen = (self.processes, self.captures, self.capture_finished, self.http, self.errors, self.server_started)
        return not any(one is not None for one in stated) and not any(seen)

    def http_class(self, hundreds: int) -> int | None:
        """Answers of one class (2, 4 or 5); None when the log has no access line at all."""
        if not self.http:
            return None
        return sum(count for status, count in self.http.items() if status // 100 == hundreds)

    def final_captures(self) -> dict[str, Fact[Capture]]:
        """The last bar of each label."""
        return {fact.value.label: fact for fact in self.captures}

    def finished_ranks(self) -> frozenset[int | None]:
        """Ranks whose final capture ended, by their own record after the KV-cache size."""
        final = (fact for fact in self.capture_finished if fact.capture_pass is CapturePass.FINAL)
        return frozenset(fact.rank for fact in final)

    def of_rank(self, facts: tuple[Fact[T], ...], rank: int) -> Fact[T] | None:
        """The last fact of one rank; None when that rank did not print it."""
        found = [fact for fact in facts if fact.rank == rank]
        return found[-1] if found else None
