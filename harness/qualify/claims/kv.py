# SPDX-License-Identifier: Apache-2.0
"""kv.restore: every restored KV byte equals the cold one, per rank and KV-cache group, and the proof can fail.

Equal output proves nothing about the cache, and neither do equal counters; both are recorded, bytes decide. Every rule
is a function of one case, so that real restores and negative controls are judged by the same code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from qualify.claims.boots import visited
from qualify.claims.kv_compare import (
    Comparison,
    Place,
    block_sizes,
    cold_digests,
    cold_places,
    compare,
    compare_boots,
    equal_on_ranks,
    fault_places,
    told_boots,
    within_chunks,
)
from qualify.claims.kv_counters import Counts, read_counts
from qualify.claims.model import Check, Judgement, Status, check
from qualify.evidence import Evidence, MissingEvidence
from qualify.probes.kv_records import (
    STORED,
    Arm,
    Case,
    ChunkDigest,
    Damage,
    Fault,
    KvRequest,
    Stored,
    arm_file,
    expected_external,
    prompt,
    prompt_digest,
)
from qualify.probes.kv_storage import outside_window
from qualify.probes.workers import WORKERS, WorkerReport
from qualify.profiles import Probe, Profile
from qualify.reasons import ReasonCode

ARMS = {
    Arm.CONTROL: Probe.KV_CONTROL,
    Arm.COLD: Probe.KV_COLD,
    Arm.MEMORY: Probe.KV_RESTORE,
    Arm.DISK: Probe.KV_RESTORE,
    Arm.RESTART: Probe.KV_RESTART,
    Arm.NEGATIVE: Probe.KV_CONTROLS,
}
RESTORING = (Arm.MEMORY, Arm.DISK, Arm.RESTART)

TRANSFER_CONTEXT = re.compile(r"Creating transfer context \(device_type=\w+, mode=(\w+)\)")


@dataclass(frozen=True)
class Finding:
    """One rule applied to one case. An observed None is unknown, and unknown never holds."""

    rule: str
    code: ReasonCode
    observed: Any
    expected: Any
    detail: str = ""

    @property
    def holds(self) -> bool:
        return self.observed is not None and bool(self.observed == self.expected)

    @property
    def reason(self) -> ReasonCode:
        return ReasonCode.METRIC_MISSING if self.observed is None else self.code


@dataclass(frozen=True)
class Arms:
    """All evidence of the claim. Cases are by prompt length."""

    cases: dict[Arm, dict[int, Case]]
    controls: tuple[Case, ...]
    stored: Stored


def judge(evidence: Evidence, profile: Profile) -> Judgement:
    arms = _read(evidence, profile)
    modes = _transfer_modes(evidence, profile)
    checks = (*_complete(arms, profile), *_cold_checks(arms, profile), *_restore_checks(arms, profile))
    checks += (*_mode_checks(modes, profile), *_restart_checks(arms), *_stored_checks(arms, profile))
    checks += tuple(_control_checks(arms, profile))
    observed = _observed(arms, modes)
    return Judgement(
        checks=checks,
        summary=_summary(checks, observed),
        observed=observed,
        expected={
            "externalTokens": {
                str(tokens): expected_external(tokens, profile.cache.chunk_tokens)
                for tokens in profile.kv.prompt_tokens
            },
            "mismatches": 0,
            "transferMode": profile.cache.transfer_mode,
            "ranks": profile.kv.ranks,
            "minKvGroups": profile.model.min_kv_groups,
        },
    )


# Reading


def _read(evidence: Evidence, profile: Profile) -> Arms:
    cases: dict[Arm, dict[int, Case]] = {}
    controls: tuple[Case, ...] = ()
    for arm, probe in ARMS.items():
        boot, folder = visited(evidence, profile, probe)[0]
        path = f"{folder}/{arm_file(arm)}"
        found = evidence.record(path, tuple[Case, ...])
        workers = {report.process for report in evidence.record(f"{folder}/{WORKERS}", tuple[WorkerReport, ...])}
        strange = {capture.process for case in found for capture in case.ranks} - workers
        if strange or any(case.arm is not arm or case.boot != boot.name for case in found):
            raise MissingEvidence(f"{path} of boot {boot.name} and its workers")
        if arm is Arm.NEGATIVE:
            controls = found
        else:
            cases[arm] = {case.prompt_tokens: case for case in found}
    boot, folder = visited(evidence, profile, Probe.KV_COLD)[0]
    stored = evidence.record(f"{folder}/{STORED}", Stored)
    if stored.boot != boot.name:
        raise MissingEvidence(f"{folder}/{STORED} of boot {boot.name}")
    return Arms(cases, controls, stored)


def _transfer_modes(evidence: Evidence, profile: Profile) -> dict[str, list[str]]:
    """Per boot with a connector: the transfer mode that each worker logged."""
    folders = {visited(evidence, profile, probe)[0][1] for probe in (Probe.KV_COLD, Probe.KV_RESTART)}
    modes = {}
    for folder in sorted(folders):
        log = f"{folder}/engine.log.gz"
        text = evidence.text(log if evidence.exists(log) else f"{folder}/engine.log")
        modes[folder] = TRANSFER_CONTEXT.findall(text)
    return modes


# Rules of one case


def _common(case: Case, counts: Counts, profile: Profile) -> Iterator[Finding]:
    """What holds for every request of every arm."""
    ranks = [capture.rank for capture in case.ranks]
    requests = [len(capture.requests) for capture in case.ranks]
    yield Finding(
        "every rank left evidence", ReasonCode.RANK_MISSING, ranks, list(range(profile.engine.tensor_parallel))
    )
    yield Finding(
        "the workers captured without an error",
        ReasonCode.CAPTURE_FAILED,
        [error for capture in case.ranks for error in capture.errors],
        [],
    )
    yield Finding("each rank saw one request", ReasonCode.COUNTER_MISMATCH, requests, [1] * len(ranks))
    yield Finding("the engine finished one request", ReasonCode.COUNTER_MISMATCH, counts.finished, 1)
    yield Finding(
        "the prompt is the fixed one of its length",
        ReasonCode.DIGEST_MISMATCH,
        case.prompt_digest,
        prompt_digest(prompt(case.prompt_tokens)),
    )
    yield Finding(
        "the workers saw the whole prompt",
        ReasonCode.COUNTER_MISMATCH,
        [request.prompt_tokens for request in _requests(case)],
        [case.prompt_tokens] * len(ranks),
    )
    yield Finding(
        "the steps computed each token once",
        ReasonCode.COUNTER_MISMATCH,
        [_steps_whole(request) for request in _requests(case)],
        [True] * len(ranks),
    )


def _computed_findings(case: Case, profile: Profile) -> Iterator[Finding]:
    """Control and cold: every token computed here, every full block seen."""
    counts = read_counts(case.scrapes)
    tokens = case.prompt_tokens
    yield from _common(case, counts, profile)
    code = ReasonCode.COLD_NOT_COLD
    yield Finding("no external tokens", code, counts.external_hits, 0)
    yield Finding("no tokens from the local prefix cache", code, counts.local_hits, 0)
    yield Finding("all tokens computed locally", code, counts.local_compute, tokens)
    yield Finding(
        "the workers started at token 0", code, [r.computed_tokens for r in _requests(case)], [0] * len(case.ranks)
    )
    groups = {tensor.group for capture in case.ranks for tensor in capture.tensors}
    yield Finding(
        f"the model has at least {profile.model.min_kv_groups} KV-cache groups",
        ReasonCode.TOO_FEW_GROUPS,
        len(groups) >= profile.model.min_kv_groups,
        True,
        detail=f"{len(groups)} groups",
    )
    boundary = expected_external(tokens, profile.cache.chunk_tokens)
    wanted = {place for capture in case.ranks for place in cold_places(capture, boundary)}
    seen = cold_digests(case)
    missing = sorted(wanted - seen.keys())
    yield Finding(
        "every full block was seen cold",
        ReasonCode.BLOCK_NO_COLD,
        (len(missing), bool(seen)),
        (0, True),
        detail=f"first missing: {missing[0]}" if missing else "",
    )


def _cold_findings(case: Case, control: Case, profile: Profile) -> Iterator[Finding]:
    yield from _computed_findings(case, profile)
    yield Finding(
        "the cache server uses the profile's chunk",
        ReasonCode.EXTERNAL_TOKENS_MISMATCH,
        case.chunk_tokens,
        profile.cache.chunk_tokens,
    )
    different = compare_boots(case, control).differing
    yield Finding(
        "cold bytes equal the control's",
        ReasonCode.COLD_DIFFERS_FROM_CONTROL,
        len(different),
        0,
        detail=f"first difference: {different[0]}" if different else "",
    )
    same = equal_on_ranks(case)
    if profile.kv.ranks == "distinct":
        observed = {group: equal for group, (equal, _) in same.items()}
        yield Finding(
            "no block is the same on two ranks", ReasonCode.RANKS_IDENTICAL, observed, dict.fromkeys(observed, 0)
        )
    else:
        observed = {group: equal == total for group, (equal, total) in same.items()}
        yield Finding(
            "every block is the same on all ranks",
            ReasonCode.RANKS_DISAGREE,
            observed,
            dict.fromkeys(observed, True),
        )


def _restored_findings(case: Case, cold: Case, arm: Arm, profile: Profile) -> Iterator[Finding]:
    """A restore that must be whole and equal. `arm` says which tier it must come from."""
    counts = read_counts(case.scrapes)
    yield from _common(case, counts, profile)
    yield from _count_findings(case, counts, arm, profile)
    if arm is not Arm.RESTART:
        yield _poison_finding(case)
    yield from _byte_findings(compare(cold, case))


def _count_findings(case: Case, counts: Counts, arm: Arm, profile: Profile) -> Iterator[Finding]:
    tokens, chunk = case.prompt_tokens, profile.cache.chunk_tokens
    external, whole = expected_external(tokens, chunk), tokens // chunk * chunk
    code = ReasonCode.EXTERNAL_TOKENS_MISMATCH
    yield Finding("external tokens by the engine's cache counter", code, counts.external_hits, external)
    yield Finding(
        "external tokens by every worker",
        code,
        [r.computed_tokens for r in _requests(case)],
        [external] * len(case.ranks),
    )
    code = ReasonCode.COUNTER_MISMATCH
    yield Finding("external tokens by the engine's source counter", code, counts.external_source, external)
    yield Finding("the rest computed locally", code, counts.local_compute, tokens - external)
    yield Finding("the cache server counted whole chunks as hits", code, counts.lookup_hits, whole)
    yield Finding("the cache server dropped no event", code, counts.dropped_events, 0)
    yield Finding("no tokens from the local prefix cache", ReasonCode.LOCAL_HIT, counts.local_hits, 0)
    tier, hits, others = (
        ("memory", counts.memory_hits, counts.disk_hits)
        if arm is Arm.MEMORY
        else ("disk", counts.disk_hits, counts.memory_hits)
    )
    # A tier that never hit has no series; the other tier holding every hit says the same.
    yield Finding(
        f"all hits from {tier}", ReasonCode.TIER_MISMATCH, None if hits is None else (hits, others or 0), (whole, 0)
    )


def _poison_finding(case: Case) -> Finding:
    tensors = {capture.rank: len(capture.tensors) for capture in case.ranks}
    good = sorted(
        poison.rank
        for poison in case.poison
        if poison.verified and poison.bytes > 0 and poison.tensors == tensors.get(poison.rank)
    )
    return Finding(
        "all KV memory was poisoned before the restore",
        ReasonCode.NOT_POISONED,
        (good, case.reset_attempts is not None),
        (sorted(tensors), True),
    )


def _byte_findings(comparison: Comparison) -> Iterator[Finding]:
    empty = [f"rank {group.rank}, group {group.group}" for group in comparison.groups if not group.blocks]
    yield Finding(
        "every group was restored on every rank",
        ReasonCode.GROUP_EMPTY,
        (empty, bool(comparison.groups)),
        ([], True),
    )
    for rule, code, places in (
        ("every block that attention reads was restored", ReasonCode.RESTORE_SHORT, comparison.short),
        ("every restored block was seen cold", ReasonCode.BLOCK_NO_COLD, comparison.unseen),
    ):
        detail = f"first: {min(places)}" if places else ""
        yield Finding(rule, code, len(places), 0, detail=detail)
    yield Finding(
        "restored bytes equal cold bytes",
        ReasonCode.BYTES_DIFFER,
        len(comparison.differing),
        0,
        detail=comparison.first_difference or "",
    )


# Checks


def _complete(arms: Arms, profile: Profile) -> Iterator[Check]:
    wanted = sorted(profile.kv.prompt_tokens)
    for arm, cases in arms.cases.items():
        yield check(
            "every prompt length was served",
            sorted(cases) == wanted,
            ReasonCode.EVIDENCE_MISSING,
            where=arm,
            observed=sorted(cases),
            expected=wanted,
            otherwise=Status.ERROR,
        )


def _cold_checks(arms: Arms, profile: Profile) -> Iterator[Check]:
    control, cold = arms.cases[Arm.CONTROL], arms.cases[Arm.COLD]
    yield from _gather(Arm.CONTROL, {n: list(_computed_findings(case, profile)) for n, case in control.items()})
    both = {n: list(_cold_findings(case, control[n], profile)) for n, case in cold.items() if n in control}
    yield from _gather(Arm.COLD, both)


def _restore_checks(arms: Arms, profile: Profile) -> Iterator[Check]:
    cold = arms.cases[Arm.COLD]
    for arm in RESTORING:
        cases = {n: case for n, case in arms.cases[arm].items() if n in cold}
        yield from _gather(arm, {n: list(_restored_findings(case, cold[n], arm, profile)) for n, case in cases.items()})


def _gather(arm: Arm, findings: dict[int, list[Finding]]) -> Iterator[Check]:
    """One check per rule, over all prompt lengths."""
    rules = list(dict.fromkeys(finding.rule for found in findings.values() for finding in found))
    for rule in rules:
        by_length = {n: next(f for f in found if f.rule == rule) for n, found in findings.items()}
        bad = {n: finding for n, finding in by_length.items() if not finding.holds}
        first = next(iter(bad.values()), None)
        where = str(arm)
        if first is not None:
            where = f"{arm}, {next(iter(bad))} tokens" + (f": {first.detail}" if first.detail else "")
        unknown = first is not None and all(finding.observed is None for finding in bad.values())
        yield check(
            rule,
            first is None,
            ReasonCode.METRIC_MISSING if first is None else _worst_reason(bad),
            where=where,
            observed={str(n): finding.observed for n, finding in by_length.items()},
            expected={str(n): finding.expected for n, finding in by_length.items()},
            otherwise=Status.INCONCLUSIVE if unknown else Status.FAILED,
        )


def _worst_reason(bad: dict[int, Finding]) -> ReasonCode:
    """A rule that was seen broken outweighs one that could not be seen."""
    return next((f.reason for f in bad.values() if f.observed is not None), ReasonCode.METRIC_MISSING)


def _mode_checks(modes: dict[str, list[str]], profile: Profile) -> Iterator[Check]:
    for folder, found in modes.items():
        expected = [profile.cache.transfer_mode] * profile.engine.tensor_parallel
        yield check(
            "every worker logged the profile's transfer mode",
            found == expected,
            ReasonCode.TRANSFER_MODE_MISMATCH,
            where=folder,
            observed=found,
            expected=expected,
        )


def _restart_checks(arms: Arms) -> Iterator[Check]:
    before, after = arms.cases[Arm.COLD].values(), arms.cases[Arm.RESTART].values()
    old, new = _workers(before), _workers(after)
    yield check(
        "no worker of the cold arm serves the restart arm",
        bool(old and new) and not old & new,
        ReasonCode.NOT_RESTARTED,
        where=Arm.RESTART,
        observed=sorted(pid for pid, _ in new),
        expected=f"none of {sorted(pid for pid, _ in old)}",
    )
    for name in ("engine", "cache server"):
        starts = [{getattr(read_counts(c.scrapes), _START[name]) for c in cases} for cases in (before, after)]
        known = all(starts) and None not in starts[0] | starts[1]
        yield check(
            f"the {name} was started anew",
            known and not starts[0] & starts[1],
            ReasonCode.NOT_RESTARTED if known else ReasonCode.METRIC_MISSING,
            where=Arm.RESTART,
            observed=sorted(starts[1] - {None}),
            expected=f"none of {sorted(starts[0] - {None})}",
            otherwise=Status.FAILED if known else Status.INCONCLUSIVE,
        )


_START = {"engine": "engine_start", "cache server": "cache_start"}


def _stored_checks(arms: Arms, profile: Profile) -> Iterator[Check]:
    """The stored files against chunks rebuilt from the engine's cold blocks, without any code of the cache server."""
    stored, code = arms.stored, ReasonCode.STORED_FILES_MISMATCH
    wanted = _wanted_chunks(arms, profile)
    by_digest: dict[tuple[int, str], list[int]] = {}
    for index, file in enumerate(stored.files):
        by_digest.setdefault((file.rank, file.sha256), []).append(index)
    matched = {key: by_digest.get((key[0], digest or ""), []) for key, digest in wanted.items()}
    lost = sorted(key for key, files in matched.items() if len(files) != 1)
    yield check(
        "every cold chunk is stored once, byte for byte",
        bool(wanted) and not lost,
        code,
        where=_chunk_name(lost[0]) if lost else Arm.COLD,
        observed=len(wanted) - len(lost),
        expected=len(wanted),
    )
    used = {files[0] for files in matched.values() if len(files) == 1}
    left = len(stored.files) - len(used) + len(stored.strangers)
    yield check(
        "no stored file is anything else", bool(wanted) and left == 0, code, where=Arm.COLD, observed=left, expected=0
    )
    names: dict[tuple[int, int], set[str]] = {}
    numbers: dict[int, set[int]] = {}
    for (_, number, tokens, chunk), files in matched.items():
        if len(files) == 1:
            names.setdefault((tokens, chunk), set()).add(stored.files[files[0]].chunk_hash)
            numbers.setdefault(number, set()).add(stored.files[files[0]].object_group)
    split = sorted(key for key, hashes in names.items() if len(hashes) > 1)
    yield check(
        "a chunk has one name on all ranks and object groups",
        bool(names) and not split and all(found == {number} for number, found in numbers.items()),
        code,
        where=f"chunk {split[0][1]} of {split[0][0]} tokens" if split else Arm.COLD,
        observed=len(split),
        expected=0,
    )


