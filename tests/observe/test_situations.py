# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501 - log lines stand here as an engine writes them
"""The 45 situations of public vLLM reports, each as a small log or fact of our own with its verdict and code.

Numbers in test names are those of the situation table in `docs/explain.md`.
"""

from __future__ import annotations

from datetime import datetime

import pytest
from qualify.observe.codes import EvidenceCode as Code
from qualify.observe.errors import classify
from qualify.observe.facts import CapturePass, ErrorKind, Phase, Readiness, Role
from qualify.observe.graphs import size_grid
from qualify.observe.log import read
from qualify.observe.metrics import delta, parse
from qualify.observe.restore import RestoreFacts, judge_restore
from qualify.observe.speculation import acceptance, judge_acceptance, judge_log_lengths
from qualify.observe.surroundings import (
    BenchResult,
    DigestKind,
    ForeignCheck,
    SharedMemory,
    judge_build,
    judge_cuda_majors,
    judge_digests,
    judge_foreign_receipt,
    judge_reference,
    judge_shared_memory,
    read_result,
)
from qualify.observe.triage import ClientFacts, Side, Verdict, judge_kv_floor, overall, triage

API, CORE = "(APIServer pid=10)", "(EngineCore pid=20)"
PIECEWISE, FULL = "Capturing CUDA graphs (PIECEWISE)", "Capturing CUDA graphs (FULL)"
V1_MIXED = "Capturing CUDA graphs (mixed prefill-decode, PIECEWISE)"
V1_DECODE = "Capturing CUDA graphs (decode, FULL)"


def info(who, text, level="INFO", time="11-30 10:00:00"):
    return f"{who} {level} {time} [somewhere.py:7] {text}"


def worker(rank):
    return f"(Worker_TP{rank} pid={30 + rank})"


def bar(label, total, upto=None, step=1, end="\n"):
    """One physical line of a bar that was drawn every `step` graphs."""
    upto = total if upto is None else upto
    states = sorted({*range(0, upto + 1, step), upto})
    drawn = [
        f"\r{label}: {100 * n // total:3}%|{'█' * (10 * n // total):10}| {n}/{total} [00:0{n % 10}<00:01, 2.0it/s]"
        for n in states
    ]
    return "".join(drawn) + end


def start(version="0.32.0", world=2, runner="V2", dump="", api=True):
    lines = [info(API, f"█  version {version}")] if api else []
    config = f"model='/models/m', tensor_parallel_size={world}, enforce_eager=False, {dump}"
    lines.append(info(CORE, f"Initializing a V1 LLM engine (v{version}) with config: {config}"))
    for rank in range(world):
        text = f"world_size={world} rank={rank} local_rank={rank} distributed_init_method=file:///tmp/x backend=nccl"
        lines.append(info(f"(Worker pid={30 + rank})", text))
    if runner == "V2":
        lines.append(info("(Worker pid=30)", "Using V2 Model Runner"))
    lines += [info(worker(rank), "Model loading took 1.0 GiB memory and 2.0 seconds") for rank in range(world)]
    return lines


def finished(ranks, gib=0.1):
    return [info(worker(rank), f"Graph capturing finished in 2 secs, took {gib} GiB") for rank in ranks]


KV = info(CORE, "GPU KV cache size: 100,000 tokens, Maximum concurrency for 1,000 tokens per request: 100.00x")
READY = ["INFO:     Started server process [10]", "INFO:     Application startup complete."]


def access(status, count=1, path="POST /v1/completions"):
    return [f'INFO:     127.0.0.1:{4000 + n} - "{path} HTTP/1.1" {status}' for n in range(count)]


def log(*parts):
    """Lines, lists of lines and bars (which end themselves) as one log."""
    text = ""
    for part in parts:
        for line in [part] if isinstance(part, str) else part:
            text += line if line.startswith("\r") else line + "\n"
    return text.encode()


def judge(data, *, stop=None, status=None, kernel=None, client=None, expired=False):
    facts = read([data])
    findings = triage(
        facts, stop_requested_at=stop, exit_status=status, kernel_log=kernel, client=client, deadline_expired=expired
    )
    return facts, findings


def found(findings, code):
    (finding,) = [one for one in findings if one.code is code]
    return finding


def expect(findings, verdict, code, of_code=None):
    """The whole and the one finding have their verdicts; `of_code` differs where the code alone does not decide."""
    assert overall(findings) is verdict, [(one.verdict, one.code, one.detail) for one in findings]
    finding = found(findings, code)
    assert finding.verdict is (of_code or verdict)
    return finding


def final(facts):
    return {
        (fact.value.role, fact.value.kind): fact.value.captured
        for fact in facts.captures
        if fact.capture_pass is CapturePass.FINAL
    }


def traceback(who, exception, level="ERROR"):
    frames = ["Traceback (most recent call last):", '  File "/usr/lib/x.py", line 1, in f', "    raise something()"]
    return [info(who, text, level) for text in [*frames, exception]]


DRAFTER_LABELS = ("Capturing dspark CUDA graphs (FULL)", "Capturing DFlash context-KV CUDA graphs (FULL)")


def test_01_two_passes():
    """Bars that come twice under the same labels are two passes: the last one counts, and they are never added."""
    labels = [(PIECEWISE, 9), (FULL, 8), (DRAFTER_LABELS[0], 8), (DRAFTER_LABELS[1], 9)]
    once = [bar(label, total) for label, total in labels]
    data = log(start(world=4), once, finished(range(4)), KV, once, finished(range(4)), READY)
    facts, findings = judge(data)
    expect(findings, Verdict.PASS, Code.CAPTURE_FINAL_PASS)
    assert final(facts) == {
        (Role.TARGET, "PIECEWISE"): 9, (Role.TARGET, "FULL"): 8, (Role.DRAFTER, "FULL"): 8, (Role.CONTEXT_KV, "FULL"): 9,
    }  # fmt: skip


def test_02_bars_behind_their_records():
    """Bars on stderr may stand behind the records that close them; ranks may estimate differently."""
    labels = [(PIECEWISE, 11), (FULL, 8), (DRAFTER_LABELS[0], 8), (DRAFTER_LABELS[1], 11)]
    once = [bar(label, total) for label, total in labels]
    pools = [
        info(
            worker(rank),
            f"CUDA graph pool memory: 0.2 GiB (actual), 0.{3 + rank} GiB (estimated), difference: 0.1 GiB.",
        )
        for rank in range(2)
    ]
    data = log(start(), once, finished(range(2)), KV, finished(range(2)), pools, once, READY)
    facts, findings = judge(data)
    expect(findings, Verdict.PASS, Code.STDERR_REORDERED)
    assert list(final(facts).values()) == [11, 8, 8, 11]
    assert found(findings, Code.RANKS_DISAGREE).verdict is Verdict.FACT


