# SPDX-License-Identifier: Apache-2.0
"""Faults in the KV evidence of a real run: bytes, blocks, counters, storage, and the proof's own controls."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from typing import Any

from qualify.claims.model import ClaimId
from qualify.reasons import ReasonCode

from faults.evidence import COLD, CONTROL, MEMORY, PINS, RESTART, SERVE, fault
from faults.lab import Lab, Tamper, Tree
from faults.model import Fault, Group, Verdict, Verdicts, error, failed, inconclusive, verdicts

CODE = ReasonCode
KV = ClaimId.KV_RESTORE

Case = dict[str, Any]

PATHS = {
    "control": f"{CONTROL}/kv-control.json.gz",
    "cold": f"{COLD}/kv-cold.json.gz",
    "memory": f"{COLD}/kv-memory.json.gz",
    "disk": f"{COLD}/kv-disk.json.gz",
    "negative": f"{COLD}/kv-negative.json.gz",
    "restart": f"{RESTART}/kv-restart.json.gz",
}
STORED = f"{COLD}/kv-stored.json"
RESTORING = ("memory", "disk", "restart")

EXTERNAL = "vllm:external_prefix_cache_hits_total"
SOURCE = "vllm:prompt_tokens_by_source_total"
LOCAL = "vllm:prefix_cache_hits_total"
FINISHED = "vllm:request_success_total"
LOOKUP = "lmcache_mp_lookup_hit_tokens_total"
MEMORY_TIER, DISK_TIER = "lmcache_mp_lookup_hit_l1_tokens_total", "lmcache_mp_lookup_hit_l2_tokens_total"
DROPPED = "lmcache_mp_event_bus_dropped_events_total"


def other_digest(digest: str) -> str:
    return hashlib.sha256(digest.encode()).hexdigest()


def a_case(change: Callable[[Case, Tree], object], *arms: str) -> Tamper:
    """Change one prompt's case in an arm drawn from `arms`."""

    def act(tree: Tree) -> None:
        path = PATHS[tree.random.choice(arms or RESTORING)]
        tree.edit(path, lambda cases: change(tree.random.choice(cases), tree))

    return act


def a_request(change: Callable[[Case, Tree], object], *arms: str) -> Tamper:
    """Change what one rank saw of one request."""
    return a_case(lambda case, tree: change(tree.random.choice(case["ranks"])["requests"][0], tree), *arms)


def count(case: Case, page: str, name: str, by: int, label: str = "") -> None:
    """Add to a counter of a scrape."""
    lines = case["scrapes"][page].splitlines()
    hits = [i for i, line in enumerate(lines) if re.match(rf"{re.escape(name)}[{{ ]", line) and label in line]
    if not hits:
        lines.append(f"{name} {by}")
    else:
        series, value = lines[hits[0]].rsplit(" ", 1)
        lines[hits[0]] = f"{series} {float(value) + by}"
    case["scrapes"][page] = "\n".join([*lines, ""])


def counted(page: str, name: str, by: int, *arms: str, label: str = "") -> Tamper:
    return a_case(lambda case, tree: count(case, page, name, by, label), *arms)


def lose_counter(case: Case, tree: Tree) -> None:
    for page in ("engineBefore", "engineAfter"):
        kept = [line for line in case["scrapes"][page].splitlines() if not line.startswith(f"{EXTERNAL}{{")]
        case["scrapes"][page] = "\n".join([*kept, ""])


# bytes and blocks


def flip(request: Case, tree: Tree) -> None:
    entry = tree.random.choice(request["restored"])
    entry[3] = other_digest(entry[3])


def swap_ranks(case: Case, tree: Tree) -> None:
    one, other = (rank["requests"][0] for rank in case["ranks"])
    one["restored"], other["restored"] = other["restored"], one["restored"]


