# SPDX-License-Identifier: Apache-2.0
"""graphs.capture: every rank holds exactly the predicted CUDA graphs, and the load replayed them.

The sets are read inside each worker. Every step of the load is held against the rule by which the engine chooses a
graph, and every choice against the replays, so that a step that ran in a lesser mode cannot hide.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from qualify.claims.boots import visited, worker_reports
from qualify.claims.graph_counts import Graphs, Used, under_load
from qualify.claims.model import Check, Judgement, Status, check, equal
from qualify.evidence import Evidence, MissingEvidence
from qualify.expect import capture_sizes, graph_sets, query_lengths
from qualify.observe import log
from qualify.observe.bars import capture_label
from qualify.observe.facts import CapturePass, LogFacts
from qualify.observe.graphs import GraphMode, GraphSets, Manager, Runner, Unknown
from qualify.probes.graph_records import GraphManager, GraphReport, graphs_file
from qualify.probes.load_records import Cell, cell_file
from qualify.probes.moments import LOADED, READY
from qualify.probes.workers import WorkerReport
from qualify.profiles import Boot, Probe, Profile
from qualify.reasons import ReasonCode

WATCHED = {Runner.V1: ("dispatcher", "breakable", "wrappers"), Runner.V2: ("managers", "breakable", "wrappers")}

Counts = dict[tuple[str, str], int]
"""Number of graphs by (manager, mode)."""


@dataclass(frozen=True)
class Rank:
    """One rank of one boot. `used` is None where a count could not be read or fell."""

    rank: int
    report: GraphReport
    managers: dict[str, GraphManager]
    used: dict[str, Used | None]


@dataclass(frozen=True)
class BootGraphs:
    boot: Boot
    folder: str
    promised: GraphSets | Unknown
    ranks: tuple[Rank, ...]
    counted_in_log: dict[CapturePass | None, Counts]
    engine_steps: float | None
    """Steps that the engine's metrics counted in the windows of the load; None without such a load."""


def judge(evidence: Evidence, profile: Profile) -> Judgement:
    boots = visited(evidence, profile)
    workers = worker_reports(evidence, [folder for _, folder in boots])
    found = [_read(evidence, profile, boot, folder, workers[folder]) for boot, folder in boots]
    checks = [item for one in found for item in _checks(one, profile)]
    return Judgement(
        checks=tuple(checks),
        summary=_summary(checks, found),
        observed={"boots": {one.boot.name: _observed(one) for one in found}},
        expected={
            "boots": {
                one.boot.name: {"unknown": one.promised.reason}
                if isinstance(one.promised, Unknown)
                else {name: _sizes(sets) for name, sets in one.promised.managers().items()}
                for one in found
            }
        },
    )


# Reading


def _read(
    evidence: Evidence, profile: Profile, boot: Boot, folder: str, workers: tuple[WorkerReport, ...]
) -> BootGraphs:
    ready, loaded = (_reports(evidence, folder, label, workers) for label in (READY, LOADED))
    packed = f"{folder}/engine.log.gz"
    facts = log.read([evidence.bytes(packed if evidence.exists(packed) else f"{folder}/engine.log")], "engine.log")
    return BootGraphs(
        boot=boot,
        folder=folder,
        promised=graph_sets(profile, boot),
        ranks=tuple(_rank(first, last) for first, last in zip(ready, loaded, strict=False)),
        counted_in_log=_log_counts(facts),
        engine_steps=_engine_steps(evidence, profile, folder) if Probe.THROUGHPUT in boot.probes else None,
    )


def _reports(evidence: Evidence, folder: str, label: str, workers: tuple[WorkerReport, ...]) -> tuple[GraphReport, ...]:
    path = f"{folder}/{graphs_file(label)}"
    reports = evidence.record(path, tuple[GraphReport, ...])
    known = {worker.process for worker in workers}
    if any(report.process not in known for report in reports if report.process is not None):
        raise MissingEvidence(f"{path} of its own workers")
    return reports


def _rank(ready: GraphReport, loaded: GraphReport) -> Rank:
    return Rank(ready.rank, loaded, {one.name: one for one in loaded.managers or ()}, under_load(ready, loaded))


def _log_counts(facts: LogFacts) -> dict[CapturePass | None, Counts]:
    found: dict[CapturePass | None, Counts] = {}
    for fact in facts.captures:
        found.setdefault(fact.capture_pass, {})[str(fact.value.role), fact.value.kind or ""] = fact.value.captured
    return found