def test_03_counts_without_output():
    """Right token counts with empty answers prove the counts and nothing about the content."""
    findings = judge_restore(RestoreFacts(13_571, 512, hit_tokens=13_312))
    expect(findings, Verdict.INCONCLUSIVE, Code.NO_OUTPUT_TO_COMPARE)
    assert [one.code for one in findings] == [Code.NO_OUTPUT_TO_COMPARE]


def test_04_v1_speaks_for_rank_0():
    """V1 prints its capture on rank 0 only: rank 1 is unknown, in a coloured log full of access lines."""
    lines = start("0.13.0", runner=None)
    coloured = [line.replace("(Worker_TP0 pid=30)", "\x1b[0;36m(Worker_TP0 pid=30)\x1b[0;0m") for line in lines]
    bars = [bar(V1_MIXED, 51), bar(V1_DECODE, 35)]
    data = log(coloured, KV, bars, finished([0]), READY, access("200 OK", 3000))
    facts, findings = judge(data)
    expect(findings, Verdict.PASS, Code.V1_RANK0_ONLY)
    assert final(facts) == {(Role.TARGET, "PIECEWISE"): 51, (Role.TARGET, "FULL"): 35}
    assert facts.finished_ranks() == {0}
    assert facts.http == {200: 3000}


def test_05_sizes_rounded_for_drafts():
    """V1 rounds 35 configured sizes to 33 multiples of K+1; a heartbeat between the bars means nothing."""
    dump = f"num_spec_tokens=3, 'cudagraph_mode': <CUDAGraphMode.FULL_AND_PIECEWISE: (2, 1)>, 'cudagraph_capture_sizes': {list(size_grid(256))}"
    beat = info(CORE, "No available shared memory broadcast block found in 60 seconds. This typically happens")
    data = log(
        start("0.20.2", world=8, runner=None, dump=dump),
        KV,
        bar(V1_MIXED, 33),
        beat,
        bar(V1_DECODE, 33),
        finished([0]),
        READY,
    )
    facts, findings = judge(data)
    expect(findings, Verdict.PASS, Code.SIZES_ROUNDED_FOR_SPEC)
    assert len(facts.configured_sizes.value) == 35
    assert found(findings, Code.HEARTBEAT_BENIGN).verdict is Verdict.PASS


SHUTDOWN = info(API, "[shutdown] API server: shutdown triggered", time="11-30 11:00:00")


def died(time="11-30 11:00:00"):
    lines = [info(API, "AsyncLLM output_handler failed.", "ERROR", time)]
    return [*lines, *traceback(API, "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.")]


def test_06_errors_after_the_stop():
    """An EngineDeadError behind a requested stop is reported, not failed; so is graph memory above its estimate."""
    pool = info(worker(0), "CUDA graph pool memory: 0.9 GiB (actual), 0.4 GiB (estimated), difference: 0.5 GiB (55%).")
    data = log(
        start("0.25.1"),
        KV,
        bar(PIECEWISE, 5),
        bar(FULL, 4),
        finished(range(2)),
        pool,
        READY,
        access("200 OK"),
        SHUTDOWN,
        died(),
    )
    _, findings = judge(data, status=0)
    expect(findings, Verdict.PASS, Code.ERROR_AFTER_REQUESTED_STOP)
    assert found(findings, Code.GRAPH_MEMORY_ABOVE_ESTIMATE).verdict is Verdict.PASS


def test_06_stop_time_of_the_harness_decides():
    """Without a shutdown record, the harness's own stop time tells errors before it from errors after it."""
    data = log(
        start("0.25.1"), KV, bar(PIECEWISE, 5), bar(FULL, 4), finished(range(2)), READY, access("200 OK"), died()
    )
    data = data.replace(b"10:00:00 [somewhere.py:7] Traceback", b"11:00:00 [somewhere.py:7] Traceback")
    data = data.replace(b"10:00:00 [somewhere.py:7] vllm.v1", b"11:00:00 [somewhere.py:7] vllm.v1")
    before, after = datetime(2026, 11, 30, 10, 59, 59), datetime(2026, 11, 30, 11, 0, 1)
    expect(judge(data, stop=before)[1], Verdict.PASS, Code.ERROR_AFTER_REQUESTED_STOP)
    assert overall(judge(data, stop=after)[1]) is Verdict.FAIL
    assert overall(judge(data)[1]) is Verdict.FAIL


REFUSAL = (
    "ValueError: To serve at least one request with the model's max seq len (131072), (18.35 GiB KV cache is needed, which "
    "is larger than the available KV cache memory (8.72 GiB). Based on the available memory, the estimated maximum model "
    "length is 62272. Try increasing `gpu_memory_utilization`"
)
SECONDARY = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"


def test_07_admission_refused():
    """A refused admission is the cause; configured counts are not captured graphs and KV tokens stay unknown."""
    counts = info(worker(0), "Profiling CUDA graph memory: PIECEWISE=9 (largest=48), FULL=7 (largest=48)")
    failed = [info(CORE, "EngineCore failed to start.", "ERROR"), *traceback(CORE, REFUSAL)]
    data = log(start(runner=None), counts, failed, *traceback("", SECONDARY))
    facts, findings = judge(data, status=1)
    finding = expect(findings, Verdict.FAIL, Code.KV_ADMISSION_REFUSED)
    refusal = facts.kv_refusal.value
    assert (
        refusal.max_model_len, refusal.needed_gib, refusal.available_gib, refusal.estimated_max_len,
    ) == (131072, 18.35, 8.72, 62272)  # fmt: skip
    assert (facts.kv_tokens, facts.captures, final(facts)) == (None, (), {})
    assert facts.configured_counts[0].value.piecewise == 9
    assert finding.phase is Phase.START


def test_08_bars_skip_numbers():
    """Updates skip numbers, and the kinds have different totals; neither is a fault."""
    data = log(
        start("0.25.1", runner=None), KV, bar(V1_MIXED, 33, step=7), bar(V1_DECODE, 17, step=5), finished([0]), READY
    )
    facts, findings = judge(data)
    expect(findings, Verdict.PASS, Code.CAPTURE_SETS_DIFFER_BY_KIND)
    assert list(final(facts).values()) == [33, 17]


def test_09_negative_graph_memory():
    """Capture that frees memory has finished; what its graphs take is unknown."""
    data = log(start(world=1), KV, bar(PIECEWISE, 5), bar(FULL, 4), finished([0], gib=-0.41), READY)
    facts, findings = judge(data)
    expect(findings, Verdict.PASS, Code.GRAPH_MEMORY_NEGATIVE)
    assert facts.capture_finished[0].value.memory_known is False


def test_10_long_capture_small_pool():
    """A capture of 36 minutes offline passes; a KV pool below its floor fails; there is no server to be ready."""
    line = bar(V1_MIXED, 5).replace("00:05<00:01", "36:04<00:00")
    kv = info(CORE, "GPU KV cache size: 1,856 tokens")
    facts, findings = judge(log(start("0.26.1", runner=None, api=False), kv, line, bar(V1_DECODE, 5), finished([0])))
    assert overall(findings) is Verdict.PASS
    assert found(findings, Code.CAPTURE_FINAL_PASS).verdict is Verdict.PASS
    assert facts.captures[0].value.elapsed == "36:04"
    assert facts.ready is Readiness.NOT_APPLICABLE
    floor = judge_kv_floor(facts, 4_096)
    assert (floor.code, floor.verdict) == (Code.KV_BELOW_FLOOR, Verdict.FAIL)
    assert judge_kv_floor(facts, 1_856) is None


