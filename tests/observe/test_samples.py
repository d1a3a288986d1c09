# SPDX-License-Identifier: Apache-2.0
"""Every value of the sample table, read from the sample."""

from __future__ import annotations

import json

import pytest
from qualify.observe.codes import EvidenceCode
from qualify.observe.facts import CapturePass, Readiness, Role
from qualify.observe.graphs import Runner, expected_sets
from qualify.observe.metrics import delta, parse
from qualify.observe.speculation import acceptance
from qualify.observe.triage import Verdict, overall, triage

PLAIN, DSPARK, LMCACHE, FIRST, CPU = (
    "h200x2-tp2-plain.log",
    "h200x2-tp2-dspark-k5.log",
    "h200x2-tp2-lmcache-mp.log",
    "h200x2-tp2-first-boot-unfinished.log",
    "cpu-tp2-no-graphs-stopped.log",
)
ALL = (PLAIN, DSPARK, LMCACHE, FIRST, CPU)
GPU = (PLAIN, DSPARK, LMCACHE, FIRST)
SERVER = "mp-server-fs-l2.log"


def value(fact):
    return None if fact is None else fact.value


def by_rank(facts):
    return {fact.rank: fact.value for fact in facts}


def counts(facts, which):
    return {
        (fact.value.role, fact.value.kind): (fact.value.captured, fact.value.total)
        for fact in facts.captures
        if fact.capture_pass is which
    }


def bars(piecewise, full, drafter=None):
    found = {(Role.TARGET, "PIECEWISE"): piecewise, (Role.TARGET, "FULL"): full}
    return found if drafter is None else {**found, (Role.DRAFTER, "FULL"): drafter}


@pytest.mark.parametrize(
    ("name", "lines", "returns", "escapes"),
    [(PLAIN, 179, 33, 0), (DSPARK, 197, 48, 0), (LMCACHE, 297, 36, 396), (FIRST, 103, 41, 0), (CPU, 210, 24, 0),
     (SERVER, 122, 0, 368)],
)  # fmt: skip
def test_extent(sample_facts, sample_path, name, lines, returns, escapes):
    """Lines, carriage returns and escapes are counted as they stand in the file."""
    extent = sample_facts(name).extent
    assert (lines, returns, escapes) == (extent.lines, extent.carriage_returns, extent.escapes)
    assert sample_path(name).stat().st_size == extent.bytes


@pytest.mark.parametrize("name", ALL)
def test_identity(sample_facts, name):
    """Version, world size and tensor parallelism come from their own lines."""
    facts = sample_facts(name)
    assert (value(facts.version), value(facts.world_size), value(facts.tensor_parallel)) == ("0.32.0", 2, 2)
    assert {0, 1} == facts.announced_ranks
    assert (Runner.V1 if name == CPU else Runner.V2) is value(facts.runner)
    assert value(facts.attention_backend) is None
    assert facts.plugins is None


@pytest.mark.parametrize(
    ("name", "pids"),
    [
        (PLAIN, (6015, 6016)),
        (DSPARK, (7332, 7333)),
        (LMCACHE, (8796, 8797)),
        (FIRST, (3831, 3832)),
        (CPU, (13142, 13143)),
    ],
)
def test_rank_of_pid(sample_facts, name, pids):
    """A pid has one rank, whatever names its process carries."""
    assert {pids[0]: 0, pids[1]: 1} == dict(sample_facts(name).ranks)


@pytest.mark.parametrize("name", ALL)
def test_communication(sample_facts, name):
    """NCCL and all-reduce are known on GPUs, and unknown (not empty) on the CPU."""
    facts = sample_facts(name)
    if name == CPU:
        assert facts.nccl is None
        assert value(facts.distributed_backend) == "gloo"
        assert "tp:0" not in facts.all_reduce
    else:
        assert value(facts.nccl) == "2.29.7"
        assert facts.all_reduce["tp:0"].value == ("FLASHINFER", "CUSTOM", "PYNCCL")
        assert facts.all_reduce["ep:0"].value == ("PYNCCL",)


