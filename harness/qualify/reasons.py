# SPDX-License-Identifier: Apache-2.0
"""Reason codes: stable words that explain every status other than `passed`.

Each has one line of meaning and one of remedy; `docs/reason-codes.md` is generated from this table.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class ReasonCode(StrEnum):
    # not run, by a rule
    NOT_IN_PROFILE = "not_in_profile"
    NOT_SUPPORTED = "not_supported"
    NOT_PERMITTED = "not_permitted"
    # evidence
    EVIDENCE_MISSING = "evidence_missing"
    PARSE_FAILED = "parse_failed"
    METRIC_MISSING = "metric_missing"
    RANK_MISSING = "rank_missing"
    RANKS_DISAGREE = "ranks_disagree"
    # the run
    START_TIMEOUT = "start_timeout"
    CRASHED = "crashed"
    INTERRUPTED = "interrupted"
    DIRTY_HARNESS = "dirty_harness"
    LEFTOVER = "leftover"
    # pins
    VERSION_MISMATCH = "version_mismatch"
    LOCK_MISMATCH = "lock_mismatch"
    CODE_MODIFIED = "code_modified"
    DIGEST_MISMATCH = "digest_mismatch"
    ENVIRONMENT_INCOMPLETE = "environment_incomplete"
    # operator
    OP_SCHEMA_MISMATCH = "op_schema_mismatch"
    OP_CASE_FAILED = "op_case_failed"
    # serving
    WORLD_SIZE_MISMATCH = "world_size_mismatch"
    DEVICE_SHARED = "device_shared"
    WRONG_MODEL = "wrong_model"
    REQUEST_FAILED = "request_failed"
    USAGE_MISMATCH = "usage_mismatch"
    STREAM_BROKEN = "stream_broken"
    OUTPUT_DEGENERATE = "output_degenerate"
    OUTPUT_NOT_REPRODUCED = "output_not_reproduced"
    # graphs
    GRAPH_CONFIG_MISMATCH = "graph_config_mismatch"
    GRAPH_SHAPE_MISSING = "graph_shape_missing"
    GRAPH_SHAPE_EXTRA = "graph_shape_extra"
    GRAPH_RANKS_DIFFER = "graph_ranks_differ"
    GRAPH_DOWNGRADED = "graph_downgraded"
    GRAPH_NOT_REPLAYED = "graph_not_replayed"
    GRAPH_STEPS_UNCOUNTED = "graph_steps_uncounted"
    GRAPH_LOG_DISAGREES = "graph_log_disagrees"
    # plugin
    PLUGIN_INACTIVE = "plugin_inactive"
    PLUGIN_NOT_OFF = "plugin_not_off"
    PLUGIN_METHOD_MISMATCH = "plugin_method_mismatch"
    PLUGIN_ADDRESS_MOVED = "plugin_address_moved"
    PLUGIN_NOT_RESERVED = "plugin_not_reserved"
    PLUGIN_FELL_BACK = "plugin_fell_back"
    PLUGIN_CHANGES_OUTPUT = "plugin_changes_output"
    PLUGIN_CHANGES_KV = "plugin_changes_kv"
    # memory
    ADMISSION_MISSING = "admission_missing"
    ADMISSION_DISAGREES = "admission_disagrees"
    MEMORY_GREW = "memory_grew"
    ALLOCATION_RETRY = "allocation_retry"
    KV_BELOW_FLOOR = "kv_below_floor"
    LOAD_TOO_SMALL = "load_too_small"
    ADMISSION_UNEXPLAINED = "admission_unexplained"
    RESERVATION_NOT_COUNTED = "reservation_not_counted"
    # KV restore
    BYTES_DIFFER = "bytes_differ"
    BLOCK_NO_COLD = "block_no_cold"
    GROUP_EMPTY = "group_empty"
    TOO_FEW_GROUPS = "too_few_groups"
    RESTORE_SHORT = "restore_short"
    COLD_NOT_COLD = "cold_not_cold"
    COLD_DIFFERS_FROM_CONTROL = "cold_differs_from_control"
    EXTERNAL_TOKENS_MISMATCH = "external_tokens_mismatch"
    COUNTER_MISMATCH = "counter_mismatch"
    LOCAL_HIT = "local_hit"
    TIER_MISMATCH = "tier_mismatch"
    STORED_FILES_MISMATCH = "stored_files_mismatch"
    RANKS_IDENTICAL = "ranks_identical"
    NOT_POISONED = "not_poisoned"
    NOT_RESTARTED = "not_restarted"
    NEGATIVE_CONTROL_PASSED = "negative_control_passed"
    NEGATIVE_CONTROL_MISSING = "negative_control_missing"
    NEGATIVE_CONTROL_UNEXPECTED = "negative_control_unexpected"
    CAPTURE_FAILED = "capture_failed"
    TRANSFER_MODE_MISMATCH = "transfer_mode_mismatch"
    # throughput
    TOKEN_COUNT_MISMATCH = "token_count_mismatch"
    IDENTITY_BROKEN = "identity_broken"
    COUNTER_RESET = "counter_reset"
    INSUFFICIENT_SAMPLES = "insufficient_samples"
    SINGLE_REPLICATE = "single_replicate"
    AUTOCORRELATED = "autocorrelated"
    NOT_STEADY = "not_steady"
    LATE_DROP = "late_drop"
    STALLED = "stalled"
    CLIENT_LIMITED = "client_limited"
    GPU_THROTTLED = "gpu_throttled"
    # service
    SERVICE_ERROR = "service_error"
    CLIENT_ERROR = "client_error"
    UNCLEAN_STOP = "unclean_stop"


class Explanation(NamedTuple):
    meaning: str
    remedy: str


CATALOGUE: dict[ReasonCode, Explanation] = {
    ReasonCode.NOT_IN_PROFILE: Explanation("the profile does not ask for this claim", "use a profile that requires it"),
    ReasonCode.NOT_SUPPORTED: Explanation(
        "this engine or target cannot show the claim", "run on an engine that can, e.g. CUDA for graphs"
    ),
    ReasonCode.NOT_PERMITTED: Explanation(
        "the target does not offer the interface that the evidence needs",
        "start the server with development endpoints on loopback, or use a local or image target",
    ),
    ReasonCode.EVIDENCE_MISSING: Explanation(
        "evidence that the claim needs is not there, or is of another boot or run",
        "read the run's error in evidence/run.json and run again",
    ),
    ReasonCode.PARSE_FAILED: Explanation(
        "an evidence file is not of the expected form", "check versions; file a bug with the named file"
    ),
    ReasonCode.METRIC_MISSING: Explanation(
        "a metric that the claim needs was not exposed", "check the engine version and --disable-log-stats"
    ),
    ReasonCode.RANK_MISSING: Explanation("a rank left no evidence", "look for the rank's last lines in the engine log"),
    ReasonCode.RANKS_DISAGREE: Explanation("ranks report different values", "see the values per rank"),
    ReasonCode.START_TIMEOUT: Explanation(
        "the engine was not ready within its bound",
        "see the engine's last lines; raise timeouts.start_seconds for an empty compile cache",
    ),
    ReasonCode.CRASHED: Explanation(
        "the engine or the cache server ended by itself", "see the first fatal line of its log"
    ),
    ReasonCode.INTERRUPTED: Explanation("the run was stopped by the user or a signal", "run again"),
    ReasonCode.DIRTY_HARNESS: Explanation(
        "the harness is not a clean, committed revision", "commit or revert local changes and run again"
    ),
    ReasonCode.LEFTOVER: Explanation(
        "a process, port or shared-memory segment outlived the run", "remove what is named; file a bug"
    ),
    ReasonCode.VERSION_MISMATCH: Explanation(
        "a version seen inside a worker is not the pinned one", "rebuild the engine from its lock"
    ),
    ReasonCode.LOCK_MISMATCH: Explanation(
        "the installed set is not the locked set", "rebuild the engine environment from its lock"
    ),
    ReasonCode.CODE_MODIFIED: Explanation(
        "an installed file differs from the hash its package recorded", "reinstall the named package"
    ),
    ReasonCode.DIGEST_MISMATCH: Explanation(
        "a digest is not the expected one", "check that model, image and receipt belong together"
    ),
    ReasonCode.ENVIRONMENT_INCOMPLETE: Explanation(
        "a required fact of the environment could not be observed",
        "see the null and its reason in the evidence",
    ),
    ReasonCode.OP_SCHEMA_MISMATCH: Explanation(
        "the registered operator schema is not the promised one", "install the matching vllm-qout"
    ),
    ReasonCode.OP_CASE_FAILED: Explanation(
        "a case of the operator's contract failed", "see the named case; do not serve with this operator"
    ),
    ReasonCode.WORLD_SIZE_MISMATCH: Explanation(
        "the number of workers is not the promised tensor-parallel size", "check the server's command line"
    ),
    ReasonCode.DEVICE_SHARED: Explanation(
        "two ranks share a device or a core", "give each rank its own device or core"
    ),
    ReasonCode.WRONG_MODEL: Explanation("the server serves another model", "check the model argument"),
    ReasonCode.REQUEST_FAILED: Explanation(
        "a request of the harness failed", "see its record and the engine log at that time"
    ),
    ReasonCode.USAGE_MISMATCH: Explanation("usage counts disagree with the tokens delivered", "see the named request"),
    ReasonCode.STREAM_BROKEN: Explanation(
        "a stream ended without a finish reason, or repeated or lost text", "see the named request"
    ),
    ReasonCode.OUTPUT_DEGENERATE: Explanation(
        "an answer repeats one token, so it proves little", "use varied prompts or a real checkpoint"
    ),
    ReasonCode.OUTPUT_NOT_REPRODUCED: Explanation(
        "the same greedy request gave other tokens", "check batch invariance; see the named requests"
    ),
    ReasonCode.GRAPH_CONFIG_MISMATCH: Explanation(
        "the engine holds another graph mode, other sizes or another runner than the profile names",
        "see the engine's warnings: an attention backend may not allow the mode",
    ),
    ReasonCode.GRAPH_SHAPE_MISSING: Explanation(
        "a rank lacks a graph that the capture rule predicts", "see the sizes per rank, and `qualify expect`"
    ),
    ReasonCode.GRAPH_SHAPE_EXTRA: Explanation(
        "a rank holds a graph that the capture rule does not predict",
        "check profile and engine version; see `qualify expect`",
    ),
    ReasonCode.GRAPH_RANKS_DIFFER: Explanation(
        "the ranks captured, chose or replayed different graphs", "see the values per rank; a collective may hang"
    ),
    ReasonCode.GRAPH_DOWNGRADED: Explanation(
        "steps ran in a lesser mode than a captured graph allows", "see the steps named in the claim"
    ),
    ReasonCode.GRAPH_NOT_REPLAYED: Explanation(
        "a graph that the load reached was not replayed as often as it was chosen, or never",
        "see the counts by size in the claim",
    ),
    ReasonCode.GRAPH_STEPS_UNCOUNTED: Explanation(
        "the workers counted fewer steps than the engine's metrics", "the counters miss a path; file a bug"
    ),
    ReasonCode.GRAPH_LOG_DISAGREES: Explanation(
        "the log counts other graphs than the workers hold", "see both counts; the log speaks for rank 0 only"
    ),
    ReasonCode.PLUGIN_INACTIVE: Explanation(
        "a rank does not run the plugin's method on every attention layer",
        "see the rank's reason; VLLM_QOUT, VLLM_PLUGINS, and other plugins",
    ),
    ReasonCode.PLUGIN_NOT_OFF: Explanation(
        "the plugin is active in a boot that promises stock vLLM", "check how the engine was started"
    ),
    ReasonCode.PLUGIN_METHOD_MISMATCH: Explanation(
        "the replaced method is not the pinned one", "install stock vLLM of the pinned version"
    ),
    ReasonCode.PLUGIN_ADDRESS_MOVED: Explanation(
        "q_out had another address or size at another moment", "do not serve: a graph may write to freed memory"
    ),
    ReasonCode.PLUGIN_NOT_RESERVED: Explanation(
        "a buffer is missing, of the wrong size, or was not there before the capture of the memory profile",
        "see the rank's buffers; its memory is then not in the admitted figures",
    ),
    ReasonCode.PLUGIN_FELL_BACK: Explanation(
        "calls went to stock vLLM although the plugin is active", "check the KV-cache dtype; see the counters"
    ),
    ReasonCode.PLUGIN_CHANGES_OUTPUT: Explanation(
        "greedy answers differ between the boots with and without the plugin", "see the named requests"
    ),
    ReasonCode.PLUGIN_CHANGES_KV: Explanation(
        "KV bytes differ between the boots with and without the plugin", "see the named blocks"
    ),
    ReasonCode.ADMISSION_MISSING: Explanation(
        "the engine did not report its KV admission", "check the engine log level and /metrics"
    ),
    ReasonCode.ADMISSION_DISAGREES: Explanation(
        "sources of the KV admission disagree", "see log, metrics and workers in the claim"
    ),
    ReasonCode.MEMORY_GREW: Explanation(
        "memory grew past the admitted figure under load", "see the allocator statistics per rank"
    ),
    ReasonCode.ALLOCATION_RETRY: Explanation(
        "the allocator had to retry under load", "lower utilization or the largest batch"
    ),
    ReasonCode.KV_BELOW_FLOOR: Explanation(
        "fewer KV tokens were admitted than the profile demands", "give the engine more memory"
    ),
    ReasonCode.LOAD_TOO_SMALL: Explanation(
        "no step of the load was as large as the engine allows, or a planned prompt was not computed",
        "add a prompt of engine.max_num_batched_tokens or more; see prefill.json",
    ),
    ReasonCode.ADMISSION_UNEXPLAINED: Explanation(
        "the admitted KV bytes do not follow from the engine's own figures", "see the figures per rank"
    ),
    ReasonCode.RESERVATION_NOT_COUNTED: Explanation(
        "the engine's consumed memory does not hold the plugin's reservation",
        "compare the boots with and without the plugin, rank by rank",
    ),
    ReasonCode.BYTES_DIFFER: Explanation(
        "restored KV bytes differ from the cold ones", "do not serve restored prompts with this image"
    ),
    ReasonCode.BLOCK_NO_COLD: Explanation(
        "a restored block was never seen cold", "the arms did not serve the same prompt; file a bug"
    ),
    ReasonCode.GROUP_EMPTY: Explanation(
        "a KV-cache group has no restored block, so nothing was compared", "use a longer prompt"
    ),
    ReasonCode.TOO_FEW_GROUPS: Explanation(
        "the model has fewer KV-cache groups than the profile demands", "use a hybrid model"
    ),
    ReasonCode.RESTORE_SHORT: Explanation(
        "a group restored fewer blocks than attention will read", "the connector lost blocks; see the group"
    ),
    ReasonCode.COLD_NOT_COLD: Explanation(
        "the cold arm was served from a cache", "use an empty storage folder and a fresh engine"
    ),
    ReasonCode.COLD_DIFFERS_FROM_CONTROL: Explanation(
        "cold bytes differ from those without the connector",
        "kernels are not deterministic, or storing alters KV",
    ),
    ReasonCode.EXTERNAL_TOKENS_MISMATCH: Explanation(
        "the engine restored another number of tokens than predicted", "see expected and observed per case"
    ),
    ReasonCode.COUNTER_MISMATCH: Explanation(
        "counters of the engine, its workers and LMCache disagree", "see the counters in the claim"
    ),
    ReasonCode.LOCAL_HIT: Explanation(
        "the local prefix cache served tokens in a restore arm", "the reset did not take; run again"
    ),
    ReasonCode.TIER_MISMATCH: Explanation(
        "tokens came from another storage tier than the arm intends", "see the tier counters"
    ),
    ReasonCode.STORED_FILES_MISMATCH: Explanation(
        "stored files do not equal the engine's cold bytes", "the store path is wrong, not the load path"
    ),
    ReasonCode.RANKS_IDENTICAL: Explanation(
        "the ranks hold the same KV bytes, so a swap of ranks would pass", "use weights that differ by rank"
    ),
    ReasonCode.NOT_POISONED: Explanation(
        "KV memory was not overwritten between cold and restore", "stale bytes could pass; file a bug"
    ),
    ReasonCode.NOT_RESTARTED: Explanation(
        "a process of the cold arm survived into the restart arm", "file a bug with the evidence"
    ),
    ReasonCode.NEGATIVE_CONTROL_PASSED: Explanation(
        "a deliberately broken restore was not caught", "the proof is void; file a bug with the evidence"
    ),
    ReasonCode.NEGATIVE_CONTROL_MISSING: Explanation("a negative control was not run", "the proof is void; run again"),
    ReasonCode.NEGATIVE_CONTROL_UNEXPECTED: Explanation(
        "a negative control showed other differences than its damage", "the proof is void; see the control's places"
    ),
    ReasonCode.CAPTURE_FAILED: Explanation(
        "a worker could not read its KV blocks", "check that the engine is of the pinned version; see the error"
    ),
    ReasonCode.TRANSFER_MODE_MISMATCH: Explanation(
        "the connector used another transfer mode than the profile names", "check LMCACHE_MP_TRANSFER_MODE"
    ),
    ReasonCode.TOKEN_COUNT_MISMATCH: Explanation(
        "the engine's token counter and the sum of usage disagree",
        "another client used the server, or tokens were lost",
    ),
    ReasonCode.IDENTITY_BROKEN: Explanation(
        "figures that must agree by arithmetic do not", "see the identity named in the claim"
    ),
    ReasonCode.COUNTER_RESET: Explanation(
        "a counter fell or the process start time changed within a window", "the engine restarted; run again"
    ),
    ReasonCode.INSUFFICIENT_SAMPLES: Explanation(
        "too few samples for an interval", "lengthen throughput.window_seconds"
    ),
    ReasonCode.SINGLE_REPLICATE: Explanation(
        "one boot was measured, so the interval is of that boot and not of the engine", "add boots to the profile"
    ),
    ReasonCode.AUTOCORRELATED: Explanation(
        "batches are too short against the autocorrelation time", "lengthen throughput.window_seconds"
    ),
    ReasonCode.NOT_STEADY: Explanation("throughput drifted within the window", "check clocks and other load"),
    ReasonCode.LATE_DROP: Explanation("throughput fell at the end of the window", "check clocks and other load"),
    ReasonCode.STALLED: Explanation(
        "no token arrived for longer than the profile allows", "see the engine log at that time"
    ),
    ReasonCode.CLIENT_LIMITED: Explanation(
        "the client may have been the limit", "run the client on another core or host"
    ),
    ReasonCode.GPU_THROTTLED: Explanation(
        "power or heat slowed a GPU down in the window", "look at its power limit and cooling, and run again"
    ),
    ReasonCode.SERVICE_ERROR: Explanation(
        "the service failed in a way a user would feel", "see phase, line and request in the claim"
    ),
    ReasonCode.CLIENT_ERROR: Explanation(
        "the server refused a request of the harness as malformed", "a defect of the harness; file a bug"
    ),
    ReasonCode.UNCLEAN_STOP: Explanation(
        "the engine had to be killed, or left something behind", "see the boot's record"
    ),
}