def test_11_no_bars():
    """Without bars the count is unknown, never 0 of 0."""
    lines = ["INFO 04-01 10:00:00 [api_server.py:1] vLLM API server version 0.8.3",
             "INFO 04-01 10:00:01 [core.py:61] Initializing a V1 LLM engine (v0.8.3) with config: model='m', tensor_parallel_size=1",
             "INFO 04-01 10:00:02 [gpu_model_runner.py:1] Model loading took 14.99 GiB and 3.0 seconds",
             "INFO 04-01 10:00:03 [kv_cache_utils.py:1] GPU KV cache size: 40,960 tokens",
             "INFO 04-01 10:00:03 [kv_cache_utils.py:2] Maximum concurrency for 4,096 tokens per request: 10.00x",
             "INFO 04-01 10:00:09 [gpu_model_runner.py:9] Graph capturing finished in 20 secs, took 0.50 GiB"]  # fmt: skip
    facts, findings = judge(log(lines, READY))
    expect(findings, Verdict.INCONCLUSIVE, Code.CAPTURE_BARS_ABSENT)
    assert facts.captures == ()
    assert (facts.kv_tokens.value, facts.concurrency.value.times) == (40_960, 10.0)
    assert facts.ready is Readiness.YES


def test_12_configured_counts_only():
    """Planned counts without bars are offered as configured, not as captured; readiness is unknown, not false."""
    counts = info(worker(0), "Profiling CUDA graph memory: PIECEWISE=51 (largest=512), FULL=35 (largest=256)")
    data = log(start("0.26.1", runner=None), counts, KV, finished([0]), access("200 OK", 1392))
    facts, findings = judge(data)
    finding = expect(findings, Verdict.INCONCLUSIVE, Code.CAPTURE_CONFIGURED_ONLY)
    assert "configured, not captured" in finding.detail
    assert facts.ready is Readiness.UNKNOWN
    assert facts.http == {200: 1392}


def test_13_client_errors():
    """Refused prompts make ERROR records and tracebacks; they are the client's, and are counted apart."""
    one = [
        info(API, "Error in preprocessing prompt inputs", "ERROR"),
        *traceback(API, "ValueError: This model's maximum context length is 4096 tokens. However, you requested 9000."),
        *access("400 Bad Request"),
    ]
    data = log(start("0.13.0", runner=None), KV, bar(V1_MIXED, 51), finished([0]), READY, access("200 OK", 5), one * 11)
    facts, findings = judge(data)
    expect(findings, Verdict.PASS, Code.CLIENT_ERROR_ONLY)
    assert (facts.counts.client_errors, facts.counts.error_tracebacks) == (11, 11)
    assert facts.counts.errors == 11 * 5
    assert (facts.http_class(2), facts.http_class(4)) == (5, 11)


def test_14_labels_follow_the_runner():
    """A recent version with V1 labels runs V1: the label set is no sign of the version."""
    data = log(start("0.26.1", world=1, runner=None), KV, bar(V1_MIXED, 7), bar(V1_DECODE, 5), finished([0]), READY)
    facts, findings = judge(data)
    expect(findings, Verdict.PASS, Code.LABEL_FOLLOWS_RUNNER)
    assert facts.runner is None
    assert facts.runner_from_labels == "V1"


def test_15_import_error():
    """An import error before any engine line is a defect of the image; all engine values are unknown."""
    lines = ["Traceback (most recent call last):", '  File "/usr/bin/vllm", line 3, in <module>', "    from vllm import main",
             "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory"]  # fmt: skip
    facts, findings = judge(log(lines), status=1)
    finding = expect(findings, Verdict.FAIL, Code.IMAGE_DEPENDENCY_MISMATCH)
    assert finding.side is Side.IMAGE
    assert (facts.version, facts.kv_tokens, facts.captures) == (None, None, ())


def test_16_no_kv_memory():
    """The inner ValueError is the cause; the generic RuntimeError with an empty set is always secondary."""
    dump = "enforce_eager=True, "
    lines = [line.replace("enforce_eager=False, ", "") for line in start(runner=None, dump=dump, world=1)]
    inner = "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`"
    data = log(
        lines, info(CORE, "EngineCore failed to start.", "ERROR"), traceback(CORE, inner), traceback(API, SECONDARY)
    )
    _, findings = judge(data, status=1)
    finding = expect(findings, Verdict.FAIL, Code.KV_NO_MEMORY)
    assert "No available memory" in finding.detail
    assert found(findings, Code.CAPTURE_NOT_APPLICABLE).verdict is Verdict.FACT


@pytest.mark.parametrize(
    "text",
    [
        "vllm: error: unrecognized arguments: --no-such-flag",
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig",
    ],
)
def test_16_usage_error(text):
    """A refused flag or configuration is a usage error, with no engine value known."""
    lines = ["usage: vllm serve [model_tag] [options]", text] if "error:" in text.split()[1] else traceback(API, text)
    _, findings = judge(log(lines), status=2)
    assert expect(findings, Verdict.FAIL, Code.USAGE_ERROR).side is Side.HARNESS


def test_17_envelope_on_records_only():
    """Records carry the compose prefix and bars do not; missing dispatch keys while profiling disable nothing."""
    keys = info(worker(0), "cudagraph dispatching keys are not initialized. No cudagraph will be used.", "WARNING")
    records = [f"vllm-1  | {line}" for line in [*start("0.19.0", world=1, runner=None), keys, KV]]
    ready = [f"vllm-1  | {line}" for line in [*finished([0]), *READY]]
    facts, findings = judge(log(records, bar(V1_MIXED, 67), bar(V1_DECODE, 67), ready))
    expect(findings, Verdict.PASS, Code.ENVELOPE_PARTIAL)
    assert list(final(facts).values()) == [67, 67]
    assert facts.dispatch_keys_missing is not None
    assert facts.envelopes == {"compose"}


def test_18_file_ends_inside_a_bar():
    """A bar glued to shell trace lines that ends at 6 of 35 is 6 of 35, not a pass and not a failure."""
    kv = info(CORE, "GPU KV cache size: 171,904 tokens")
    glued = "\r" + f"{V1_MIXED}:   0%|          | 0/35 [00:00<?, ?it/s]+ echo waiting\n"
    data = log(start("0.11.0", runner=None), kv, glued, bar(V1_MIXED, 35, upto=6, end=""))
    facts, findings = judge(data)
    assert overall(findings) is Verdict.INCONCLUSIVE
    assert found(findings, Code.CAPTURE_INCOMPLETE_EOF).verdict is Verdict.INCONCLUSIVE
    (capture,) = (fact.value for fact in facts.captures)
    assert (capture.captured, capture.total) == (6, 35)
    assert facts.kv_tokens.value == 171_904