def _engine_steps(evidence: Evidence, profile: Profile, folder: str) -> float | None:
    total = 0.0
    for concurrency in profile.throughput.concurrency:
        path = f"{folder}/{cell_file(concurrency)}"
        cell = evidence.record(path if evidence.exists(path) else f"{path}.gz", Cell)
        steps = [sample.steps for sample in cell.samples]
        if not steps or steps[0] is None or steps[-1] is None:
            return None
        total += steps[-1] - steps[0]
    return total


# Judging


def _checks(one: BootGraphs, profile: Profile) -> Iterator[Check]:
    ranks = list(range(profile.engine.tensor_parallel))
    yield equal(
        "every rank reported its graphs",
        [rank.rank for rank in one.ranks],
        ranks,
        ReasonCode.RANK_MISSING,
        where=one.folder,
    )
    if isinstance(one.promised, Unknown):
        yield Check(
            name="the capture rule covers this configuration",
            status=Status.INCONCLUSIVE,
            reason_code=ReasonCode.NOT_SUPPORTED,
            where=one.folder,
            observed=one.promised.reason,
        )
        return
    promised = one.promised.managers()
    for rank in one.ranks:
        where = f"{one.folder}, rank {rank.rank}"
        yield from _configured(rank, one.boot, profile, promised, where)
        for name, sets in promised.items():
            yield from _captured(rank.managers.get(name), sets, f"{where}, {name}")
        yield from _strangers(rank, promised, where)
        yield from _counted(rank, one, profile, where)
        for name, sets in promised.items():
            yield from _replayed(rank.used.get(name), name, sets, one.boot, profile, f"{where}, {name}")
    yield from _alike(one)
    yield from _logged(one, promised)


def _configured(rank: Rank, boot: Boot, profile: Profile, promised: dict[str, Manager], where: str) -> Iterator[Check]:
    """What the engine holds after its start; an attention backend may have lowered the mode."""
    graphs, code = profile.engine.graphs, ReasonCode.GRAPH_CONFIG_MISMATCH
    if graphs is None:
        return
    sizes = capture_sizes(profile, boot) if graphs.runner is Runner.V2 else promised["target"].piecewise
    if graphs.mode is GraphMode.NONE:
        sizes = ()
    target = rank.managers.get("target")
    yield _known("model runner", rank.report.runner, str(graphs.runner), code, where)
    yield _known("graph mode", target.mode if target else None, str(graphs.mode), code, where)
    yield _known("graph sizes", rank.report.sizes, sizes, code, where)
    yield _known("largest graph", rank.report.max_size, max(sizes, default=0), code, where)
    tokens = profile.engine.max_num_batched_tokens
    yield _known("tokens in a step", rank.report.max_num_batched_tokens, tokens, code, where)
    yield _known("requests in a step", rank.report.max_num_seqs, profile.engine.max_num_seqs, code, where)
    lengths = query_lengths(profile, boot)
    for name in promised:
        manager = rank.managers.get(name)
        yield _known(
            "tokens of a decode", manager.query_len if manager else None, lengths[name], code, f"{where}, {name}"
        )


def _known(rule: str, observed: Any, expected: Any, code: ReasonCode, where: str) -> Check:
    """An equality that stays open where the worker could not read its side."""
    if observed is None:
        return check(
            rule,
            False,
            ReasonCode.ENVIRONMENT_INCOMPLETE,
            where=where,
            expected=expected,
            otherwise=Status.INCONCLUSIVE,
        )
    return equal(rule, observed, expected, code, where=where)


def _captured(manager: GraphManager | None, sets: Manager, where: str) -> Iterator[Check]:
    held = (manager.piecewise, manager.full) if manager else (None, None)
    for mode, found, wanted in zip(("PIECEWISE", "FULL"), held, (sets.piecewise, sets.full), strict=True):
        if found is None:
            yield _known(f"{mode} graphs", None, wanted, ReasonCode.GRAPH_SHAPE_MISSING, where)
            continue
        missing, extra = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
        yield check(
            f"no predicted {mode} graph is missing",
            not missing,
            ReasonCode.GRAPH_SHAPE_MISSING,
            where=where,
            observed=missing,
            expected=[],
        )
        yield check(
            f"no other {mode} graph is there",
            not extra,
            ReasonCode.GRAPH_SHAPE_EXTRA,
            where=where,
            observed=extra,
            expected=[],
        )