@pytest.mark.parametrize(
    ("name", "expected"), [(PLAIN, 1.03), (DSPARK, 1.75), (LMCACHE, 1.03), (FIRST, 1.03), (CPU, None)]
)
def test_model_memory(sample_facts, name, expected):
    """Model memory is kept per rank."""
    wanted = {} if expected is None else {0: expected, 1: expected}
    assert wanted == by_rank(sample_facts(name).model_memory)


@pytest.mark.parametrize(
    ("name", "profiling", "final"),
    [
        (PLAIN, bars((5, 5), (2, 2)), bars((5, 5), (4, 4))),
        (DSPARK, bars((9, 9), (2, 2), (6, 6)), bars((9, 9), (7, 7), (6, 6))),
        (LMCACHE, bars((5, 5), (2, 2)), bars((5, 5), (4, 4))),
        (FIRST, bars((5, 5), (2, 2)), {}),
        (CPU, {}, {}),
    ],
)
def test_captures(sample_facts, name, profiling, final):
    """Two captures under the same labels are two passes; the one that serves requests is never added to the other."""
    facts = sample_facts(name)
    assert profiling == counts(facts, CapturePass.PROFILING)
    assert final == counts(facts, CapturePass.FINAL)


@pytest.mark.parametrize(
    ("name", "profiling", "final"),
    [(PLAIN, (5, 0.18), (1, 0.08)), (DSPARK, (7, 0.36), (2, 0.22)), (LMCACHE, (8, 0.18), (2, 0.08)),
     (FIRST, (147, 0.18), None), (CPU, None, None)],
)  # fmt: skip
def test_capture_finished(sample_facts, name, profiling, final):
    """Each rank says twice that its capture ended; a record before the KV line is the profiling pass."""
    for which, expected in ((CapturePass.PROFILING, profiling), (CapturePass.FINAL, final)):
        found = [fact for fact in sample_facts(name).capture_finished if fact.capture_pass is which]
        assert sorted(fact.rank for fact in found) == ([] if expected is None else [0, 1])
        assert {(fact.value.seconds, fact.value.gib) for fact in found} == ({expected} if expected else set())


@pytest.mark.parametrize(
    ("name", "actual", "estimated"),
    [(PLAIN, 0.08, 0.25), (DSPARK, 0.22, 0.42), (LMCACHE, 0.08, 0.25), (FIRST, None, None), (CPU, None, None)],
)
def test_pool(sample_facts, name, actual, estimated):
    """Graph pool memory, measured and estimated."""
    found = {(fact.value.actual_gib, fact.value.estimated_gib) for fact in sample_facts(name).pool}
    assert found == (set() if actual is None else {(actual, estimated)})


@pytest.mark.parametrize(
    ("name", "available", "tokens", "times", "length", "groups"),
    [
        (PLAIN, {0: 66.35}, 3_637_425, 222.01, 16_384, (64, 64, 256, 4, 8)),
        (DSPARK, {0: 65.24}, 3_321_847, 202.75, 16_384, (64, 64, 64, 64, 256, 4, 8)),
        (LMCACHE, {0: 66.35}, 3_637_425, 222.01, 16_384, (64, 64, 256, 4, 8)),
        (FIRST, {0: 66.35}, 3_637_425, 222.01, 16_384, (64, 64, 256, 4, 8)),
        (CPU, {}, 1_048_576, 256.0, 4_096, None),
    ],
)
def test_kv_admission(sample_facts, name, available, tokens, times, length, groups):
    """KV memory is known for the rank that printed it; rank 1 stays unknown."""
    facts = sample_facts(name)
    assert available == by_rank(facts.available_kv)
    assert tokens == value(facts.kv_tokens)
    assert (times, length) == (facts.concurrency.value.times, facts.concurrency.value.tokens)
    assert groups == value(facts.kv_group_block_sizes)
    assert value(facts.kv_device) == ("CPU" if name == CPU else "GPU")
    assert facts.kv_refusal is None


