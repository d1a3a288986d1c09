# SPDX-License-Identifier: Apache-2.0
"""kv.restore: a perfect run passes, and each fault is named by exactly its own reason codes."""

from __future__ import annotations

import copy

import kv_synthetic as synthetic
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from qualify.claims import kv
from qualify.claims.model import Status, worst
from qualify.errors import EvidenceError
from qualify.evidence import MissingEvidence

PROFILE = synthetic.profile()
HITS = 'vllm:external_prefix_cache_hits_total{engine="0",model_name="m"}'
COMPUTED = 'vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_compute"}'
LOCAL = 'vllm:prefix_cache_hits_total{engine="0",model_name="m"}'
LOOKUP = 'lmcache_mp_lookup_hit_tokens_total{model_name="m"}'
FINISHED = 'vllm:request_success_total{engine="0",model_name="m",finished_reason="length"}'
MEMORY = 'lmcache_mp_lookup_hit_l1_tokens_total{model_name="m"}'
DISK = 'lmcache_mp_lookup_hit_l2_tokens_total{model_name="m"}'


def judged(tree, profile=PROFILE):
    judgement = kv.judge(synthetic.evidence(tree), profile)
    return judgement, worst(item.status for item in judgement.checks)


def codes(judgement):
    return {str(item.reason_code) for item in judgement.checks if item.reason_code is not None}


def case_of(tree, arm, tokens=2000):
    return next(case for case in tree["arms"][arm] if case["promptTokens"] == tokens)


def control_of(tree, damage):
    return next(case for case in tree["arms"]["negative"] if case["fault"]["damage"] == damage)


def request_of(case, rank=1):
    return case["ranks"][rank]["requests"][0]


def change_counter(case, name, by, page="engineAfter"):
    lines = case["scrapes"][page].splitlines()
    changed = [
        f"{name} {float(line.rsplit(' ', 1)[1]) + by}" if line.startswith(f"{name} ") else line for line in lines
    ]
    assert changed != lines
    case["scrapes"][page] = "\n".join([*changed, ""])


def drop_counter(case, name, page="engineAfter"):
    lines = [line for line in case["scrapes"][page].splitlines() if not line.startswith(f"{name} ")]
    case["scrapes"][page] = "\n".join([*lines, ""])


def test_perfect_run_passes(clean):
    """All arms equal and all controls caught: passed, with bytes counted for each rank and group."""
    judgement, status = judged(clean)
    assert status is Status.PASSED, [item for item in judgement.checks if item.status is not Status.PASSED]
    rows = judgement.observed["restores"]
    assert [(row["arm"], row["promptTokens"], row["externalTokens"]) for row in rows[:4]] == [
        ("memory", 1023, 768),
        ("memory", 1024, 1023),
        ("memory", 1025, 1024),
        ("memory", 2000, 1792),
    ]
    assert all(group["blocks"] and group["coldRoot"] == group["restoredRoot"] for g in rows for group in g["groups"])


# One fault each. `name: (codes, how to break a perfect run)`.


def break_byte(tree):
    request_of(case_of(tree, "disk"))["restored"][-1][3] = synthetic.digest("other")


def break_tail(tree):
    """The block that the restored length cuts, at 1,023 restored tokens."""
    restored = request_of(case_of(tree, "memory", 1024))["restored"]
    next(entry for entry in restored if entry[2] == 127)[3] = synthetic.digest("other")


def lose_block(tree):
    request_of(case_of(tree, "memory"))["restored"].pop()


def lose_group(tree):
    request = request_of(case_of(tree, "restart"), 0)
    request["restored"] = [entry for entry in request["restored"] if entry[0] > 1]


def lose_cold_block(tree):
    for arm in ("control", "cold"):
        request_of(case_of(tree, arm))["cold"].pop()


def control_differs(tree):
    request_of(case_of(tree, "control", 1023), 0)["cold"][0][3] = synthetic.digest("other")


def equal_ranks(tree):
    """One block that no restore retains has the same bytes on both ranks."""
    for arm in ("control", "cold"):
        case = case_of(tree, arm)
        request_of(case, 1)["cold"][0][3] = request_of(case, 0)["cold"][0][3]


def same_workers(tree):
    for case in tree["arms"]["restart"]:
        case["ranks"][0]["process"] = {"pid": 100, "started": 2000}
    tree["workers"]["restart"][0]["process"] = {"pid": 100, "started": 2000}


def same_cache_server(tree):
    for case in tree["arms"]["restart"]:
        for page in ("cacheBefore", "cacheAfter"):
            case["scrapes"][page] = case["scrapes"][page].replace("_seconds 31.0", "_seconds 21.0")


def stored_byte(tree):
    tree["stored"]["files"][5]["sha256"] = synthetic.digest("other")