def _strangers(rank: Rank, promised: dict[str, Manager], where: str) -> Iterator[Check]:
    """A manager that the rule does not know must hold nothing; one that cannot be read was reported above."""
    others = {name: one for name, one in rank.managers.items() if name not in promised}
    holding = sorted(name for name, one in others.items() if one.piecewise or one.full)
    yield check(
        "no unknown manager holds graphs", not holding, ReasonCode.GRAPH_SHAPE_EXTRA, where=where, observed=holding
    )


def _counted(rank: Rank, one: BootGraphs, profile: Profile, where: str) -> Iterator[Check]:
    """The counters saw everything: else a missing replay or downgrade proves nothing."""
    wanted = WATCHED[profile.engine.graphs.runner] if profile.engine.graphs else ()
    unseen = sorted(set(wanted) - set(rank.report.watched or ()))
    problems = [*(rank.report.problems or ()), *(f"{name} is not watched" for name in unseen)]
    yield check(
        "every counter is whole",
        not problems and rank.report.problems is not None,
        ReasonCode.ENVIRONMENT_INCOMPLETE,
        where=where,
        observed=problems,
        expected=[],
        otherwise=Status.INCONCLUSIVE,
    )
    target = rank.used.get("target")
    if target is None:
        return  # told by the checks of its replays
    steps = sum(target.steps.values())
    least = one.engine_steps if one.engine_steps is not None else 1
    yield check(
        "the worker counted at least the engine's steps",
        steps >= least,
        ReasonCode.GRAPH_STEPS_UNCOUNTED,
        where=where,
        observed=steps,
        expected=f">= {least:g}",
    )


def _replayed(used: Used | None, name: str, sets: Manager, boot: Boot, profile: Profile, where: str) -> Iterator[Check]:
    if used is None:
        yield check(
            "steps and replays were counted",
            False,
            ReasonCode.ENVIRONMENT_INCOMPLETE,
            where=where,
            otherwise=Status.INCONCLUSIVE,
        )
        return
    query_len = query_lengths(profile, boot)[name]
    if _follows_rule(profile):
        wrong = [
            {"tokens": tokens, "uniform": uniform, "ran": [mode, size], "count": count}
            for (_, tokens, uniform, mode, size), count in sorted(used.steps.items(), key=str)
            if (mode, size) != sets.chosen(tokens, uniform=uniform == query_len)
        ]
        yield check(
            "every step ran in the graph that the rule names",
            not wrong,
            ReasonCode.GRAPH_DOWNGRADED,
            where=where,
            observed=wrong[:8],
            expected=[],
        )
    chosen = used.chosen
    unequal = {
        _title(key): [chosen[key], used.replays[key]]
        for key in chosen | used.replays
        if chosen[key] != used.replays[key]
    }
    yield check(
        "every graph was replayed as often as it was chosen",
        not unequal,
        ReasonCode.GRAPH_NOT_REPLAYED,
        where=where,
        observed=unequal,
        expected={},
    )
    idle = [_title(key) for key in _reached(name, sets, boot, profile) if not used.replays[key]]
    yield check(
        "the graphs of the load were replayed",
        not idle,
        ReasonCode.GRAPH_NOT_REPLAYED,
        where=where,
        observed=idle,
        expected=[],
    )


def _follows_rule(profile: Profile) -> bool:
    """The rule of choice is known for the V2 runner with FULL graphs for decodes only."""
    graphs = profile.engine.graphs
    return graphs is not None and graphs.runner is Runner.V2 and graphs.mode is not GraphMode.FULL


def _reached(name: str, sets: Manager, boot: Boot, profile: Profile) -> list[tuple[str, int]]:
    """The graphs that a steady load of the profile's concurrencies needs."""
    if Probe.THROUGHPUT not in boot.probes or name == "drafterPrefill":
        return []
    query_len = query_lengths(profile, boot)[name]
    found = {sets.chosen(count * query_len, uniform=True) for count in profile.throughput.concurrency}
    return sorted((mode, size) for mode, size in found if mode != GraphMode.NONE)