def stale_group(case: Case, tree: Tree) -> None:
    """All restored blocks of a group hold what another request left there."""
    rank = tree.random.choice(case["ranks"])
    group = tree.random.choice(sorted({tensor["group"] for tensor in rank["tensors"]}))
    for entry in rank["requests"][0]["restored"]:
        if rank["tensors"][entry[0]]["group"] == group:
            entry[3] = other_digest(entry[3])


def full_attention(rank: Case) -> set[int]:
    return {index for index, tensor in enumerate(rank["tensors"]) if tensor["window"] is None}


def lose_page(case: Case, tree: Tree) -> None:
    rank = tree.random.choice(case["ranks"])
    restored = rank["requests"][0]["restored"]
    restored.remove(tree.random.choice([entry for entry in restored if entry[0] in full_attention(rank)]))


def lose_group(case: Case, tree: Tree) -> None:
    rank = tree.random.choice(case["ranks"])
    request, whole = rank["requests"][0], full_attention(rank)
    request["restored"] = [entry for entry in request["restored"] if entry[0] not in whole]


def compute_silently(case: Case, tree: Tree) -> None:
    """Every counter speaks of a restore, and the workers computed all tokens again."""
    for rank in case["ranks"]:
        request = rank["requests"][0]
        first = request["computedTokens"]
        request.update(computedTokens=0, restored=[])
        request["steps"] = [[0, first], *request["steps"]]


def restore_one_chunk_less(tree: Tree) -> None:
    """A restore that is one chunk short, and consistent in itself. The cold blocks tell what it holds."""
    cold = {case["promptTokens"]: case for case in tree.json(PATHS["cold"])}

    def shorten(cases: list[Case]) -> None:
        case = next(one for one in cases if one["promptTokens"] == 2000)
        chunk = case["chunkTokens"]
        for rank, seen in zip(case["ranks"], cold[2000]["ranks"], strict=True):
            request = rank["requests"][0]
            end = request["computedTokens"] - chunk
            request["computedTokens"] = end
            request["steps"] = [[end, chunk], *request["steps"]]
            request["restored"] = [entry for entry in seen["requests"][0]["cold"] if needed(rank, entry, end)]
        count(case, "engineAfter", EXTERNAL, -chunk)
        count(case, "engineAfter", SOURCE, -chunk, "external_kv_transfer")
        count(case, "engineAfter", SOURCE, chunk, "local_compute")
        count(case, "cacheAfter", LOOKUP, -chunk)
        count(case, "cacheAfter", DISK_TIER, -chunk)

    tree.edit(PATHS["disk"], shorten)