def stats(running, rate, usage=49.0, waiting=0, engine="000"):
    return info(
        API,
        f"Engine {engine}: Avg prompt throughput: {rate} tokens/s, Avg generation throughput: {rate} tokens/s, Running: {running} "
        f"reqs, Waiting: {waiting} reqs, GPU KV cache usage: {usage}%, Prefix cache hit rate: 0.0%",
    )


def served(*parts, **kwargs):
    """A log of a sound start with `parts` behind it."""
    return log(
        start(**kwargs), KV, bar(PIECEWISE, 5), bar(FULL, 4), finished(range(2)), READY, access("200 OK"), *parts
    )


def test_19_oom_with_half_a_pool():
    """Running out of memory with a half-empty KV pool is a failure outside the pool; prefixes may be square."""
    oom = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has 79.1 GiB of which 1.2 GiB is free."
    lines = [line.replace("(", "[", 1).replace(")", "]", 1).replace("somewhere.py", "v1/core/x.py") for line in
             [info("(EngineCore pid=20)", "EngineCore encountered a fatal error.", "ERROR"), *traceback(worker(3), oom)]]  # fmt: skip
    _, findings = judge(served(stats(200, 900.0), lines))
    finding = expect(findings, Verdict.FAIL, Code.OOM_OUTSIDE_KV_POOL)
    assert finding.rank == 3
    assert "wanted 1.50 GiB, free 1.2 GiB" in finding.detail


def test_20_profiling_override():
    """Sixteen blocks announced while profiling are not the admission."""
    line = "Overriding num_gpu_blocks=0 with num_gpu_blocks_override=16"
    data = log(start(), info(worker(0), line), info(worker(1), line), KV, bar(PIECEWISE, 5), finished(range(2)), READY)
    facts, findings = judge(data)
    expect(findings, Verdict.PASS, Code.PROFILING_OVERRIDE, Verdict.FACT)
    assert facts.kv_tokens.value == 100_000


def test_21_advice_is_no_measurement():
    """Available memory comes from its own line of rank 0; suggested utilisations are not read."""
    advice = (
        "CUDA graph memory profiling is enabled (default since v0.21.0). The current --gpu-memory-utilization=0.8500 is "
        "equivalent to --gpu-memory-utilization=0.8350 without. To maintain the same, increase to 0.8650."
    )
    summary = (
        "Free memory on device (22.1/23.6 GiB) on startup. Desired GPU memory utilization is (0.85, 20.1 GiB). Actual usage is "
        "12.1 GiB for weight, 0.9 GiB for peak activation, 0.1 GiB for non-torch memory, and 0.3 GiB for CUDAGraph memory. "
        "Replace gpu_memory_utilization config with `--kv-cache-memory=7000000000` (6.52 GiB)."
    )
    memory = [info(worker(rank), "Estimated CUDA graph memory: 0.36 GiB total") for rank in range(2)]
    memory += [
        info(worker(0), "Available KV cache memory: 6.87 GiB"),
        info(worker(0), advice),
        info(worker(0), summary),
    ]
    data = log(start("0.25.1", runner=None), memory, KV, bar(V1_MIXED, 7), finished([0]), READY)
    facts, findings = judge(data)
    expect(findings, Verdict.PASS, Code.ADVICE_NUMBERS_IGNORED, Verdict.FACT)
    assert {fact.rank: fact.value for fact in facts.available_kv} == {0: 6.87}
    assert {fact.rank: fact.value for fact in facts.graph_estimate} == {0: 0.36, 1: 0.36}
    assert (facts.memory_summary[0].value.weights_gib, facts.memory_summary[0].value.non_torch_gib) == (12.1, 0.1)


def test_22_oom_inside_capture():
    """One rank runs out of memory while graphs are captured; rank 0's bar just stops."""
    oom = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 64.00 MiB."
    failed = [info(worker(2), "WorkerProc hit an exception.", "ERROR"), *traceback(worker(2), oom)]
    core = [
        info(CORE, "EngineCore failed to start.", "ERROR"),
        *traceback(CORE, "RuntimeError: Worker failed with error"),
    ]
    data = log(
        start("0.20.0", world=4, runner=None), KV, bar(V1_MIXED, 67, upto=31), failed, core, *traceback(API, SECONDARY)
    )
    _, findings = judge(data, status=1)
    assert expect(findings, Verdict.FAIL, Code.CAPTURE_OOM).rank == 2


def test_23_heartbeat_during_a_compile():
    """One report of a busy worker during a compile, then ready: harmless."""
    beat = info(
        CORE, "No available shared memory broadcast block found in 60 seconds. This typically happens", "WARNING"
    )
    data = log(start(), beat, KV, bar(PIECEWISE, 5), bar(FULL, 4), finished(range(2)), READY)
    expect(judge(data)[1], Verdict.PASS, Code.HEARTBEAT_BENIGN)


def test_24_hidden_allocation():
    """A failed allocation inside an operator is out-of-memory without the words; it shows under load only."""
    hidden = 'RuntimeError: torch_call_dispatcher( "aten::new_empty", "", stack.data(), 268435463) API call failed'
    failed = [info(CORE, "EngineCore encountered a fatal error.", "ERROR"), *traceback(worker(0), hidden)]
    data = served(access("500 Internal Server Error", 395), failed)
    facts, findings = judge(data)
    assert overall(findings) is Verdict.FAIL
    assert found(findings, Code.RUNTIME_ALLOC_FAILURE).phase is Phase.SERVE
    assert found(findings, Code.SERVER_ERRORS).detail.startswith("395 ")
    assert overall(judge(served())[1]) is Verdict.PASS
    assert facts.http_class(5) == 395


def test_24_the_allocator_warns_before_an_operator_fails():
    """The allocator does not say for whom it found no memory; the operator's error does, also while the engine starts.

    The text is that of vLLM 0.32.0 on one H200 (receipts/gpu-tp1-ds4-tight). During a capture it is the capture's.
    """
    warned = "[rank0]:[W1130 18:50:30.1 CUDACachingAllocator.cpp:3933] memory allocation failed with OOM on device 0 while trying to allocate 2147483648 bytes (free: 1697775616, total: 150109880320)."
    hidden = 'RuntimeError: torch_call_dispatcher( "aten::new_empty", "", stack.data(), 1) API call failed at ops.h, line 939'
    failed = [info(worker(0), "WorkerProc hit an exception.", "ERROR"), *traceback(worker(0), hidden)]
    for data, phase in (
        (log(start(), KV, bar(PIECEWISE, 5), bar(FULL, 4), warned, failed), Phase.START),
        (served(warned, failed), Phase.SERVE),
    ):
        finding = expect(judge(data, status=1)[1], Verdict.FAIL, Code.RUNTIME_ALLOC_FAILURE)
        assert finding.phase is phase
        assert "2147483648 bytes" in finding.detail and "aten::new_empty" in finding.detail
    capturing = log(start(), KV, bar(PIECEWISE, 5, upto=2), warned, failed)
    expect(judge(capturing, status=1)[1], Verdict.FAIL, Code.CAPTURE_OOM)
    silent = log(start(), KV, bar(PIECEWISE, 5), bar(FULL, 4), failed)
    expect(judge(silent, status=1)[1], Verdict.FAIL, Code.RUNTIME_ALLOC_FAILURE)
    library = traceback(worker(0), "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate")
    starting = log(start(), KV, bar(PIECEWISE, 5), bar(FULL, 4), library)
    expect(judge(starting, status=1)[1], Verdict.FAIL, Code.OUT_OF_MEMORY)