def stored_extra(tree):
    tree["stored"]["files"].append({**tree["stored"]["files"][0], "sha256": synthetic.digest("other")})


def stored_stranger(tree):
    tree["stored"]["strangers"].append(synthetic.digest("other"))


def stored_swap(tree):
    """The two ranks' files of one chunk under each other's names."""
    first, second = tree["stored"]["files"][0], tree["stored"]["files"][len(tree["stored"]["files"]) // 2]
    first["sha256"], second["sha256"] = second["sha256"], first["sha256"]


def stored_twice(tree):
    tree["stored"]["files"].append({**tree["stored"]["files"][0], "chunkHash": synthetic.digest("another")})


def blind_control(tree):
    """The damaged file was restored as if it were whole: the check did not see the damage."""
    control_of(tree, "flipInFile")["ranks"] = copy.deepcopy(control_of(tree, "none")["ranks"])


def control_elsewhere(tree):
    case = control_of(tree, "flipInFile")
    request_of(case, 0)["restored"][-1][3] = synthetic.digest("other")


def control_without_counts(tree):
    change_counter(control_of(tree, "swappedRanks"), HITS, -256)


def half_stale(tree):
    """A stale group of which one block kept its bytes."""
    restored = request_of(control_of(tree, "staleGroup"))["restored"]
    whole = request_of(control_of(tree, "none"))["restored"]
    restored[0] = whole[0]


def lose_control(tree):
    tree["arms"]["negative"] = [c for c in tree["arms"]["negative"] if c["fault"]["damage"] != "swappedRanks"]


def lose_stale_group(tree):
    tree["arms"]["negative"] = [c for c in tree["arms"]["negative"] if c["fault"]["groups"] != [0]]


def control_not_run(tree):
    case = control_of(tree, "swappedChunks")
    case["fault"]["notRun"] = "no file"
    case["ranks"], case["scrapes"] = [], None


def dirty_end(tree):
    request_of(control_of(tree, "none"))["restored"][0][3] = synthetic.digest("other")


def lose_rank(tree):
    case_of(tree, "disk")["ranks"].pop()


def lose_length(tree):
    tree["arms"]["restart"].pop()


def no_requests(tree):
    for capture in case_of(tree, "memory")["ranks"]:
        capture["requests"] = []


def bad_steps(tree):
    request_of(case_of(tree, "restart"))["steps"][0][1] -= 1


def worker_count(tree):
    request = request_of(case_of(tree, "disk", 1025))
    request["computedTokens"] = 1023
    request["steps"][0] = [1023, 2]


def unverified(tree):
    case_of(tree, "memory")["poison"][1]["verified"] = False


FAULTS = {
    "a restored byte": ({"bytes_differ"}, break_byte),
    "a byte of the cut block": ({"bytes_differ"}, break_tail),
    "a restored block is gone": ({"restore_short"}, lose_block),
    "a restored group is gone": ({"group_empty", "restore_short"}, lose_group),
    "a block was never seen cold": ({"block_no_cold"}, lose_cold_block),
    "cold and control differ": ({"cold_differs_from_control"}, control_differs),
    "ranks hold the same bytes": ({"ranks_identical"}, equal_ranks),
    "cold was served from the cache": (
        {"cold_not_cold"},
        lambda tree: change_counter(case_of(tree, "cold"), HITS, 256),
    ),
    "fewer external tokens": (
        {"external_tokens_mismatch"},
        lambda tree: change_counter(case_of(tree, "memory", 1023), HITS, -256),
    ),
    "a worker started elsewhere": ({"external_tokens_mismatch", "restore_short"}, worker_count),
    "more computed locally": (
        {"counter_mismatch"},
        lambda tree: change_counter(case_of(tree, "disk"), COMPUTED, 1),
    ),
    "another request ran": ({"counter_mismatch"}, lambda tree: change_counter(case_of(tree, "cold"), FINISHED, 1)),
    "the cache server counted otherwise": (
        {"counter_mismatch"},
        lambda tree: change_counter(case_of(tree, "restart"), LOOKUP, -256, "cacheAfter"),
    ),
    "the cache server lost events": (
        {"counter_mismatch"},
        lambda tree: change_counter(
            case_of(tree, "disk"), "lmcache_mp_event_bus_dropped_events_total", 1, "cacheAfter"
        ),
    ),
    "a token was computed twice": ({"counter_mismatch"}, bad_steps),
    "local prefix hit": ({"local_hit"}, lambda tree: change_counter(case_of(tree, "restart"), LOCAL, 128)),
    "disk arm served from memory": (
        {"tier_mismatch"},
        lambda tree: change_counter(case_of(tree, "disk"), MEMORY, 256, "cacheAfter"),
    ),
    "memory arm served from disk": (
        {"tier_mismatch"},
        lambda tree: change_counter(case_of(tree, "memory"), DISK, 256, "cacheAfter"),
    ),
    "a stored byte": ({"stored_files_mismatch"}, stored_byte),
    "one file too many": ({"stored_files_mismatch"}, stored_extra),
    "a file of unknown name": ({"stored_files_mismatch"}, stored_stranger),
    "stored under the other rank": ({"stored_files_mismatch"}, stored_swap),
    "stored twice": ({"stored_files_mismatch"}, stored_twice),
    "poison not verified": ({"not_poisoned"}, unverified),
    "no poison": ({"not_poisoned"}, lambda tree: case_of(tree, "disk").update(poison=[])),
    "no reset": ({"not_poisoned"}, lambda tree: case_of(tree, "disk").update(resetAttempts=None)),
    "a worker survived": ({"not_restarted"}, same_workers),
    "the cache server survived": ({"not_restarted"}, same_cache_server),
    "a control was not caught": ({"negative_control_passed"}, blind_control),
    "a control broke too much": ({"negative_control_unexpected"}, control_elsewhere),
    "a control broke too little": ({"negative_control_unexpected"}, half_stale),
    "a control broke counters": ({"negative_control_unexpected"}, control_without_counts),
    "a control is missing": ({"negative_control_missing"}, lose_control),
    "a group has no stale control": ({"negative_control_missing"}, lose_stale_group),
    "a control could not run": ({"negative_control_missing"}, control_not_run),
    "not clean after the controls": ({"bytes_differ"}, dirty_end),
    "another transfer mode": (
        {"transfer_mode_mismatch"},
        lambda tree: tree["logs"].update(restart=tree["logs"]["restart"].replace("lmcache_driven", "engine_driven", 1)),
    ),
    "no transfer mode logged": ({"transfer_mode_mismatch"}, lambda tree: tree["logs"].update(cold="")),
    "a rank is missing": ({"rank_missing"}, lose_rank),
    "a length is missing": ({"evidence_missing"}, lose_length),
    "no request captured": (
        {"counter_mismatch", "external_tokens_mismatch", "group_empty"},
        no_requests,
    ),
    "a worker could not read": (
        {"capture_failed"},
        lambda tree: case_of(tree, "memory")["ranks"][0]["errors"].append("KeyError: layer"),
    ),
    "another prompt": (
        {"digest_mismatch"},
        lambda tree: case_of(tree, "memory").update(promptDigest=synthetic.digest("other")),
    ),
    "a metric is absent": ({"metric_missing"}, lambda tree: drop_counter(case_of(tree, "memory"), HITS)),
    "the engine restarted within a case": (
        {"metric_missing"},
        lambda tree: case_of(tree, "memory")["scrapes"].update(
            engineBefore=case_of(tree, "memory")["scrapes"]["engineBefore"].replace("_seconds 20", "_seconds 19")
        ),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_has_its_codes(clean, name):
    """A fault gives exactly its own reason codes, and the claim does not pass."""
    expected, damage = FAULTS[name]
    damage(clean)
    judgement, status = judged(clean)
    assert codes(judgement) == expected, [item for item in judgement.checks if item.status is not Status.PASSED]
    assert status is not Status.PASSED


def test_unknown_is_inconclusive_not_failed(clean):
    """A counter that is absent proves nothing either way."""
    drop_counter(case_of(clean, "memory"), HITS)
    assert judged(clean)[1] is Status.INCONCLUSIVE


def test_first_difference_has_coordinates(clean):
    """The first differing block is named by rank, group, layer and block, with both digests."""
    break_byte(clean)
    judgement, _ = judged(clean)
    bad = next(item for item in judgement.checks if item.status is not Status.PASSED)
    assert "disk, 2000 tokens: rank 1, group 1, layers.3, part 0, block 13" in bad.where
    assert "cold" in bad.where and "restored" in bad.where


def test_too_few_groups(clean):
    """The profile may demand more groups than the model has."""
    model = PROFILE.model.model_copy(update={"min_kv_groups": 3})
    judgement, status = judged(clean, PROFILE.model_copy(update={"model": model}))
    assert codes(judgement) == {"too_few_groups"}
    assert status is Status.FAILED


def test_equal_ranks_can_be_declared(clean):
    """Where one rank writes for all, unequal ranks are the fault."""
    kv_section = PROFILE.kv.model_copy(update={"ranks": "equal"})
    judgement, _ = judged(clean, PROFILE.model_copy(update={"kv": kv_section}))
    assert "ranks_disagree" in codes(judgement)


def test_blocks_of_processes_that_the_boot_does_not_have_are_no_evidence(clean):
    """The evidence of another run, or of a boot whose workers were replaced, counts as missing."""
    clean["workers"]["cold"][1]["process"]["started"] += 1
    with pytest.raises(MissingEvidence):
        judged(clean)


@pytest.mark.parametrize("key", ["boot", "arm"])
def test_evidence_of_another_boot_is_no_evidence(clean, key):
    """A file that was written by another boot or arm counts as missing."""
    clean["arms"]["disk"][0][key] = {"boot": "control", "arm": "memory"}[key]
    with pytest.raises(MissingEvidence):
        judged(clean)


def test_digest_of_an_unknown_tensor_is_bad_evidence(clean):
    """An index outside the tensor list is an error of the evidence, not a crash."""
    request_of(case_of(clean, "disk"))["restored"][0][0] = 9
    with pytest.raises(EvidenceError):
        judged(clean)


RESTORING = st.sampled_from(["memory", "disk", "restart"])
SHORT = PROFILE.model_copy(update={"kv": PROFILE.kv.model_copy(update={"prompt_tokens": (600, 1024)})})
CLEAN = synthetic.tree(SHORT)
LENGTHS = st.sampled_from(SHORT.kv.prompt_tokens)
RANKS = st.integers(0, synthetic.RANKS - 1)
PROPERTY = settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))


def not_passed(tree):
    return judged(tree, SHORT)[1] is not Status.PASSED


def test_short_run_passes():
    """The run that the properties below break is itself a pass."""
    assert not not_passed(CLEAN)


@PROPERTY
@given(arm=RESTORING, tokens=LENGTHS, rank=RANKS, data=st.data(), gone=st.booleans())
def test_any_restored_digest_matters(arm, tokens, rank, data, gone):
    """Changing or losing any single restored digest keeps the claim from passing."""
    tree = copy.deepcopy(CLEAN)
    restored = request_of(case_of(tree, arm, tokens), rank)["restored"]
    index = data.draw(st.integers(0, len(restored) - 1))
    if gone:
        del restored[index]
    else:
        restored[index][3] = synthetic.digest("other", index)
    assert not_passed(tree)


@PROPERTY
@given(arm=st.sampled_from(["control", "cold"]), tokens=LENGTHS, rank=RANKS, data=st.data(), gone=st.booleans())
def test_any_cold_digest_matters(arm, tokens, rank, data, gone):
    """The same for any single digest of control and cold."""
    tree = copy.deepcopy(CLEAN)
    cold = request_of(case_of(tree, arm, tokens), rank)["cold"]
    index = data.draw(st.integers(0, len(cold) - 1))
    if gone:
        del cold[index]
    else:
        cold[index][3] = synthetic.digest("other", index)
    assert not_passed(tree)


@PROPERTY
@given(
    arm=RESTORING,
    tokens=LENGTHS,
    counter=st.sampled_from([(HITS, "engine"), (COMPUTED, "engine"), (LOCAL, "engine"), (LOOKUP, "cache")]),
    by=st.sampled_from([-5, -1, 1, 256]),
)
def test_any_count_matters(arm, tokens, counter, by):
    """A judged counter that is off by any amount keeps the claim from passing."""
    tree = copy.deepcopy(CLEAN)
    name, server = counter
    change_counter(case_of(tree, arm, tokens), name, by, f"{server}After")
    assert not_passed(tree)


@PROPERTY
@given(
    arm=st.sampled_from(["control", "cold", "memory", "disk", "restart"]), tokens=LENGTHS, rank=RANKS, data=st.data()
)
def test_any_missing_rank_or_group_matters(arm, tokens, rank, data):
    """A rank, or a group of a rank, that left no digest keeps the claim from passing."""
    tree = copy.deepcopy(CLEAN)
    case = case_of(tree, arm, tokens)
    group = data.draw(st.sampled_from([None, 0, 1]))
    if group is None:
        del case["ranks"][rank]
    else:
        request = request_of(case, rank)
        for key in ("cold", "restored"):
            request[key] = [e for e in request[key] if case["ranks"][rank]["tensors"][e[0]]["group"] != group]
    assert not_passed(tree)


@PROPERTY
@given(data=st.data())
def test_any_stored_file_matters(data):
    """A stored file that is missing, changed or renamed keeps the claim from passing."""
    tree = copy.deepcopy(CLEAN)
    files = tree["stored"]["files"]
    index = data.draw(st.integers(0, len(files) - 1))
    how = data.draw(st.sampled_from(["gone", "sha256", "chunkHash", "rank", "objectGroup"]))
    if how == "gone":
        del files[index]
    else:
        files[index][how] = 1 - files[index][how] if how in ("rank", "objectGroup") else synthetic.digest("x")
    assert not_passed(tree)


@PROPERTY
@given(data=st.data())
def test_any_missing_control_matters(data):
    """The proof is void without any one of its negative controls."""
    tree = copy.deepcopy(CLEAN)
    del tree["arms"]["negative"][data.draw(st.integers(0, len(tree["arms"]["negative"]) - 1))]
    assert not_passed(tree)