def needed(rank: Case, entry: list[Any], end: int) -> bool:
    tensor = rank["tensors"][entry[0]]
    size, window = tensor["tokensPerBlock"], tensor["window"]
    first = 0 if window is None else max(0, end - window + 1) // size
    return bool(entry[2] == size and first <= entry[1] < end // size)


def never_seen_cold(tree: Tree) -> None:
    """One block that both arms without a restore failed to show; not of the prompt of the negative controls."""
    place: list[Any] = []

    def drop(cases: list[Case]) -> None:
        case = next(one for one in cases if one["promptTokens"] == 1024)
        cold = case["ranks"][1]["requests"][0]["cold"]
        if not place:
            place.extend(tree.random.choice(cold)[:3])
        cold.remove(next(entry for entry in cold if entry[:3] == place))

    tree.edit(PATHS["cold"], drop)
    tree.edit(PATHS["control"], drop)


def differ_from_control(request: Case, tree: Tree) -> None:
    entry = tree.random.choice(request["cold"])
    entry[3] = other_digest(entry[3])


def equal_on_both_ranks(tree: Tree) -> None:
    """A block that no restore keeps, with the bytes of the other rank: the first of a sliding window."""

    def copy(cases: list[Case]) -> None:
        case = next(one for one in cases if one["promptTokens"] == 2000)
        one, other = (rank["requests"][0]["cold"] for rank in case["ranks"])
        tensors = case["ranks"][0]["tensors"]
        at = next(i for i, entry in enumerate(one) if tensors[entry[0]]["window"] and entry[1] == 0)
        match = next(entry for entry in other if entry[:3] == one[at][:3])
        match[3] = one[at][3]

    tree.edit(PATHS["cold"], copy)
    tree.edit(PATHS["control"], copy)


# the arms


def reuse_a_worker(tree: Tree) -> None:
    """A worker of the cold boot serves after the restart: its process did not start anew."""
    old = tree.json(PATHS["cold"])[0]["ranks"][0]["process"]

    def change(cases: list[Case]) -> None:
        for case in cases:
            case["ranks"][0]["process"] = old

    tree.edit(PATHS["restart"], change)
    tree.edit(f"{RESTART}/workers.json", lambda workers: workers[0].update(process=old))


def reuse_the_server(page: str) -> Tamper:
    def change(tree: Tree) -> None:
        cold = tree.json(PATHS["cold"])[0]["scrapes"][f"{page}After"]
        old = re.search(r"^process_start_time_seconds .*$", cold, re.MULTILINE)
        assert old is not None

        def rewrite(cases: list[Case]) -> None:
            for case in cases:
                for moment in ("Before", "After"):
                    scrape = case["scrapes"][f"{page}{moment}"]
                    case["scrapes"][f"{page}{moment}"] = re.sub(
                        r"^process_start_time_seconds .*$", old[0], scrape, flags=re.MULTILINE
                    )

        tree.edit(PATHS["restart"], rewrite)

    return change


def restart_within_a_case(case: Case, tree: Tree) -> None:
    """The engine was started again between the two scrapes."""
    case["scrapes"]["engineAfter"] = re.sub(
        r"^process_start_time_seconds .*$",
        "process_start_time_seconds 1.9e+09",
        case["scrapes"]["engineAfter"],
        flags=re.MULTILINE,
    )


def replay(source: str, target: str) -> Tamper:
    """The evidence of one arm in the place of another."""
    return lambda tree: tree.write(PATHS[target], tree.bytes(PATHS[source]))


def replay_relabelled(tree: Tree) -> None:
    """The restore without a restart, given out as the one after it."""
    tree.write(PATHS["restart"], tree.bytes(PATHS["disk"]))

    def rename(cases: list[Case]) -> None:
        for case in cases:
            case.update(arm="restart", boot="restart")

    tree.edit(PATHS["restart"], rename)


def another_run(case: Case, tree: Tree) -> None:
    for rank in case["ranks"]:
        rank["process"]["started"] -= 100_000


def lose_a_length(tree: Tree) -> None:
    tree.edit(PATHS[tree.random.choice(RESTORING)], lambda cases: cases.pop())


def no_poison(case: Case, tree: Tree) -> None:
    tree.random.choice(case["poison"])["verified"] = False


def other_mode(tree: Tree) -> None:
    tree.replace(f"{tree.random.choice((COLD, RESTART))}/engine.log.gz", "mode=lmcache_driven", "mode=engine_driven", 1)


# storage


def a_stored_file(change: Callable[[Case], object]) -> Tamper:
    return lambda tree: tree.edit(STORED, lambda stored: change(tree.random.choice(stored["files"])))


def store_failed(tree: Tree) -> None:
    """One chunk of one rank did not reach the storage."""
    tree.edit(STORED, lambda stored: stored["files"].remove(tree.random.choice(stored["files"])))


def swap_stored_ranks(tree: Tree) -> None:
    def swap(stored: Case) -> None:
        one = tree.random.choice(stored["files"])
        key = ("objectGroup", "chunkHash")
        other = next(f for f in stored["files"] if [f[k] for k in key] == [one[k] for k in key] and f is not one)
        one["sha256"], other["sha256"] = other["sha256"], one["sha256"]

    tree.edit(STORED, swap)


# negative controls


def controls(change: Callable[[list[Case], Tree], object]) -> Tamper:
    return lambda tree: tree.edit(PATHS["negative"], lambda cases: change(cases, tree))


def with_damage(cases: list[Case], damage: str) -> Case:
    return next(case for case in cases if case["fault"]["damage"] == damage)


def blind_control(cases: list[Case], tree: Tree) -> None:
    """The damaged file was restored as if it were whole."""
    with_damage(cases, "flipInFile")["ranks"] = with_damage(cases, "none")["ranks"]


def lose_a_control(cases: list[Case], tree: Tree) -> None:
    cases.remove(
        with_damage(cases, tree.random.choice(["flipInEngine", "flipInFile", "swappedRanks", "swappedChunks"]))
    )


def control_elsewhere(cases: list[Case], tree: Tree) -> None:
    """A control that damaged more than it says."""
    restored = with_damage(cases, "flipInFile")["ranks"][0]["requests"][0]["restored"]
    entry = tree.random.choice(restored)
    entry[3] = other_digest(entry[3])


def dirty_end(cases: list[Case], tree: Tree) -> None:
    """The storage was not whole again after the controls."""
    entry = tree.random.choice(with_damage(cases, "none")["ranks"][1]["requests"][0]["restored"])
    entry[3] = other_digest(entry[3])


BYTES: tuple[tuple[str, Tamper, Verdict], ...] = (
    ("a bit of a restored block is flipped", a_request(flip), failed(CODE.BYTES_DIFFER)),
    ("the ranks' blocks are swapped", a_case(swap_ranks), failed(CODE.BYTES_DIFFER)),
    ("a group holds stale blocks", a_case(stale_group), failed(CODE.BYTES_DIFFER)),
    ("one page was not restored", a_case(lose_page), failed(CODE.RESTORE_SHORT)),
    ("a group of one rank was not restored", a_case(lose_group), failed(CODE.GROUP_EMPTY, CODE.RESTORE_SHORT)),
    (
        "the tokens were computed again in silence",
        a_case(compute_silently),
        failed(CODE.EXTERNAL_TOKENS_MISMATCH, CODE.GROUP_EMPTY),
    ),
    (
        "the restore is one chunk short",
        restore_one_chunk_less,
        failed(CODE.EXTERNAL_TOKENS_MISMATCH, CODE.COUNTER_MISMATCH, CODE.TIER_MISMATCH),
    ),
    ("a block was never seen cold", never_seen_cold, failed(CODE.BLOCK_NO_COLD)),
    (
        "control and cold bytes differ",
        a_request(differ_from_control, "control"),
        failed(CODE.COLD_DIFFERS_FROM_CONTROL),
    ),
    ("a block is equal on both ranks", equal_on_both_ranks, failed(CODE.RANKS_IDENTICAL)),
)

COUNTERS: tuple[tuple[str, Tamper, Verdict], ...] = (
    ("the cold arm hit the cache", counted("engineAfter", EXTERNAL, 256, "cold"), failed(CODE.COLD_NOT_COLD)),
    (
        "the engine counts fewer restored tokens",
        counted("engineAfter", EXTERNAL, -256),
        failed(CODE.EXTERNAL_TOKENS_MISMATCH),
    ),
    (
        "the engine's source counter disagrees",
        counted("engineAfter", SOURCE, -1, label="external_kv_transfer"),
        failed(CODE.COUNTER_MISMATCH),
    ),
    (
        "more tokens were computed than were left",
        counted("engineAfter", SOURCE, 1, label="local_compute"),
        failed(CODE.COUNTER_MISMATCH),
    ),
    ("the cache server counts otherwise", counted("cacheAfter", LOOKUP, -256), failed(CODE.COUNTER_MISMATCH)),
    ("the cache server dropped events", counted("cacheAfter", DROPPED, 1), failed(CODE.COUNTER_MISMATCH)),
    (
        "another request ran meanwhile",
        counted("engineAfter", FINISHED, 1, label="length"),
        failed(CODE.COUNTER_MISMATCH),
    ),
    ("the local prefix cache helped", counted("engineAfter", LOCAL, 128), failed(CODE.LOCAL_HIT)),
    (
        "the disk arm was served from memory",
        counted("cacheAfter", MEMORY_TIER, 256, "disk", "restart"),
        failed(CODE.TIER_MISMATCH),
    ),
    ("a counter is not exposed", a_case(lose_counter), inconclusive(CODE.METRIC_MISSING)),
    (
        "the engine was restarted within a request",
        a_case(restart_within_a_case, "memory", "disk"),
        inconclusive(CODE.METRIC_MISSING),
    ),
)

ARMS: tuple[tuple[str, Tamper, Verdict], ...] = (
    ("KV memory was not overwritten", a_case(no_poison, "memory", "disk"), failed(CODE.NOT_POISONED)),
    ("the engine survived the restart", reuse_the_server("engine"), failed(CODE.NOT_RESTARTED)),
    ("the cache server survived the restart", reuse_the_server("cache"), failed(CODE.NOT_RESTARTED)),
    ("the evidence is of another arm", replay("disk", "memory"), error(CODE.EVIDENCE_MISSING)),
    ("a restore without restart is given out as one with it", replay_relabelled, error(CODE.EVIDENCE_MISSING)),
    ("the blocks are of another run's workers", a_case(another_run), error(CODE.EVIDENCE_MISSING)),
    ("a prompt length is missing", lose_a_length, error(CODE.EVIDENCE_MISSING)),
    ("a rank left no blocks", a_case(lambda case, tree: case["ranks"].pop()), failed(CODE.RANK_MISSING)),
    (
        "a worker could not read its blocks",
        a_case(lambda case, tree: case["ranks"][0]["errors"].append("KeyError: layer")),
        failed(CODE.CAPTURE_FAILED),
    ),
    (
        "another prompt was served",
        a_case(lambda case, tree: case.update(promptDigest=other_digest(case["promptDigest"]))),
        failed(CODE.DIGEST_MISMATCH),
    ),
    ("another transfer mode was used", other_mode, failed(CODE.TRANSFER_MODE_MISMATCH)),
)

PROOF: tuple[tuple[str, Tamper, Verdict], ...] = (
    ("a chunk was not stored", store_failed, failed(CODE.STORED_FILES_MISMATCH)),
    (
        "a stored file is damaged",
        a_stored_file(lambda file: file.update(sha256=other_digest(file["sha256"]))),
        failed(CODE.STORED_FILES_MISMATCH),
    ),
    ("the ranks' stored files are swapped", swap_stored_ranks, failed(CODE.STORED_FILES_MISMATCH)),
    ("a negative control was not caught", controls(blind_control), failed(CODE.NEGATIVE_CONTROL_PASSED)),
    ("a negative control is missing", controls(lose_a_control), failed(CODE.NEGATIVE_CONTROL_MISSING)),
    (
        "a negative control damaged something else",
        controls(control_elsewhere),
        failed(CODE.NEGATIVE_CONTROL_UNEXPECTED),
    ),
    ("the storage was not whole after the controls", controls(dirty_end), failed(CODE.BYTES_DIFFER)),
)


def too_few_groups(lab: Lab) -> Verdicts:
    model = lab.profile.model.model_copy(update={"min_kv_groups": 9})
    return verdicts(lab.derive(lab.files, lab.profile.model_copy(update={"model": model})))


FAULTS: tuple[Fault, ...] = (
    *(
        fault(Group.KV, name, change, {KV: verdict})
        for table in (BYTES, COUNTERS, ARMS, PROOF)
        for name, change, verdict in table
    ),
    fault(
        Group.KV,
        "a worker survived the restart",
        reuse_a_worker,
        {KV: failed(CODE.NOT_RESTARTED), **dict.fromkeys((PINS, SERVE, MEMORY), error(CODE.EVIDENCE_MISSING))},
    ),
    Fault(Group.KV, "the model has too few KV-cache groups", too_few_groups, {KV: failed(CODE.TOO_FEW_GROUPS)}),
)