def test_kv_set_by_hand(sample_facts):
    """KV memory of the CPU run was set on both ranks, not profiled."""
    found = {fact.rank: (fact.value.gib, fact.value.of_gib) for fact in sample_facts(CPU).kv_reservation}
    assert found == {0: (1.0, 14.34), 1: (1.0, 14.34)}


@pytest.mark.parametrize(
    ("name", "memory"),
    [
        (PLAIN, (1.87, 1.67, 0.08)),
        (DSPARK, (2.65, 2.01, 0.22)),
        (LMCACHE, (1.87, 1.67, 0.08)),
        (FIRST, None),
        (CPU, None),
    ],
)
def test_memory_summary(sample_facts, name, memory):
    """Consumed, peak and graph memory; the figures behind suggested flags are not read."""
    facts = sample_facts(name).memory_summary
    found = {(one.value.consumed_gib, one.value.peak_activation_gib, one.value.graph_gib) for one in facts}
    assert found == (set() if memory is None else {memory})
    assert all(one.value.weights_gib is None for one in facts)


@pytest.mark.parametrize(
    ("name", "seconds", "ready", "ok"),
    [(PLAIN, 16.22, Readiness.YES, 9), (DSPARK, 22.54, Readiness.YES, 9), (LMCACHE, 25.32, Readiness.YES, 8),
     (FIRST, None, Readiness.NO, None), (CPU, 63.34, Readiness.YES, 4)],
)  # fmt: skip
def test_start_and_answers(sample_facts, name, seconds, ready, ok):
    """Start time, readiness and answers by class; no access line means unknown, not 0."""
    facts = sample_facts(name)
    assert seconds == value(facts.init_seconds)
    assert ready is facts.ready
    assert ok == facts.http_class(2)
    assert facts.http_class(4) == facts.http_class(5) == (None if ok is None else 0)


@pytest.mark.parametrize(
    ("name", "throughput", "spec"), [(PLAIN, 2, 0), (DSPARK, 2, 1), (LMCACHE, 1, 0), (FIRST, 0, 0), (CPU, 0, 0)]
)
def test_statistics_lines(sample_facts, name, throughput, spec):
    """Statistics lines are counted and the last ones kept; none of them is no zero rate."""
    facts = sample_facts(name)
    assert throughput == (facts.throughput.count if facts.throughput else 0)
    assert spec == (facts.spec_decode.count if facts.spec_decode else 0)


def test_spec_line_is_a_window(sample_facts, sample_path):
    """The logged window says 8 accepted tokens, the counter 527: totals come from counters only."""
    (window,) = sample_facts(DSPARK).spec_decode.last
    assert (window.value.accepted, window.value.drafted, window.value.acceptance_length) == (8, 75, 1.53)
    assert window.value.per_position == (0.533, 0, 0, 0, 0)
    assert acceptance(parse(sample_path("dspark-k5.prom").read_bytes())).accepted == 527


def test_idle_line_is_no_stall(sample_facts):
    """`Running: 0` with rate 0 while a request is outstanding is no stall by the log."""
    last = sample_facts(DSPARK).throughput.last[-1].value
    assert (last.running, last.prompt_rate, last.generation_rate) == (0, 0.0, 0.0)
    assert sample_facts(DSPARK).throughput.longest_stall == 0


@pytest.mark.parametrize(("name", "beats"), [(PLAIN, 0), (DSPARK, 0), (LMCACHE, 0), (FIRST, 6), (CPU, 1)])
def test_heartbeats(sample_facts, name, beats):
    """60-second reports count even when they are glued behind a bar."""
    found = sample_facts(name).heartbeats
    assert beats == (found.count if found else 0)


@pytest.mark.parametrize("name", ALL)
def test_errors(sample_facts, name):
    """No sample has an ERROR record; a traceback at warning level is counted as such."""
    counted = sample_facts(name).counts
    assert (counted.errors, counted.error_tracebacks) == (0, 0)
    assert counted.warning_tracebacks == (0 if name == FIRST else 1)