def test_25_oom_at_warning_level():
    """The allocator's warning on every rank counts, though it is no ERROR record and has no header."""
    text = "[rank{}]:[W1130 10:00:01.1 CUDACachingAllocator.cpp:9] memory allocation failed with OOM on device {}. requested: 640 MiB, free: 490 MiB"
    data = served([text.format(rank, rank) for rank in range(8)])
    finding = expect(judge(data)[1], Verdict.FAIL, Code.OOM_WARNING_LEVEL)
    assert "wanted 640 MiB, free 490 MiB" in finding.detail


def test_26_silent_hang():
    """A start that hangs without a word fails by its deadline."""
    data = log(start())
    expect(judge(data, expired=True)[1], Verdict.FAIL, Code.START_TIMEOUT_SILENT)
    expect(judge(data)[1], Verdict.INCONCLUSIVE, Code.NOT_READY_AT_END)


def test_27_capture_error_on_one_rank():
    """A stream-capture error that rank 1 alone prints fails rank 1."""
    text = "RuntimeError: CUDA error: operation not permitted when stream is capturing"
    failed = [info(worker(1), "WorkerProc hit an exception.", "ERROR"), *traceback(worker(1), text)]
    data = log(start(), KV, bar(PIECEWISE, 5, upto=2), failed)
    assert expect(judge(data, status=1)[1], Verdict.FAIL, Code.CAPTURE_ERROR_RANK).rank == 1


def test_28_engine_dead_http_alive():
    """Tracebacks of two processes alternate; the engine's is the cause, and metrics that still answer prove nothing."""
    engine = traceback(CORE, "torch.AcceleratorError: CUDA error: an illegal memory access was encountered")
    api = traceback(API, "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.")
    mixed = [line for pair in zip(engine, api, strict=True) for line in pair]
    data = served(
        info(CORE, "EngineCore encountered a fatal error.", "ERROR"), mixed, access("200 OK", 3, "GET /metrics")
    )
    facts, findings = judge(data)
    finding = expect(findings, Verdict.FAIL, Code.ENGINE_DEAD_HTTP_ALIVE)
    assert "illegal memory access" in finding.detail
    assert facts.answered_after_fatal == 3
    assert [one.pid for one in facts.tracebacks] == [20, 10]


def test_29_xid_during_replay():
    """A driver fault in the kernel log fails a run whose own log is clean."""
    kernel = "[ 9.1] NVRM: Xid (PCI:0000:01:00): 13, pid=77, name=python3, Graphics SM Warp Exception"
    expect(judge(served(), kernel=kernel)[1], Verdict.FAIL, Code.XID_DURING_REPLAY)
    assert overall(judge(served(), kernel="")[1]) is Verdict.PASS


def test_30_stall():
    """Running requests with both rates 0 on consecutive lines, then the watchdog: a stall."""
    watchdog = "[rank0]:[E1130 10:09:00.1 ProcessGroupNCCL.cpp:1] Watchdog caught collective operation timeout"
    data = served([stats(1, 50.0)], [stats(1, 0.0)] * 12, watchdog)
    facts, findings = judge(data)
    finding = found(findings, Code.STALL_ZERO_THROUGHPUT)
    assert (overall(findings), finding.verdict) == (Verdict.FAIL, Verdict.FAIL)
    assert facts.throughput.longest_stall == 12


def test_30_the_client_knows_better():
    """Idle statistics while the client waits are a stall by the client's clock; a short gap is none."""
    waiting = ClientFacts(open_requests=1, seconds_without_token=240.0)
    expect(judge(served([stats(0, 0.0)]), client=waiting)[1], Verdict.FAIL, Code.STALL_ZERO_THROUGHPUT)
    short = ClientFacts(open_requests=1, seconds_without_token=18.5)
    assert overall(judge(served([stats(0, 0.0)]), client=short)[1]) is Verdict.PASS
    recovered = judge(served([stats(1, 0.0)] * 2, [stats(1, 9.0)]))[1]
    expect(recovered, Verdict.INCONCLUSIVE, Code.STALL_ZERO_THROUGHPUT)
    assert overall(judge(served([stats(1, 0.0), stats(1, 9.0)] * 3))[1]) is Verdict.PASS


def test_30_busy_to_the_end():
    """Reports of a busy worker with no progress behind them are no harmless heartbeats."""
    beat = info(CORE, "No available shared memory broadcast block found in 60 seconds. This typically happens")
    expect(judge(served([beat] * 5))[1], Verdict.INCONCLUSIVE, Code.STALL_ZERO_THROUGHPUT)
    expect(judge(served([beat] * 5, stats(1, 9.0)))[1], Verdict.PASS, Code.HEARTBEAT_BENIGN)


def test_31_wrong_content():
    """A cache reused by another process answers 38 of 38 wrongly with every request successful."""
    facts = RestoreFacts(9_000, 256, 8_960, 8_960, tries=38, wrong_tries=38, first_difference=0, other_process=True)
    expect(judge_restore(facts), Verdict.FAIL, Code.RESTORE_CONTENT_WRONG)


def test_32_several_chunks_with_a_drafter():
    """A restore of several chunks that is flaky with a drafter fails; one chunk or one try proves nothing."""
    flaky = RestoreFacts(9_000, 256, 8_960, 8_960, tries=10, wrong_tries=3, drafter=True)
    expect(judge_restore(flaky), Verdict.FAIL, Code.RESTORE_MULTI_CHUNK_DRAFTER)
    once = RestoreFacts(9_000, 256, 8_960, 8_960, tries=1, wrong_tries=0, drafter=True)
    expect(judge_restore(once), Verdict.INCONCLUSIVE, Code.RESTORE_MULTI_CHUNK_DRAFTER)
    one_chunk = RestoreFacts(300, 256, 256, 256, tries=10, wrong_tries=0, drafter=True)
    expect(judge_restore(one_chunk), Verdict.INCONCLUSIVE, Code.RESTORE_MULTI_CHUNK_DRAFTER)
    assert judge_restore(RestoreFacts(9_000, 256, 8_960, 8_960, tries=1, wrong_tries=0)) == ()


