# SPDX-License-Identifier: Apache-2.0
"""plugin.active: every rank runs the plugin's call sites in memory that was reserved once and never moved.

A boot that promises stock vLLM must run stock vLLM on every layer. Where two boots differ in nothing but the plugin,
their greedy answers must be the same, and their cold KV bytes wherever two boots can be expected to agree
(`kv_compare.first_open`): there lie the bytes that the plugin's operator itself writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from qualify.claims.boots import require_boot, visited, worker_reports
from qualify.claims.kv_compare import compare_boots, told_boots
from qualify.claims.model import Check, Judgement, Status, check, equal
from qualify.evidence import Evidence, MissingEvidence
from qualify.expect import Q_OUT_BYTES, drafter, graph_sets, pairs, reserved_rows
from qualify.observe.graphs import GraphSets
from qualify.probes.kv_records import Arm, Case, arm_file
from qualify.probes.load_records import SERVE, Served
from qualify.probes.moments import LOADED, READY
from qualify.probes.plugin_records import Buffers, PluginReport, plugin_file
from qualify.probes.workers import WorkerReport
from qualify.profiles import Boot, Probe, Profile
from qualify.reasons import ReasonCode

OURS = "vllm_qout.models._fused_qnorm_rope_kv_insert"
OUR_CONTEXT = "vllm_qout.models._context_insert.<locals>._insert_context_kv"
STOCK = "vllm.models.deepseek_v4.attention.DeepseekV4Attention._fused_qnorm_rope_kv_insert"
STOCK_CONTEXT = "vllm.models.deepseek_v4.nvidia.dspark._insert_context_kv"

# sha256 of the source texts in vLLM 0.32.0; a test holds them against the plugin's own pins.
METHOD_SHA256 = "2faf46780af3a94cc8344c4cbe26dd9bc634fd1da64cfb8fbea1a9fcbc3c61b7"
CONTEXT_SHA256 = "648eb4f804ca31416ec5e9a7e0c15c0b114aadf00a9158c6161c51929764ff06"

Held = dict[tuple[int, int], tuple[int, int]]
"""(address, bytes) by (lane, microbatch)."""


@dataclass(frozen=True)
class BootPlugin:
    """One boot; reports are in rank order, when ready and after the load."""

    boot: Boot
    folder: str
    ready: tuple[PluginReport, ...]
    loaded: tuple[PluginReport, ...]


def judge(evidence: Evidence, profile: Profile) -> Judgement:
    boots = visited(evidence, profile)
    workers = worker_reports(evidence, [folder for _, folder in boots])
    found = {boot.name: _read(evidence, boot, folder, workers[folder]) for boot, folder in boots}
    checks = [item for one in found.values() for item in _checks(one, profile)]
    compared = [_compare(evidence, found[on.name], found[off.name]) for on, off in pairs(profile)]
    checks += [item for items, _ in compared for item in items]
    return Judgement(
        checks=tuple(checks),
        summary=_summary(checks, list(found.values())),
        observed={
            "boots": {name: _observed(one) for name, one in found.items()},
            "compared": [told for _, told in compared],
        },
        expected={
            "boots": {
                boot.name: {"plugin": "on", "rows": _promised_rows(profile, boot)} if boot.plugin else {"plugin": "off"}
                for boot in profile.boots
            },
            "methodSha256": METHOD_SHA256,
        },
    )


def _read(evidence: Evidence, boot: Boot, folder: str, workers: tuple[WorkerReport, ...]) -> BootPlugin:
    known = {worker.process for worker in workers}
    found = []
    for label in (READY, LOADED):
        path = f"{folder}/{plugin_file(label)}"
        reports = evidence.record(path, tuple[PluginReport, ...])
        if any(report.process is None or report.process not in known for report in reports):
            raise MissingEvidence(f"{path} of its own workers")
        found.append(reports)
    return BootPlugin(boot, folder, *found)


# One boot


def _checks(one: BootPlugin, profile: Profile) -> Iterator[Check]:
    ranks = list(range(profile.engine.tensor_parallel))
    seen = [[report.rank for report in reports] for reports in (one.ready, one.loaded)]
    yield equal(
        "every rank reported before and after the load", seen, [ranks, ranks], ReasonCode.RANK_MISSING, where=one.folder
    )
    for ready, loaded in zip(one.ready, one.loaded, strict=False):
        where = f"{one.folder}, rank {loaded.rank}"
        if not one.boot.plugin:
            yield from _off(loaded, where)
            continue
        yield from _bound(loaded, where)
        if loaded.report is not None and loaded.report.get("active") is True:
            yield from _context(loaded, one.boot, profile, where)
            yield from _reserved(loaded, one.boot, profile, where)
            yield from _still(ready, loaded, one.boot, profile, where)
    code = [
        sorted((method.runs, method.runs_sha256, len(method.layers)) for method in report.methods)
        for report in one.loaded
        if report.methods is not None
    ]
    yield check(
        "all ranks run the same code",
        all(value == code[0] for value in code),
        ReasonCode.RANKS_DISAGREE,
        where=one.folder,
    )


def _open(rule: str, where: str) -> Check:
    """A rule whose fact the worker could not read."""
    return check(rule, False, ReasonCode.ENVIRONMENT_INCOMPLETE, where=where, otherwise=Status.INCONCLUSIVE)


def _bound(report: PluginReport, where: str) -> Iterator[Check]:
    """The plugin's word, and what is found on the layers."""
    own = report.report
    if own is None or report.methods is None:
        yield _open("the plugin is active", where)
        return
    yield check(
        "the plugin is active",
        own.get("active") is True,
        ReasonCode.PLUGIN_INACTIVE,
        where=where,
        observed=own.get("reason"),
    )
    runs = sorted(method.runs for method in report.methods)
    yield equal("every attention layer runs the plugin's method", runs, [OURS], ReasonCode.PLUGIN_INACTIVE, where=where)
    stock = sorted({method.stock_sha256 for method in report.methods})
    yield equal(
        "the replaced method is the pinned one", stock, [METHOD_SHA256], ReasonCode.PLUGIN_METHOD_MISMATCH, where=where
    )