Chunk = tuple[int, int, int, int]
"""(rank, object, prompt tokens, chunk)"""


def _wanted_chunks(arms: Arms, profile: Profile) -> dict[Chunk, str | None]:
    """Every chunk that must be stored and its digest by the engine's bytes; None where no digest was taken.

    Where the ranks hold equal bytes the first one writes for all.
    """
    writers = range(profile.engine.tensor_parallel if profile.kv.ranks == "distinct" else 1)
    found: dict[Chunk, str | None] = {
        (rank, number, tokens, chunk): None
        for rank in writers
        for number in range(len(arms.stored.objects))
        for tokens in arms.cases[Arm.COLD]
        for chunk in range(tokens // profile.cache.chunk_tokens)
    }
    for tokens, case in arms.cases[Arm.COLD].items():
        for capture in case.ranks:
            for number, chunk, digest in _chunks(capture.requests):
                if capture.rank in writers:
                    found[capture.rank, number, tokens, chunk] = digest
    return found


def _chunks(requests: Sequence[KvRequest]) -> Iterator[ChunkDigest]:
    for request in requests:
        yield from request.chunks


def _chunk_name(key: Chunk) -> str:
    rank, number, tokens, chunk = key
    return f"rank {rank}, object group {number}, chunk {chunk} of the prompt of {tokens} tokens"


# Negative controls


def _control_checks(arms: Arms, profile: Profile) -> Iterator[Check]:
    cold = arms.cases[Arm.COLD].get(max(profile.kv.prompt_tokens))
    ran = {_control_name(case.fault): case for case in arms.controls if case.fault is not None}
    wanted = (
        _wanted_controls(cold, arms.stored, profile) if cold is not None else {_control_name(Fault(damage=Damage.NONE))}
    )
    for name in sorted(wanted | ran.keys()):
        yield _control_check(name, ran.get(name), cold, profile)


def _control_name(fault: Fault) -> str:
    return f"{fault.damage} {fault.groups[0]}" if fault.damage is Damage.STALE_GROUP and fault.groups else fault.damage


def _wanted_controls(cold: Case, stored: Stored, profile: Profile) -> set[str]:
    names = {Damage.FLIP_IN_ENGINE, Damage.FLIP_IN_FILE, Damage.NONE}
    if profile.kv.ranks == "distinct" and profile.engine.tensor_parallel > 1:
        names.add(Damage.SWAPPED_RANKS)
    if expected_external(cold.prompt_tokens, profile.cache.chunk_tokens) >= 2 * profile.cache.chunk_tokens:
        names.add(Damage.SWAPPED_CHUNKS)
    if outside_window(cold, stored) is not None:
        names.add(Damage.FLIP_OUTSIDE_WINDOW)
    return {str(name) for name in names} | {f"{Damage.STALE_GROUP} {group}" for group in block_sizes(cold)}


def _control_check(name: str, case: Case | None, cold: Case | None, profile: Profile) -> Check:
    rule = f"negative control: {name}"
    if case is None or cold is None or case.fault is None or case.fault.not_run is not None:
        reason = case.fault.not_run if case is not None and case.fault is not None else "no evidence of it"
        return check(rule, False, ReasonCode.NEGATIVE_CONTROL_MISSING, where=reason or "")
    comparison = compare(cold, case)
    broken = {f.reason for f in _restored_findings(case, cold, Arm.NEGATIVE, profile) if not f.holds}
    harmless = case.fault.damage in (Damage.NONE, Damage.FLIP_OUTSIDE_WINDOW)
    caught = _as_damaged(case, comparison, profile)
    expected: set[ReasonCode] = set() if harmless else {ReasonCode.BYTES_DIFFER}
    code = ReasonCode.NEGATIVE_CONTROL_UNEXPECTED
    if harmless and ReasonCode.BYTES_DIFFER in broken:
        code = ReasonCode.BYTES_DIFFER
    elif not harmless and not comparison.differing:
        code = ReasonCode.NEGATIVE_CONTROL_PASSED
    return check(
        rule,
        broken == expected and caught,
        code,
        where=comparison.first_difference or "",
        observed={"broken": sorted(broken), "differing": len(comparison.differing)},
        expected={"broken": sorted(expected), "differing": "none" if harmless else _promise(case.fault)},
    )


def _promise(fault: Fault) -> str:
    one = fault.damage in (Damage.FLIP_IN_ENGINE, Damage.FLIP_IN_FILE)
    chunks = f", chunks {list(fault.chunks)}" if fault.chunks else ""
    return f"{'one block' if one else 'all blocks'} on ranks {list(fault.ranks)}, groups {list(fault.groups)}{chunks}"


def _as_damaged(case: Case, comparison: Comparison, profile: Profile) -> bool:
    """Whether exactly the damaged places differ."""
    fault, differing = case.fault, comparison.differing
    if fault is None:
        return False
    if fault.damage in (Damage.NONE, Damage.FLIP_OUTSIDE_WINDOW):
        return not differing
    reach = _reach(case, fault, comparison, profile)
    if fault.damage in (Damage.FLIP_IN_ENGINE, Damage.FLIP_IN_FILE):
        one_each = sorted(place.rank for place in differing) == sorted(fault.ranks)
        applied = fault.damage is Damage.FLIP_IN_FILE or differing == fault_places(case)
        return one_each and applied and differing <= reach
    return bool(reach) and differing == reach


def _reach(case: Case, fault: Fault, comparison: Comparison, profile: Profile) -> set[Place]:
    """The restored places that the damage can touch."""
    places = {p for p in comparison.restored if p.rank in fault.ranks and p.group in fault.groups}
    if not fault.chunks:
        return places
    return within_chunks(places, fault.chunks, profile.cache.chunk_tokens, block_sizes(case))


# What the claim shows


def _observed(arms: Arms, modes: dict[str, list[str]]) -> dict[str, Any]:
    cold = arms.cases[Arm.COLD]
    return {
        **_between_boots(arms),
        "chunkTokens": arms.stored.chunk_tokens,
        "objectGroups": [list(groups) for groups in arms.stored.objects],
        "transferModes": sorted({mode for found in modes.values() for mode in found}),
        "storedFiles": len(arms.stored.files),
        "equalOnRanks": {
            str(n): {str(g): list(v) for g, v in equal_on_ranks(case).items()} for n, case in cold.items()
        },
        "restores": [_row(arm, case, cold[n]) for arm in RESTORING for n, case in arms.cases[arm].items() if n in cold],
    }


def _between_boots(arms: Arms) -> dict[str, Any]:
    """What of the cold bytes could be held against the control's; left out where all of it could."""
    control = arms.cases[Arm.CONTROL]
    found = {n: compare_boots(case, control[n]) for n, case in arms.cases[Arm.COLD].items() if n in control}
    if not any(two.open_places for two in found.values()):
        return {}
    return {"coldAgainstControl": {str(n): told_boots(two) for n, two in found.items()}}


def _row(arm: Arm, case: Case, cold: Case) -> dict[str, Any]:
    """One restore: counts, bytes and digests per rank and group; outputs as information only."""
    comparison, counts = compare(cold, case), read_counts(case.scrapes)
    return {
        "arm": arm,
        "promptTokens": case.prompt_tokens,
        "externalTokens": counts.external_hits,
        "memoryTokens": counts.memory_hits,
        "diskTokens": counts.disk_hits,
        "seconds": case.seconds,
        "coldSeconds": cold.seconds,
        "bytes": sum(group.byte_count for group in comparison.groups),
        "mismatches": len(comparison.differing),
        "firstDifference": comparison.first_difference,
        "groups": [
            {
                "rank": group.rank,
                "group": group.group,
                "specs": list(group.specs),
                "window": group.window,
                "tokensPerBlock": group.tokens_per_block,
                "tensors": group.tensors,
                "blocks": group.blocks,
                "bytes": group.byte_count,
                "mismatches": group.mismatches,
                "noCold": group.no_cold,
                "short": group.short,
                "notRetained": group.not_retained,
                "coldRoot": group.cold_root,
                "restoredRoot": group.restored_root,
            }
            for group in comparison.groups
        ],
        "information": {
            "tokensEqual": bool(case.tokens) and case.tokens == cold.tokens,
            "logprobsEqual": bool(case.logprobs) and case.logprobs == cold.logprobs,
        },
    }


def _summary(checks: Sequence[Check], observed: dict[str, Any]) -> str:
    bad = next((item for item in checks if item.status is not Status.PASSED), None)
    if bad is not None:
        return f"not true that {bad.name} ({bad.where})" if bad.where else f"not true that {bad.name}"
    restores = observed["restores"]
    ranks = {group["rank"] for row in restores for group in row["groups"]}
    groups = {group["group"] for row in restores for group in row["groups"]}
    total = sum(row["bytes"] for row in restores)
    return (
        f"{len(restores)} restores, {total:,} bytes on {len(ranks)} ranks and {len(groups)} KV-cache groups: "
        f"0 mismatches; every negative control was caught"
    )


# Small helpers


def _requests(case: Case) -> list[KvRequest]:
    return [request for capture in case.ranks for request in capture.requests]


def _steps_whole(request: KvRequest) -> bool:
    """Whether the steps follow each other from the computed count to the end of the prompt."""
    position = request.computed_tokens
    for start, count in request.steps:
        if start != position or count <= 0:
            return False
        position += count
    return position >= request.prompt_tokens


def _workers(cases: Any) -> set[tuple[int, int]]:
    return {(capture.process.pid, capture.process.started) for case in cases for capture in case.ranks}