def test_33_nothing_hit():
    """All stored and none hit: ranks or processes hash the same tokens differently."""
    facts = RestoreFacts(9_000, 256, 0, 8_960, tries=1, wrong_tries=0)
    expect(judge_restore(facts), Verdict.FAIL, Code.RESTORE_ZERO_HITS)


def test_34_partial_restore():
    """Fewer tokens than whole chunks is a failure by counts, and so is the engine's own word for it."""
    facts = RestoreFacts(6_200, 256, 2_048, 6_144, tries=1, wrong_tries=0)
    expect(judge_restore(facts), Verdict.FAIL, Code.RESTORE_PARTIAL)
    text = "The number of retrieved tokens is less than the expected number of tokens! This should not happen! 0 of 9"
    expect(judge(served(info(worker(0), text, "ERROR")))[1], Verdict.FAIL, Code.RESTORE_PARTIAL)
    multiple = RestoreFacts(4_096, 256, 4_095, 4_096, tries=1, wrong_tries=0)
    expect(judge_restore(multiple), Verdict.INCONCLUSIVE, Code.RESTORE_PARTIAL)


def test_35_full_hit_other_output():
    """A full hit is no proof of content."""
    facts = RestoreFacts(9_000, 256, 8_960, 8_960, tries=1, wrong_tries=1, first_difference=0)
    expect(judge_restore(facts), Verdict.FAIL, Code.RESTORE_DIVERGES)


def page(**counters):
    """A metrics page with speculative-decoding counters and their `_created` neighbours."""
    lines = []
    for name, value in counters.items():
        values = enumerate(value) if isinstance(value, list) else [(None, value)]
        lines.append(f"# TYPE vllm:spec_decode_num_{name}_total counter")
        for position, number in values:
            label = 'engine="0"' + (f',position="{position}"' if position is not None else "")
            lines.append(f"vllm:spec_decode_num_{name}_total{{{label}}} {number}")
            lines.append(f"vllm:spec_decode_num_{name}_created{{{label}}} 1.796e+09")
    return parse("\n".join(["process_start_time_seconds 1.796e+09", *lines]) + "\n")


def test_36_acceptance_collapse():
    """Counters are read by exact name beside their `_created` gauges; a collapse is a warning about quality."""
    counters = page(drafts=1000, draft_tokens=5000, accepted_tokens=620, accepted_tokens_per_pos=[600, 10, 5, 3, 2])
    window = acceptance(counters)
    expect(judge_acceptance(window), Verdict.PASS, Code.ACCEPTANCE_COLLAPSE)
    assert window.length == pytest.approx(1.62)
    healthy = page(drafts=1000, draft_tokens=3000, accepted_tokens=1300, accepted_tokens_per_pos=[700, 400, 200])
    assert judge_acceptance(acceptance(healthy)) == ()


def test_37_no_drafter():
    """Without a drafter the family is absent: values are unknown, and a floor cannot be met."""
    empty = page()
    assert acceptance(empty).accepted is None
    expect(judge_acceptance(acceptance(empty)), Verdict.PASS, Code.METRIC_FAMILY_ABSENT, Verdict.FACT)
    expect(judge_acceptance(acceptance(empty), floor=1.5), Verdict.INCONCLUSIVE, Code.METRIC_FAMILY_ABSENT)
    assert acceptance(delta(empty, empty)).drafts is None


DIALECTS = [
    ("Speculative metrics: Draft acceptance rate: 0.600, System efficiency: 0.500, Number of speculative tokens: 3", None, 0.6),
    ("SpecDecoding metrics: Draft acceptance rate: 60.0%, Mean acceptance length: 2.80, Accepted: 18 tokens, Drafted: 30 tokens", 2.8, 0.6),
    ("SpecDecoding metrics: Mean acceptance length: 2.80, Accepted throughput: 1.80 tokens/s, Drafted throughput: 3.00 tokens/s, "
     "Accepted: 18 tokens, Drafted: 30 tokens, Per-position acceptance rate: 0.800, 0.600, 0.400, Avg Draft acceptance rate: 60.0%", 2.8, 0.6),
    ("SpecDecoding metrics: Mean acceptance length: 1.03, Current speculative depth: 3, Accepted throughput: 0.1 tokens/s, Accepted: "
     "1 tokens, Drafted: 99 tokens, Avg Draft acceptance rate: 1.0%", 1.03, 0.01),
    ("SpecDecoding metrics: Mean acceptance length: 1.00, Accepted: 0 tokens, Drafted: 0 tokens, Avg Draft acceptance rate: nan%", 1.0, None),
]  # fmt: skip


@pytest.mark.parametrize(("text", "length", "rate"), DIALECTS)
def test_38_dialects(text, length, rate):
    """Five forms of the speculative line; a floor fails means of 1.03 and 1.00, and nan is unknown."""
    facts, _ = judge(served(info(API, text)))
    (window,) = (fact.value for fact in facts.spec_decode.last)
    assert (length, rate) == (window.acceptance_length, window.acceptance_rate)
    below = judge_log_lengths(facts, floor=1.5)
    assert [one.code for one in below] == ([Code.ACCEPTANCE_BELOW_FLOOR] if length in (1.03, 1.0) else [])
    assert all(one.verdict is Verdict.FAIL for one in below)


def test_39_results_by_schema():
    """A result is read by its schema and unit, or refused: same names in seconds, or a rate rounded to 0."""
    known = {"duration": 4.0, "completed": 2, "total_output_tokens": 8, "output_throughput": 2.0, "mean_ttft_ms": 250.0}
    result = read_result(known)
    assert isinstance(result, BenchResult)
    assert result.latencies == {"time_to_first_token": 0.25}
    for broken in (
        {"latency": 0.25},
        {**known, "output_throughput": 0},
        {**known, "duration": 4000.0},
        {**known, "duration": "4"},
    ):
        refused = read_result(broken)
        assert (refused.code, refused.verdict) == (Code.SCHEMA_UNKNOWN, Verdict.INCONCLUSIVE)


def test_40_foreign_receipts():
    """A status counts as far as executed checks carry it."""
    executed, failed, prose = ForeignCheck("graphs", True), ForeignCheck("kv", False), ForeignCheck("soak", None)
    assert judge_foreign_receipt(True, [executed]) is None
    for checks, verdict in (
        ([executed, failed], Verdict.FAIL),
        ([executed, prose], Verdict.INCONCLUSIVE),
        ([], Verdict.INCONCLUSIVE),
    ):
        finding = judge_foreign_receipt(True, checks)
        assert (Code.RECEIPT_NOT_VERIFIABLE, verdict) == (finding.code, finding.verdict)


def test_41_digest_kinds():
    """Four digests of different kinds name one image; two of the same kind do not."""
    four = [(kind, f"sha256:{index:064x}") for index, kind in enumerate(DigestKind)]
    finding = judge_digests(four)
    assert (finding.code, finding.verdict) == (Code.DIGEST_KIND, Verdict.FACT)
    assert judge_digests([four[0], four[0]]) is None
    other = judge_digests([four[0], (four[0][0], four[1][1])])
    assert (other.code, other.verdict) == (Code.DIGEST_MISMATCH, Verdict.FAIL)