@pytest.mark.parametrize(
    ("name", "begun", "after_ready"), [(PLAIN, None, None), (DSPARK, None, None), (LMCACHE, 2, 2), (FIRST, 16, 0)]
)
def test_compiles(sample_facts, name, begun, after_ready):
    """TileLang compiles, begun and completed, and whether requests waited for them."""
    jit = sample_facts(name).jit
    found = (None, None) if jit is None else (jit.begun, jit.begun_after_ready)
    assert (begun, after_ready) == found
    assert jit is None or jit.begun == jit.completed


def test_open_warmup_is_compilation_in_progress(sample_facts):
    """The first boot ends inside the JIT warm-up, with reports of a busy worker behind it."""
    facts = sample_facts(FIRST)
    assert facts.jit.in_progress
    assert (facts.end.open_bar.value.done, facts.end.open_bar.value.total) == (7, 23)
    assert facts.heartbeats.trailing == 2


@pytest.mark.parametrize(
    ("name", "expired", "verdict", "codes"),
    [
        (PLAIN, False, Verdict.PASS, {EvidenceCode.CAPTURE_FINAL_PASS, EvidenceCode.WARNING_TRACEBACK}),
        (DSPARK, False, Verdict.PASS, {EvidenceCode.CAPTURE_FINAL_PASS, EvidenceCode.CAPTURE_SETS_DIFFER_BY_KIND}),
        (LMCACHE, False, Verdict.PASS, {EvidenceCode.CAPTURE_FINAL_PASS}),
        (FIRST, True, Verdict.FAIL, {EvidenceCode.START_TIMEOUT, EvidenceCode.JIT_IN_PROGRESS}),
        (CPU, False, Verdict.PASS, {EvidenceCode.CAPTURE_NOT_APPLICABLE, EvidenceCode.ERROR_AFTER_REQUESTED_STOP}),
    ],
)
def test_verdict(sample_facts, name, expired, verdict, codes):
    """The verdict of each sample and what explains it."""
    exit_status = 0 if name == CPU else None
    findings = triage(sample_facts(name), stop_requested_at=None, exit_status=exit_status, deadline_expired=expired)
    assert verdict is overall(findings)
    assert codes <= {finding.code for finding in findings}


@pytest.mark.parametrize(
    ("name", "tokens", "drafter", "piecewise", "full", "drafted"),
    [
        (PLAIN, 0, None, (1, 2, 4, 8, 16), (1, 2, 4, 8), None),
        (LMCACHE, 0, None, (1, 2, 4, 8, 16), (1, 2, 4, 8), None),
        (DSPARK, 5, "dspark", (1, 2, 4, 8, 16, 24, 32, 40, 48), (6, 12, 18, 24, 36, 42, 48), (5, 10, 20, 25, 35, 40)),
    ],
)
def test_oracle_agrees_with_the_log(sample_facts, name, tokens, drafter, piecewise, full, drafted):
    """Sets from the configuration in the log have the sizes of the final bars."""
    facts = sample_facts(name)
    assert (tokens or None, drafter) == (value(facts.spec_tokens), value(facts.drafter))
    sets = expected_sets(
        runner=facts.runner.value, mode=facts.configured_mode.value, sizes=facts.configured_sizes.value,
        max_num_seqs=8, spec_tokens=tokens, drafter=drafter,
    )  # fmt: skip
    assert (piecewise, full, drafted) == (sets.piecewise, sets.full, sets.drafter_full)
    final = counts(facts, CapturePass.FINAL)
    assert final[(Role.TARGET, "PIECEWISE")][1] == len(piecewise)
    assert final[(Role.TARGET, "FULL")][1] == len(full)
    if drafted:
        assert final[(Role.DRAFTER, "FULL")][1] == len(drafted)