def _context(report: PluginReport, boot: Boot, profile: Profile, where: str) -> Iterator[Check]:
    """Calls that went to stock vLLM all the same, and the draft's context insertion."""
    fallen = (report.report or {}).get("counters", {}).get("stock")
    yield equal("no call fell back to stock vLLM", fallen, 0, ReasonCode.PLUGIN_FELL_BACK, where=where)
    if drafter(profile, boot) != "dspark":
        return
    rule, found = "the draft's context insertion is the plugin's", report.context
    if found is None:
        yield _open(rule, where)
        return
    yield equal(rule, found.get("runs"), OUR_CONTEXT, ReasonCode.PLUGIN_INACTIVE, where=where)
    yield equal(
        "the replaced insertion is the pinned one",
        found.get("stock_sha256"),
        CONTEXT_SHA256,
        ReasonCode.PLUGIN_METHOD_MISMATCH,
        where=where,
    )


def _promised_rows(profile: Profile, boot: Boot) -> dict[str, int]:
    return {f"lane {lane}": rows for lane, rows in reserved_rows(profile, boot).items()}


def _rows(report: PluginReport) -> list[dict[str, Any]]:
    return list((report.report or {}).get("buffers", ()))


def _reserved(report: PluginReport, boot: Boot, profile: Profile, where: str) -> Iterator[Check]:
    """Every lane has its buffer, of the predicted rows, and the sizes add up."""
    rows = _rows(report)
    code = ReasonCode.PLUGIN_NOT_RESERVED
    found = {f"lane {row['lane']}": row["rows"] for row in rows}
    yield equal("q_out has the predicted rows in every lane", found, _promised_rows(profile, boot), code, where=where)
    sizes = [row["bytes"] for row in rows]
    wanted = [row["rows"] * row["heads"] * Q_OUT_BYTES for row in rows]
    yield equal("q_out has the bytes of its rows and heads", sizes, wanted, code, where=where)
    total = (report.report or {}).get("reservedBytes")
    yield equal("the reserved bytes are those of the buffers", total, sum(sizes), code, where=where)
    lanes = _lanes_with_graphs(profile, boot)
    for row in rows:
        used = row["addresses"]
        idle = [phase for phase in _phases(row["lane"], lanes) if not used.get(phase)]
        yield check(
            "q_out was used in every phase",
            not idle,
            ReasonCode.PLUGIN_INACTIVE,
            where=f"{where}, lane {row['lane']}",
            observed=idle,
            expected=[],
        )