def test_42_tags():
    """A tag can move, so a tag alone identifies nothing."""
    finding = judge_reference("registry.example/vllm:nightly")
    assert (finding.code, finding.verdict) == (Code.TAG_NOT_IDENTITY, Verdict.INCONCLUSIVE)
    assert judge_reference("registry.example/vllm:nightly@sha256:" + "0" * 64) is None


def test_43_cuda_majors():
    """A wheel for another CUDA major fails an image whose build succeeded."""
    finding = judge_cuda_majors({"torch": 13, "connector": 12, "pure": None})
    assert (finding.code, finding.verdict) == (Code.WHEEL_CUDA_MAJOR, Verdict.FAIL)
    assert judge_cuda_majors({"torch": 13, "connector": 13, "pure": None}) is None


@pytest.mark.parametrize(
    ("status", "text", "verdict"),
    [
        (0, "#12 installing error-handling ERROR words\n#20 exporting to image\n", Verdict.PASS),
        (1, "nvcc fatal: compile failed\n", Verdict.FAIL),
        (130, "#9 CANCELED\n", Verdict.FAIL),
        (137, "#9 building wheel\n", Verdict.FAIL),
        (0, "#9 building wheel\n", Verdict.INCONCLUSIVE),
        (None, "#20 exporting to image\n", Verdict.INCONCLUSIVE),
    ],
)
def test_44_builds(status, text, verdict):
    """A build is judged by exit status and export line, never by words."""
    finding = judge_build(status, text)
    assert (Code.BUILD_STATUS_NOT_BY_WORD, verdict) == (finding.code, finding.verdict)


def test_45_shared_memory():
    """Shared memory that is too small fails, by the engine's words or by its size; a leak is shown by the difference."""
    text = "torch.distributed.DistBackendError: NCCL error: Error while creating shared memory segment /dev/shm/nccl-aB3 (size 5767520)"
    expect(judge(log(start(), traceback(worker(0), text)), status=1)[1], Verdict.FAIL, Code.SHM_EXHAUSTED)
    small = judge_shared_memory(SharedMemory(64 << 20, 60 << 20, 60 << 20), needed=256 << 20)
    assert (small.code, small.verdict) == (Code.SHM_EXHAUSTED, Verdict.FAIL)
    leak = judge_shared_memory(SharedMemory(1 << 30, 1 << 30, 1 << 29), needed=256 << 20)
    assert leak.verdict is Verdict.INCONCLUSIVE
    assert judge_shared_memory(SharedMemory(1 << 30, 1 << 30, 1 << 30), needed=256 << 20) is None


def test_silent_death():
    """A process that ends without a word fails by its exit status; the same log of a running process passes."""
    assert overall(judge(served())[1]) is Verdict.PASS
    for status in (0, 1, 137, -9):
        expect(judge(served(), status=status)[1], Verdict.FAIL, Code.PROCESS_DIED_SILENTLY)
    expect(judge(log(start()), status=137)[1], Verdict.FAIL, Code.PROCESS_DIED_SILENTLY)


def test_restart_behind_our_back():
    """A second start in one file voids the first: facts are those of the last boot, and the run fails."""
    facts, findings = judge(served() + log(start()))
    finding = found(findings, Code.ENGINE_RESTARTED)
    assert finding.verdict is Verdict.FAIL
    assert facts.ready is Readiness.NO
    assert (facts.kv_tokens, facts.captures, facts.http) == (None, (), {})


def test_missing_rank():
    """A rank of the announced world that never spoke keeps the run from passing."""
    lines = [line for line in start() if "rank=1" not in line]
    data = log(lines, KV, bar(PIECEWISE, 5), bar(FULL, 4), finished(range(1)), READY)
    expect(judge(data)[1], Verdict.INCONCLUSIVE, Code.RANK_MISSING)


def test_capture_ended_on_one_rank_only():
    """On V2 every rank ends its capture; one that does not keeps the run from passing."""
    data = log(start(), KV, bar(PIECEWISE, 5), bar(FULL, 4), finished([0]), READY)
    expect(judge(data)[1], Verdict.INCONCLUSIVE, Code.RANKS_DISAGREE)


def test_one_bar_for_two_passes():
    """Two finished passes and one bar: which pass it shows is not known, so nothing is claimed."""
    data = log(start(), finished(range(2)), KV, bar(PIECEWISE, 5), bar(FULL, 2), finished(range(2)), READY)
    expect(judge(data)[1], Verdict.INCONCLUSIVE, Code.CAPTURE_PASS_UNKNOWN)


def test_runner_conflict():
    """A runner line against the labels of the other runner keeps the run from passing."""
    data = log(start(), KV, bar(V1_MIXED, 5), bar(V1_DECODE, 4), finished(range(2)), READY)
    expect(judge(data)[1], Verdict.INCONCLUSIVE, Code.RUNNER_CONFLICT)


def test_plugin_failure_is_not_fatal():
    """A plugin that cannot be loaded leaves a server without it: the run is not a pass."""
    data = log(
        info(API, "Failed to load plugin vllm_qout", "ERROR"),
        start(),
        KV,
        bar(PIECEWISE, 5),
        bar(FULL, 4),
        finished(range(2)),
        READY,
    )
    facts, findings = judge(data)
    assert facts.plugins.failed == ("vllm_qout",)
    expect(findings, Verdict.INCONCLUSIVE, Code.PLUGIN_FAILED)


def test_errors_that_the_start_survives():
    """An ERROR record before ready is named; a traceback before ready keeps the run from passing; both fail without ready."""
    sound = [KV, bar(PIECEWISE, 5), bar(FULL, 4), *finished(range(2))]
    word = info(CORE, "Cannot use FA version 3 is not supported due to the device", "ERROR")
    raised = [info(API, "Failed to load plugin vllm_qout", "ERROR"), *traceback(API, "ImportError: no such symbol")]
    expect(judge(log(start(), word, sound, READY))[1], Verdict.PASS, Code.ERROR_BEFORE_READY, Verdict.FACT)
    expect(judge(log(start(), raised, sound, READY))[1], Verdict.INCONCLUSIVE, Code.ERROR_BEFORE_READY)
    assert overall(judge(log(start(), word), status=1)[1]) is Verdict.FAIL


def test_kernel_oom_killer():
    """A process killed for host memory is named by the kernel log."""
    kernel = "Out of memory: Killed process 4242 (VLLM::Worker_TP1) total-vm:99999999kB"
    expect(judge(served(), status=137, kernel=kernel)[1], Verdict.FAIL, Code.HOST_OOM_KILLED)