SERIES = [
    ("generation_tokens_total", {}, 1064, 1064),
    ("prompt_tokens_total", {}, 24164, 24164),
    ("prompt_tokens_by_source_total", {"source": "local_compute"}, 12388, 12644),
    ("prompt_tokens_by_source_total", {"source": "local_cache_hit"}, 11776, 11520),
    ("prompt_tokens_by_source_total", {"source": "external_kv_transfer"}, 0, 0),
    ("prompt_tokens_cached_by_source_total", {"source": "device"}, 11776, 11520),
    ("prefix_cache_queries_total", {}, 24164, 24164),
    ("prefix_cache_hits_total", {}, 11776, 11520),
    ("iteration_tokens_total_count", {}, 1064, 539),
    ("iteration_tokens_total_sum", {}, 13452, 13708),
    ("spec_decode_num_drafts_total", {}, None, 535),
    ("spec_decode_num_draft_tokens_total", {}, None, 2675),
    ("spec_decode_num_accepted_tokens_total", {}, None, 527),
    ("num_preemptions_total", {}, 0, 0),
    ("request_success_total", {"finished_reason": "length"}, 4, 4),
    ("request_success_total", {"finished_reason": "error"}, 0, 0),
]


@pytest.mark.parametrize(("name", "labels", "plain", "dspark"), SERIES)
def test_metrics(sample_path, name, labels, plain, dspark):
    """Exact series at the scrape; a family without a drafter is absent, not 0."""
    for sample, expected in (("plain.prom", plain), ("dspark-k5.prom", dspark)):
        assert expected == parse(sample_path(sample).read_bytes()).value(f"vllm:{name}", **labels)


def test_metric_details(sample_path):
    """Positions, admission labels, and that a page compared with itself has counted nothing."""
    plain, dspark = (parse(sample_path(f"{name}.prom").read_bytes()) for name in ("plain", "dspark-k5"))
    assert acceptance(dspark).per_position == (527, 0, 0, 0, 0)
    wanted = {
        "kv_cache_size_tokens": ("3637425", "3321847"),
        "kv_cache_max_concurrency": ("222.01082504388532", "202.74945652173912"),
        "num_gpu_blocks": ("758833", "746118"),
    }
    for label, pair in wanted.items():
        assert pair == tuple(page.info("vllm:cache_config_info", label) for page in (plain, dspark))
    assert delta(plain, plain).value("vllm:generation_tokens_total") == 0
    assert delta(plain, dspark).value("vllm:generation_tokens_total") is None
    assert (plain.problems, dspark.problems) == ((), ())


def test_cache_server_log(sample_facts):
    """The cache server's own log: one writer stores, both ranks retrieve, and it is not the API server."""
    facts = sample_facts(SERVER)
    cache = facts.cache_server
    assert (
        cache.version.value, cache.hash_algorithm.value, cache.chunk_tokens.value,
    ) == ("0.5.6 (g3e11e108)", "blake3", 256)  # fmt: skip
    assert cache.transfer_mode.value == "lmcache_driven"
    assert [fact.value for fact in cache.registered_layers] == [14, 14]
    assert (cache.kernel_groups, cache.engine_groups) == (8, 5)
    assert [fact.value for fact in cache.stored] == [4096, 4096, 768]
    assert (cache.stored_lines, cache.stored_tokens) == (3, 8960)
    assert [fact.value for fact in cache.retrieved] == [8960, 8960]
    (prefetch,) = (fact.value for fact in cache.prefetches)
    assert (prefetch.retained, prefetch.wanted, prefetch.from_l1, prefetch.from_l2) == (35, 35, 35, 0)
    assert facts.ready is Readiness.NOT_APPLICABLE


def test_merged_with_the_cache_server(sample_path):
    """In one file with its cache server, the engine is ready by its own line, not by the server's."""
    from qualify.observe.log import read

    engine, server = sample_path(LMCACHE).read_bytes(), sample_path(SERVER).read_bytes()
    merged = read([server, engine])
    assert merged.ready is Readiness.YES
    assert merged.ready_source.line == server.count(b"\n") + 274
    cut = engine[: engine.index(b"INFO:     Started server process")]
    assert read([cut, server]).ready is Readiness.NO


def test_status_page(sample_path):
    """The cache server's status after the restore, as the sample table gives it."""
    status = json.loads(sample_path("mp-server-status.json").read_bytes())
    assert "37847040" in json.dumps(status)
    assert 35 * 1_081_344 == 37_847_040
