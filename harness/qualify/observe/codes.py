# SPDX-License-Identifier: Apache-2.0
"""Codes of what engine evidence shows, each with meaning, evidence and remedy.

Unlike claim reason codes, some of these explain a pass or name a fact that is easily misread.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class EvidenceCode(StrEnum):
    # graph capture
    CAPTURE_FINAL_PASS = "capture_final_pass"
    CAPTURE_SETS_DIFFER_BY_KIND = "capture_sets_differ_by_kind"
    CAPTURE_BARS_ABSENT = "capture_bars_absent"
    CAPTURE_CONFIGURED_ONLY = "capture_configured_only"
    CAPTURE_INCOMPLETE_EOF = "capture_incomplete_eof"
    CAPTURE_PROFILING_ONLY = "capture_profiling_only"
    CAPTURE_PASS_UNKNOWN = "capture_pass_unknown"
    CAPTURE_NOT_APPLICABLE = "capture_not_applicable"
    CAPTURE_OOM = "capture_oom"
    CAPTURE_ERROR_RANK = "capture_error_rank"
    STDERR_REORDERED = "stderr_reordered"
    V1_RANK0_ONLY = "v1_rank0_only"
    SIZES_ROUNDED_FOR_SPEC = "sizes_rounded_for_spec"
    LABEL_FOLLOWS_RUNNER = "label_follows_runner"
    RUNNER_CONFLICT = "runner_conflict"
    GRAPH_MEMORY_NEGATIVE = "graph_memory_negative"
    GRAPH_MEMORY_ABOVE_ESTIMATE = "graph_memory_above_estimate"
    XID_DURING_REPLAY = "xid_during_replay"
    # KV admission
    KV_ADMISSION_REFUSED = "kv_admission_refused"
    KV_NO_MEMORY = "kv_no_memory"
    KV_BELOW_FLOOR = "kv_below_floor"
    PROFILING_OVERRIDE = "profiling_override"
    ADVICE_NUMBERS_IGNORED = "advice_numbers_ignored"
    KV_NOT_PROFILED = "kv_not_profiled"
    # memory
    OOM_OUTSIDE_KV_POOL = "oom_outside_kv_pool"
    OUT_OF_MEMORY = "out_of_memory"
    RUNTIME_ALLOC_FAILURE = "runtime_alloc_failure"
    OOM_WARNING_LEVEL = "oom_warning_level"
    SHM_EXHAUSTED = "shm_exhausted"
    HOST_OOM_KILLED = "host_oom_killed"
    # start
    START_TIMEOUT = "start_timeout"
    START_TIMEOUT_SILENT = "start_timeout_silent"
    JIT_IN_PROGRESS = "jit_in_progress"
    NOT_READY_AT_END = "not_ready_at_end"
    READY_LINE_MISSING = "ready_line_missing"
    IMAGE_DEPENDENCY_MISMATCH = "image_dependency_mismatch"
    USAGE_ERROR = "usage_error"
    ENGINE_START_FAILED = "engine_start_failed"
    ERROR_BEFORE_READY = "error_before_ready"
    RANK_MISSING = "rank_missing"
    RANKS_DISAGREE = "ranks_disagree"
    PLUGIN_FAILED = "plugin_failed"
    # service
    ENGINE_DEAD_HTTP_ALIVE = "engine_dead_http_alive"
    ENGINE_FAILED_SERVING = "engine_failed_serving"
    ENGINE_RESTARTED = "engine_restarted"
    PROCESS_DIED_SILENTLY = "process_died_silently"
    STALL_ZERO_THROUGHPUT = "stall_zero_throughput"
    GPU_XID = "gpu_xid"
    SERVER_ERRORS = "server_errors"
    STREAM_UNFINISHED = "stream_unfinished"
    OWN_REQUEST_REFUSED = "own_request_refused"
    CLIENT_ERROR_ONLY = "client_error_only"
    ERROR_AFTER_REQUESTED_STOP = "error_after_requested_stop"
    HEARTBEAT_BENIGN = "heartbeat_benign"
    WARNING_TRACEBACK = "warning_traceback"
    ENVELOPE_PARTIAL = "envelope_partial"
    # restore
    NO_OUTPUT_TO_COMPARE = "no_output_to_compare"
    RESTORE_CONTENT_WRONG = "restore_content_wrong"
    RESTORE_MULTI_CHUNK_DRAFTER = "restore_multi_chunk_drafter"
    RESTORE_ZERO_HITS = "restore_zero_hits"
    RESTORE_PARTIAL = "restore_partial"
    RESTORE_DIVERGES = "restore_diverges"
    # speculative decoding and schemas
    ACCEPTANCE_COLLAPSE = "acceptance_collapse"
    ACCEPTANCE_BELOW_FLOOR = "acceptance_below_floor"
    METRIC_FAMILY_ABSENT = "metric_family_absent"
    SCHEMA_UNKNOWN = "schema_unknown"
    # receipts, images, builds
    RECEIPT_NOT_VERIFIABLE = "receipt_not_verifiable"
    DIGEST_KIND = "digest_kind"
    DIGEST_MISMATCH = "digest_mismatch"
    TAG_NOT_IDENTITY = "tag_not_identity"
    WHEEL_CUDA_MAJOR = "wheel_cuda_major"
    BUILD_STATUS_NOT_BY_WORD = "build_status_not_by_word"


class CodeEntry(NamedTuple):
    """What a code means, what shows it, and what to do."""

    meaning: str
    evidence: str
    remedy: str


def codes_table() -> str:
    """All codes as a Markdown table for the documentation."""
    rows = [f"| `{code}` | {one.meaning} | {one.evidence} | {one.remedy} |" for code, one in CODES.items()]
    return "\n".join(["| code | meaning | evidence | remedy |", "|---|---|---|---|", *rows])


_C = EvidenceCode
_NONE = "none needed"
CODES: dict[EvidenceCode, CodeEntry] = {
    _C.CAPTURE_FINAL_PASS: CodeEntry(
        "the capture that serves requests ended with every size; profiling captures are not added to it",
        "last bar of each label complete, and a finished record after the KV-cache size",
        _NONE,
    ),
    _C.CAPTURE_SETS_DIFFER_BY_KIND: CodeEntry(
        "PIECEWISE and FULL have different numbers of sizes, as their rules demand",
        "final bars of the two kinds",
        "compare sets with the oracle, never counts with each other",
    ),
    _C.CAPTURE_BARS_ABSENT: CodeEntry(
        "the log shows no capture bar, so the number of captured sizes is unknown, not zero",
        "a started engine without any capture label",
        "read the captured sets in the engine, or log stderr too",
    ),
    _C.CAPTURE_CONFIGURED_ONLY: CodeEntry(
        "only the planned counts are logged; nothing shows that they were captured",
        "the profiler's configured counts without bars",
        "read the captured sets in the engine, or log stderr too",
    ),
    _C.CAPTURE_INCOMPLETE_EOF: CodeEntry(
        "the log ends while a capture bar is below its total",
        "highest n of n/N at the end of the file",
        "collect the rest of the log",
    ),
    _C.CAPTURE_PROFILING_ONLY: CodeEntry(
        "graphs were captured while memory was profiled, but not for serving",
        "finished records before the KV-cache size and none after it",
        "wait for the final capture, then read the log again",
    ),
    _C.CAPTURE_PASS_UNKNOWN: CodeEntry(
        "one bar is there for two finished passes, or the passes disagree: the final count cannot be told",
        "number of bars of a label against finished records",
        "log stderr too, or read the captured sets in the engine",
    ),
    _C.CAPTURE_NOT_APPLICABLE: CodeEntry(
        "graphs are switched off", "eager mode or cudagraph mode NONE in the engine's dump", _NONE
    ),
    _C.CAPTURE_OOM: CodeEntry(
        "memory ran out while graphs were captured",
        "an allocation error of a rank while a capture bar was open",
        "lower gpu_memory_utilization or capture fewer sizes",
    ),
    _C.CAPTURE_ERROR_RANK: CodeEntry(
        "graph capture failed on a rank",
        "a stream-capture error with its rank",
        "see the operator named in that rank's traceback",
    ),
    _C.STDERR_REORDERED: CodeEntry(
        "bars of the final capture stand behind the records that close it; stdout and stderr were merged",
        "line numbers of bars and records",
        _NONE,
    ),
    _C.V1_RANK0_ONLY: CodeEntry(
        "the V1 runner reports capture on rank 0 only; the other ranks are unknown from the log",
        "finished record of rank 0 alone",
        "ask every rank in the engine",
    ),
    _C.SIZES_ROUNDED_FOR_SPEC: CodeEntry(
        "V1 rounded the configured sizes up to multiples of the decode length; fewer were captured than configured",
        "sizes in the dump against the final bar and the oracle",
        _NONE,
    ),
    _C.LABEL_FOLLOWS_RUNNER: CodeEntry(
        "bar labels are those of the V1 runner although the version has a V2 runner", "label words", _NONE
    ),
    _C.RUNNER_CONFLICT: CodeEntry(
        "the log names one model runner and its bars belong to the other",
        "runner line against bar labels",
        "check that the file holds one engine only",
    ),
    _C.GRAPH_MEMORY_NEGATIVE: CodeEntry(
        "capture seems to have freed memory, because something else released it: graph memory is unknown",
        "a negative figure in the finished record",
        "run alone on the GPU to measure graph memory",
    ),
    _C.GRAPH_MEMORY_ABOVE_ESTIMATE: CodeEntry(
        "graphs took more memory than the KV cache was sized for",
        "actual and estimated pool memory",
        "leave headroom, or lower gpu_memory_utilization",
    ),
    _C.XID_DURING_REPLAY: CodeEntry(
        "the GPU driver reported a fault while captured graphs served traffic",
        "Xid line of the kernel log in the serving phase",
        "report the Xid with the last batch shapes; try without FULL graphs to isolate",
    ),
    _C.KV_ADMISSION_REFUSED: CodeEntry(
        "one request of the full length does not fit the KV memory, so the engine refused to start",
        "needed and available GiB of the refusal",
        "lower max_model_len to the estimate, or give more memory",
    ),
    _C.KV_NO_MEMORY: CodeEntry(
        "no memory was left for KV blocks", "the engine's refusal", "raise gpu_memory_utilization or free the device"
    ),
    _C.KV_BELOW_FLOOR: CodeEntry(
        "the KV cache holds fewer tokens than required",
        "admitted tokens against the floor",
        "give the KV cache more memory",
    ),
    _C.PROFILING_OVERRIDE: CodeEntry(
        "a small block count belongs to memory profiling and is not the admission", "the override line", _NONE
    ),
    _C.ADVICE_NUMBERS_IGNORED: CodeEntry(
        "the log suggests settings; these numbers are advice, not measurements", "the memory summary", _NONE
    ),
    _C.KV_NOT_PROFILED: CodeEntry(
        "KV memory was set by hand; no peak was measured", "the reservation line of each rank", _NONE
    ),
    _C.OOM_OUTSIDE_KV_POOL: CodeEntry(
        "device memory ran out while the KV pool had room: activations or workspaces were not profiled",
        "out-of-memory error and KV usage of the statistics line before it",
        "lower gpu_memory_utilization or max_num_batched_tokens, or reserve the workspace before profiling",
    ),
    _C.OUT_OF_MEMORY: CodeEntry(
        "device memory ran out", "the first out-of-memory error", "lower gpu_memory_utilization or the batch limits"
    ),
    _C.RUNTIME_ALLOC_FAILURE: CodeEntry(
        "an operator allocated inside itself and failed; the words out of memory need not appear",
        "a failed allocation call inside a custom operator or library",
        "let the caller own the output and reserve it while memory is profiled",
    ),
    _C.OOM_WARNING_LEVEL: CodeEntry(
        "the allocator reported out-of-memory at warning level, before or without an error",
        "the allocator's warning with wanted and free bytes",
        "lower gpu_memory_utilization or max_num_batched_tokens",
    ),
    _C.SHM_EXHAUSTED: CodeEntry(
        "shared memory is too small or leaked by earlier crashes",
        "a failed shared-memory segment; size and free bytes of /dev/shm",
        "start the container with a larger --shm-size or --ipc=host, and remove stale segments",
    ),
    _C.HOST_OOM_KILLED: CodeEntry(
        "the kernel killed a process for host memory", "the kernel log", "give the container more memory or load less"
    ),
    _C.START_TIMEOUT: CodeEntry(
        "the engine was not ready within its bound",
        "deadline, ready line missing, last progress line",
        "see the last progress; allow longer when the compile cache is empty",
    ),
    _C.START_TIMEOUT_SILENT: CodeEntry(
        "the engine was not ready within its bound and said nothing about why",
        "deadline, no error, no compilation, no Xid",
        "record GPU transport and IOMMU state; test all-reduce between the GPUs alone",
    ),
    _C.JIT_IN_PROGRESS: CodeEntry(
        "kernels were being compiled when the log ended",
        "open warm-up bar or unfinished compile",
        "keep the compile cache between starts, or allow a longer start",
    ),
    _C.NOT_READY_AT_END: CodeEntry(
        "the log ends before the server is ready and shows no cause",
        "ready line missing",
        "collect the rest of the log and the exit status",
    ),
    _C.READY_LINE_MISSING: CodeEntry(
        "requests were answered but the ready line is not in the log",
        "access lines without a ready line",
        "collect the log from its beginning, stderr included",
    ),
    _C.IMAGE_DEPENDENCY_MISMATCH: CodeEntry(
        "a Python module or library could not be loaded, before the engine started",
        "import error without any engine line",
        "rebuild the image with matching versions",
    ),
    _C.USAGE_ERROR: CodeEntry(
        "the command line or configuration was refused",
        "the parser's or validator's message",
        "correct the named option",
    ),
    _C.ENGINE_START_FAILED: CodeEntry(
        "the engine failed to start",
        "the innermost exception of the process that failed first",
        "see the named exception",
    ),
    _C.ERROR_BEFORE_READY: CodeEntry(
        "an error was logged during the start, and the server became ready all the same",
        "an ERROR record or traceback before the ready line",
        "see whether the feature it names is needed",
    ),
    _C.RANK_MISSING: CodeEntry(
        "a rank of the announced world never spoke", "world_size lines by rank", "look for that rank's last lines"
    ),
    _C.RANKS_DISAGREE: CodeEntry(
        "ranks report different states or figures",
        "the same fact of several ranks",
        "compare the ranks' devices and logs",
    ),
    _C.PLUGIN_FAILED: CodeEntry(
        "a plugin could not be loaded; the server runs without it",
        "the error naming the plugin",
        "fix the plugin's import",
    ),
    _C.ENGINE_DEAD_HTTP_ALIVE: CodeEntry(
        "the engine died while the HTTP server kept answering",
        "a fatal engine error followed by successful answers",
        "never judge health by /metrics; see the first fatal line",
    ),
    _C.ENGINE_FAILED_SERVING: CodeEntry(
        "the engine failed while serving", "the first fatal record after ready", "see the innermost exception"
    ),
    _C.ENGINE_RESTARTED: CodeEntry(
        "the file holds more than one start of the engine",
        "a process printed its start line again",
        "find out who restarted it; every number before the last start is void",
    ),
    _C.PROCESS_DIED_SILENTLY: CodeEntry(
        "the engine's process ended without a request and without a word",
        "exit status without any error line",
        "see the kernel log and the container's state",
    ),
    _C.STALL_ZERO_THROUGHPUT: CodeEntry(
        "requests were running and no token was made",
        "statistics lines with running requests and both rates 0",
        "see the collective watchdog, and dump the stacks of every rank",
    ),
    _C.GPU_XID: CodeEntry(
        "the GPU driver reported a fault", "Xid line of the kernel log", "look the Xid up; check the GPU"
    ),
    _C.SERVER_ERRORS: CodeEntry(
        "the server answered with 5xx", "access lines or the client's log", "see the engine's errors"
    ),
    _C.STREAM_UNFINISHED: CodeEntry(
        "a stream ended without a finish reason", "the client's log", "see the engine's errors at that time"
    ),
    _C.OWN_REQUEST_REFUSED: CodeEntry(
        "the harness's own request was refused with 4xx: a defect of the harness",
        "the client's log",
        "correct the request",
    ),
    _C.CLIENT_ERROR_ONLY: CodeEntry(
        "requests were refused as invalid; the service did what it should", "4xx answers and validation errors", _NONE
    ),
    _C.ERROR_AFTER_REQUESTED_STOP: CodeEntry(
        "errors came after the stop that was asked for", "errors behind the shutdown record or the stop time", _NONE
    ),
    _C.HEARTBEAT_BENIGN: CodeEntry(
        "the engine reported a busy worker and went on", "60-second reports with progress behind them", _NONE
    ),
    _C.WARNING_TRACEBACK: CodeEntry("a traceback at warning level is a report, not a crash", "its level", _NONE),
    _C.ENVELOPE_PARTIAL: CodeEntry(
        "records carry a transport prefix and progress bars do not", "lines with and without the prefix", _NONE
    ),
    _C.NO_OUTPUT_TO_COMPARE: CodeEntry(
        "token counts are right but there is no output to compare", "empty answers", "request tokens and compare them"
    ),
    _C.RESTORE_CONTENT_WRONG: CodeEntry(
        "restored requests give wrong answers although every request succeeded",
        "answers against the cold run",
        "compare restored bytes with cold bytes for every rank and group",
    ),
    _C.RESTORE_MULTI_CHUNK_DRAFTER: CodeEntry(
        "a restore of several chunks is wrong when a drafter is on",
        "tries by chunks and drafter",
        "audit the drafter's cache groups; one chunk or one try proves nothing",
    ),
    _C.RESTORE_ZERO_HITS: CodeEntry(
        "tokens were stored and none was hit",
        "stored tokens against external hits",
        "fix the hash seed and compare the hash of all ranks and processes",
    ),
    _C.RESTORE_PARTIAL: CodeEntry(
        "fewer tokens were restored than required",
        "hits against the expected whole chunks",
        "see the store's capacity and eviction",
    ),
    _C.RESTORE_DIVERGES: CodeEntry(
        "a full hit was reported and the output differs",
        "hits and first differing token",
        "a hit is no proof of content: compare bytes",
    ),
    _C.ACCEPTANCE_COLLAPSE: CodeEntry(
        "acceptance falls to almost nothing from a draft position on",
        "accepted per position",
        "check the drafter's later positions",
    ),
    _C.ACCEPTANCE_BELOW_FLOOR: CodeEntry(
        "the acceptance length is below its floor",
        "1 + accepted / drafts",
        "check that drafter and target belong together",
    ),
    _C.METRIC_FAMILY_ABSENT: CodeEntry(
        "a family of metrics does not exist in this configuration: its values are unknown", "names on the page", _NONE
    ),
    _C.SCHEMA_UNKNOWN: CodeEntry(
        "a result file has keys or units that are not known",
        "its keys",
        "name the schema and its units, or leave it out",
    ),
    _C.RECEIPT_NOT_VERIFIABLE: CodeEntry(
        "a receipt's status cannot be derived from executed checks",
        "checks that are missing, prose or unexecuted",
        "issue a receipt whose every status is computed",
    ),
    _C.DIGEST_KIND: CodeEntry(
        "digests of different kinds name the same image", "kind of each digest", "compare digests of one kind only"
    ),
    _C.DIGEST_MISMATCH: CodeEntry(
        "digests of one kind differ: these are different images", "the two digests", "run the image that was promised"
    ),
    _C.TAG_NOT_IDENTITY: CodeEntry(
        "only a tag is recorded, and a tag can move", "reference without a digest", "record the manifest digest"
    ),
    _C.WHEEL_CUDA_MAJOR: CodeEntry(
        "an installed library was built for another CUDA major version",
        "CUDA majors in the image",
        "install the matching wheel",
    ),
    _C.BUILD_STATUS_NOT_BY_WORD: CodeEntry(
        "a build is judged by its exit status and export line, not by words in its log",
        "exit status and export line",
        "keep the exit status with the log",
    ),
}