def test_client_side():
    """5xx and broken streams are the service's, a refused request of the harness is the harness's."""
    for client, code in (
        (ClientFacts(answers_5xx=2), Code.SERVER_ERRORS),
        (ClientFacts(unfinished_streams=1), Code.STREAM_UNFINISHED),
        (ClientFacts(own_4xx=1), Code.OWN_REQUEST_REFUSED),
    ):
        expect(judge(served(), client=client)[1], Verdict.FAIL, code)


def test_answers_after_the_stop():
    """An answer with 5xx fails a run while it serves, and not behind a requested stop."""
    refused = access("503 Service Unavailable")
    assert overall(judge(served(SHUTDOWN, refused), status=0)[1]) is Verdict.PASS
    expect(judge(served(refused, SHUTDOWN), status=0)[1], Verdict.FAIL, Code.SERVER_ERRORS)


def test_first_failing_process_is_the_cause():
    """The innermost exception of the process that failed first is the cause, not the last line of the file."""
    chained = [
        *traceback(worker(1), "ValueError: inner cause"),
        info(worker(1), "The above exception was the direct cause of the following exception:", "ERROR"),
        *traceback(worker(1), "RuntimeError: outer"),
    ]
    data = log(start(), info(worker(1), "WorkerProc failed to start.", "ERROR"), chained,
               info(CORE, "EngineCore failed to start.", "ERROR"), traceback(CORE, "Exception: WorkerProc initialization failed"))  # fmt: skip
    facts, findings = judge(data, status=1)
    finding = expect(findings, Verdict.FAIL, Code.ENGINE_START_FAILED)
    assert (finding.detail, finding.rank) == ("ValueError: inner cause", 1)
    assert facts.counts.error_tracebacks == 2
    assert {error.kind for error in facts.errors} >= {ErrorKind.WORKER_START, ErrorKind.CORE_START, ErrorKind.EXCEPTION}


def test_exception_of_a_request():
    """The API server logs refused and failed requests alike as exceptions; the answers tell them apart."""
    line = info(API, "Exception caught. Request id: None", "ERROR")
    expect(judge(served(line, access("400 Bad Request")))[1], Verdict.PASS, Code.CLIENT_ERROR_ONLY)
    assert overall(judge(served(line, access("500 Internal Server Error")))[1]) is Verdict.FAIL
    assert overall(judge(served(line))[1]) is Verdict.FAIL


def test_exception_behind_its_announcement():
    """An error that only announces a traceback is not the cause; the exception is."""
    said = [
        info(CORE, "Invocation of collective_rpc method failed", "ERROR"),
        *traceback(CORE, "RuntimeError: Worker failed"),
    ]
    first = [
        info(worker(1), "WorkerProc hit an exception.", "ERROR"),
        *traceback(worker(1), "AttributeError: no such method"),
    ]
    finding = expect(judge(served(first, said))[1], Verdict.FAIL, Code.ENGINE_FAILED_SERVING)
    assert (finding.detail, finding.rank) == ("AttributeError: no such method", 1)


MEANINGS = [
    (ErrorKind.XID, "NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus."),
    (ErrorKind.OOM_KILLER, "python3 invoked oom-killer: gfp_mask=0xcc0"),
    (
        ErrorKind.KV_REFUSED,
        "The model's max seq len (131072) is larger than the maximum number of tokens that can be stored in KV cache (9000)",
    ),
    (ErrorKind.KV_NO_MEMORY, "ValueError: No available memory for the cache blocks."),
    (ErrorKind.KV_LOAD, "the number is less than the expected number of tokens"),
    (ErrorKind.TEARDOWN, "WARNING: destroy_process_group() was not called before program exit"),
    (ErrorKind.CORE_EXITED, "[shutdown] MPClient: engine core exited unexpectedly; starting cleanup"),
    (ErrorKind.CORE_INIT, SECONDARY),
    (ErrorKind.CORE_START, "EngineCore failed to start."),
    (ErrorKind.WORKER_START, "WorkerProc failed to start."),
    (ErrorKind.WORKER_EXCEPTION, "WorkerProc hit an exception."),
    (ErrorKind.WORKER_DIED, "Worker proc VllmWorker-1 died unexpectedly (exit code: -9), shutting down executor."),
    (ErrorKind.CORE_FATAL, "EngineCore encountered a fatal error."),
    (ErrorKind.OUTPUT_HANDLER, "AsyncLLM output_handler failed."),
    (ErrorKind.ENGINE_DEAD, "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue."),
    (ErrorKind.EXECUTOR_FAILED, "Executor failed."),
    (ErrorKind.RPC_TIMEOUT, "TimeoutError: RPC call to execute_model timed out."),
    (ErrorKind.COLLECTIVE_WATCHDOG, "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9)"),
    (ErrorKind.OUT_OF_MEMORY, "torch.OutOfMemoryError: CUDA out of memory."),
    (ErrorKind.ALLOCATOR_WARNING, "memory allocation failed with OOM on device 0"),
    (ErrorKind.HIDDEN_ALLOCATION, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"),
    (ErrorKind.ILLEGAL_ACCESS, "CUDA error: an illegal memory access was encountered"),
    (ErrorKind.CUDA, "CUDA error: invalid argument"),
    (ErrorKind.NCCL, "NCCL error in: ProcessGroupNCCL.cpp:1, unhandled system error"),
    (ErrorKind.CAPTURE, "CUDA error: operation not permitted when stream is capturing"),
    (ErrorKind.SHARED_MEMORY, "Error while creating shared memory segment /dev/shm/nccl-aB3"),
    (ErrorKind.IMPORT, "ModuleNotFoundError: No module named 'vllm._C'"),
    (ErrorKind.USAGE, "vllm: error: unrecognized arguments: --x"),
    (ErrorKind.CONTEXT_LENGTH, "This model's maximum context length is 4096 tokens."),
    (ErrorKind.CLIENT_REQUEST, "Invalid HTTP request received."),
    (ErrorKind.REQUEST_EXCEPTION, "HTTPException caught. Request id: 7"),
    (ErrorKind.PLUGIN, "Failed to load plugin vllm_qout"),
]


@pytest.mark.parametrize(("kind", "text"), MEANINGS)
def test_meaning_of_errors(kind, text):
    """Each error text has its meaning; the quick test for known words overlooks none of them."""
    assert classify(text.encode()) is kind


def test_every_kind_has_an_example():
    """No kind of error is without an example, except those that say that the text is unknown."""
    assert set(ErrorKind) - {kind for kind, _ in MEANINGS} == {ErrorKind.EXCEPTION, ErrorKind.OTHER}


def test_absurd_world_size():
    """A world size that no machine has is not believed, and many missing ranks are not all listed."""
    line = info(
        "(Worker pid=30)", "world_size={} rank=0 local_rank=0 distributed_init_method=file:///tmp/x backend=nccl"
    )
    assert read([line.format(10**12).encode() + b"\n"]).world_size is None
    _, findings = judge(log(start(world=1)[:2], line.format(90_000)))
    assert found(findings, Code.RANK_MISSING).detail.endswith(" and 89991 more of 90000")