def _lanes_with_graphs(profile: Profile, boot: Boot) -> set[int]:
    """Lanes whose model is captured whole, so that its calls run under capture."""
    sets = graph_sets(profile, boot)
    if not isinstance(sets, GraphSets):
        return set()
    return {lane for lane, sizes in ((0, sets.full), (1, sets.drafter_full)) if sizes}


def _phases(lane: int, captured: set[int]) -> list[str]:
    """The phases in which Python must have asked for the lane. A draft that is captured whole is asked for in no live
    step: its graph holds the address.
    """
    phases = ["profile", "capture"] if lane in captured else ["profile"]
    return phases if lane in captured and lane > 0 else [*phases, "live"]


def _held(buffers: Buffers) -> Held:
    return {(one.lane, one.ubatch): (one.address, one.bytes) for one in buffers.buffers}


def _still(ready: PluginReport, loaded: PluginReport, boot: Boot, profile: Profile, where: str) -> Iterator[Check]:
    """One address and size per buffer: before the profiling capture, after the real one, when ready, after the load."""
    if loaded.now is None or not loaded.now.buffers:
        yield _open("q_out stands", where) if loaded.now is None else _nothing_reserved(where)
        return
    end = _held(loaded.now)
    moments = {"when ready": ready.now}
    if _lanes_with_graphs(profile, boot):
        moments |= {"before the profiling capture": loaded.profiled, "after the capture": loaded.captured}
    for moment, buffers in moments.items():
        if buffers is None:
            yield _open(f"q_out stands {moment}", where)
            continue
        held = _held(buffers)
        missing = sorted(end.keys() - held.keys())
        yield check(
            f"every buffer is there {moment}",
            not missing,
            ReasonCode.PLUGIN_NOT_RESERVED,
            where=where,
            observed=missing,
        )
        moved = sorted(key for key in end.keys() & held.keys() if end[key] != held[key])
        yield check(
            f"no buffer has moved since {moment}",
            not moved,
            ReasonCode.PLUGIN_ADDRESS_MOVED,
            where=where,
            observed=moved,
        )
    for row in _rows(loaded):
        given = sorted({address for addresses in row["addresses"].values() for address in addresses})
        yield equal(
            "every call was given the buffer's address",
            given,
            [row["address"]],
            ReasonCode.PLUGIN_ADDRESS_MOVED,
            where=f"{where}, lane {row['lane']}",
        )


def _nothing_reserved(where: str) -> Check:
    return check("q_out is reserved", False, ReasonCode.PLUGIN_NOT_RESERVED, where=where, observed=0)


def _off(report: PluginReport, where: str) -> Iterator[Check]:
    """Stock vLLM on every layer, and nothing reserved."""
    code = ReasonCode.PLUGIN_NOT_OFF
    if report.report is None or report.methods is None or report.now is None:
        yield _open("the plugin is off", where)
        return
    yield check("the plugin is off", report.report.get("active") is False, code, where=where)
    runs = sorted(method.runs for method in report.methods)
    yield equal("every attention layer runs stock vLLM", runs, [STOCK], code, where=where)
    context = (report.context or {}).get("runs", STOCK_CONTEXT)
    yield equal("the draft's context insertion is stock", context, STOCK_CONTEXT, code, where=where)
    yield equal("nothing is reserved", report.now.reserved_bytes, 0, code, where=where)