def _alike(one: BootGraphs) -> Iterator[Check]:
    """One step is one step on all ranks: they hold, choose and replay the same. What is unknown is told elsewhere."""
    names = sorted({name for rank in one.ranks for name in rank.managers})
    for name in names:
        where = f"{one.folder}, {name}"
        managers = [rank.managers.get(name) for rank in one.ranks]
        loads = [rank.used.get(name) for rank in one.ranks]
        held = [(m.piecewise, m.full) for m in managers if m and m.piecewise is not None and m.full is not None]
        ran = [(load.steps, load.replays) for load in loads if load]
        for rule, same in (
            ("ranks hold the same graphs", None not in managers and all(value == held[0] for value in held)),
            ("ranks ran and replayed the same", all(value == ran[0] for value in ran)),
        ):
            yield check(rule, same, ReasonCode.GRAPH_RANKS_DIFFER, where=where)


def _logged(one: BootGraphs, promised: dict[str, Manager]) -> Iterator[Check]:
    """The log speaks for rank 0. Its bars count; the workers name."""
    first = next((rank for rank in one.ranks if rank.rank == 0), None)
    if first is None:
        return
    rule = "the log counts the graphs that rank 0 holds"
    held: Counts = {}
    for name in promised:
        manager = first.managers.get(name)
        if manager is None or manager.piecewise is None or manager.full is None:
            yield _known(rule, None, None, ReasonCode.GRAPH_LOG_DISAGREES, one.folder)
            return
        sizes = (("PIECEWISE", manager.piecewise), ("FULL", manager.full))
        held |= {(name, mode): len(found) for mode, found in sizes if found}
    yield _same_counts(rule, one, CapturePass.FINAL, held)
    rounds = _profiled(first.report)
    if rounds:
        yield _same_counts("the log counts those of the memory profile", one, CapturePass.PROFILING, rounds)


def _profiled(report: GraphReport) -> Counts:
    """Graphs that the memory profile captured and threw away."""
    found: Counts = {}
    for one in report.passes or ():
        for mode, sizes in (("PIECEWISE", one.piecewise), ("FULL", one.full)):
            label = capture_label(f"{one.label} ({mode})")
            if one.profiling and sizes and label is not None:
                found[str(label.role), mode] = len(sizes)
    return found


def _same_counts(rule: str, one: BootGraphs, which: CapturePass, held: Counts) -> Check:
    logged = one.counted_in_log.get(which)
    return check(
        rule,
        logged is not None and logged == held,
        ReasonCode.GRAPH_LOG_DISAGREES,
        where=one.folder,
        observed=None
        if logged is None
        else {f"{name} {mode}": count for (name, mode), count in sorted(logged.items())},
        expected={f"{name} {mode}": count for (name, mode), count in sorted(held.items())},
        otherwise=Status.INCONCLUSIVE if logged is None else Status.FAILED,
    )


# Telling


def _title(key: tuple[str, int]) -> str:
    return f"{key[0]} {key[1]}"


def _sizes(sets: Manager) -> dict[str, list[int]]:
    return {"piecewise": list(sets.piecewise), "full": list(sets.full)}


def _observed(one: BootGraphs) -> dict[str, Any]:
    return {
        f"rank{rank.rank}": {
            name: {
                "piecewise": manager.piecewise,
                "full": manager.full,
                "replays": None if (used := rank.used.get(name)) is None else _ordered(used.replays),
                "eagerSteps": None if used is None else used.eager,
            }
            for name, manager in rank.managers.items()
        }
        | {"memoryProfile": {f"{name} {mode}": count for (name, mode), count in _profiled(rank.report).items()}}
        for rank in one.ranks
    }


def _ordered(counts: Graphs) -> dict[str, int]:
    return {_title(key): counts[key] for key in sorted(counts)}


def _summary(checks: list[Check], found: list[BootGraphs]) -> str:
    bad = next((item for item in checks if item.status is not Status.PASSED), None)
    if bad is not None:
        return f"{bad.where}: not true that {bad.name}"
    most = max(found, key=lambda one: len(one.ranks[0].managers))
    sets = ", ".join(
        f"{name} {len(sizes)} {mode}"
        for name, manager in most.ranks[0].managers.items()
        for mode, sizes in (("PIECEWISE", manager.piecewise), ("FULL", manager.full))
        if sizes
    )
    replays = sum(sum(load.replays.values()) for one in found for load in one.ranks[0].used.values() if load)
    ranks = f"{len(most.ranks)} ranks"
    return f"{sets or 'no graphs'} on {ranks}, as predicted; {replays:,} replays a rank, none missing, none downgraded"