# Two boots that differ in the plugin alone


def _compare(evidence: Evidence, on: BootPlugin, off: BootPlugin) -> tuple[list[Check], dict[str, Any]]:
    where = f"{on.boot.name} against {off.boot.name}"
    shared = set(on.boot.probes) & set(off.boot.probes)
    checks: list[Check] = []
    told: dict[str, Any] = {"with": on.boot.name, "without": off.boot.name, "answers": None, "blocks": None}
    if Probe.SERVE in shared:
        ours, theirs = (_answers(evidence, one) for one in (on, off))
        told["answers"] = len(ours)
        checks.append(_same_answers(ours, theirs, where))
    if Probe.KV_CONTROL in shared:
        here, there = (_cases(evidence, one) for one in (on, off))
        found = {n: compare_boots(case, there[n]) for n, case in here.items() if n in there}
        different = [f"{n} tokens: {place}" for n, two in found.items() for place in two.differing]
        whole = here.keys() == there.keys() and bool(found) and all(two.settled for two in found.values())
        told["blocks"] = {str(n): told_boots(two) for n, two in found.items()}
        checks.append(
            check(
                "KV bytes are the same with and without the plugin",
                whole and not different,
                ReasonCode.PLUGIN_CHANGES_KV,
                where=where,
                observed=different[:4],
                expected=[],
            )
        )
    return checks, told


def _answers(evidence: Evidence, one: BootPlugin) -> dict[str, tuple[int, ...] | None]:
    path = f"{one.folder}/{SERVE}"
    served = evidence.record(path, Served)
    require_boot(path, [served.boot], one.boot)
    return {request.name: request.answer.token_ids for request in served.requests if request.greedy}


def _same_answers(ours: dict[str, Any], theirs: dict[str, Any], where: str) -> Check:
    rule = "greedy answers are the same with and without the plugin"
    if not ours or None in (*ours.values(), *theirs.values()):
        return _open(rule, where)
    different = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    return check(rule, not different, ReasonCode.PLUGIN_CHANGES_OUTPUT, where=where, observed=different, expected=[])


def _cases(evidence: Evidence, one: BootPlugin) -> dict[int, Case]:
    path = f"{one.folder}/{arm_file(Arm.CONTROL)}"
    cases = evidence.record(path, tuple[Case, ...])
    require_boot(path, (case.boot for case in cases), one.boot)
    return {case.prompt_tokens: case for case in cases}


# Telling


def _observed(one: BootPlugin) -> list[dict[str, Any]]:
    return [
        {
            "rank": report.rank,
            "active": None if report.report is None else report.report.get("active"),
            "reason": None if report.report is None else report.report.get("reason"),
            "layers": sum(len(method.layers) for method in report.methods or ()),
            "methodSha256": sorted({method.stock_sha256 for method in report.methods or ()}),
            "runsSha256": sorted({method.runs_sha256 for method in report.methods or ()}),
            "reservedBytes": None if report.now is None else report.now.reserved_bytes,
            "addresses": None
            if report.now is None
            else {f"lane {b.lane} ubatch {b.ubatch}": f"0x{b.address:x}" for b in report.now.buffers},
            "counters": (report.report or {}).get("counters"),
        }
        for report in one.loaded
    ]


def _summary(checks: list[Check], found: list[BootPlugin]) -> str:
    bad = next((item for item in checks if item.status is not Status.PASSED), None)
    if bad is not None:
        return f"{bad.where}: not true that {bad.name}"
    on = [one for one in found if one.boot.plugin]
    off = ", ".join(one.boot.name for one in found if not one.boot.plugin)
    stock = f"off, as promised, in {off}" if off else "on in every boot"
    if not on:
        return f"the plugin is {stock}"
    most = max((report.now.reserved_bytes for one in on for report in one.loaded if report.now), default=0)
    return f"active on {len(on[0].loaded)} ranks in {len(on)} boots, {most:,} bytes reserved and never moved; {stock}"
