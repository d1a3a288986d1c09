# SPDX-License-Identifier: Apache-2.0
"""Faults that only a GPU can have, in made-up evidence of two GPUs that is sound (`faults.cuda`): graphs that are
missing or not replayed, a plugin that does not do its work, memory that grows past what was admitted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from qualify.claims import plugin as plugin_claim
from qualify.claims.derive import derive
from qualify.claims.model import ClaimId
from qualify.evidence import MappingSource
from qualify.reasons import ReasonCode

from faults import cuda
from faults.lab import Lab, Tamper, Tree
from faults.model import Fault, Group, Verdict, Verdicts, error, failed, inconclusive, verdicts

CODE = ReasonCode
GRAPHS, PLUGIN, MEMORY = ClaimId.GRAPHS_CAPTURE, ClaimId.PLUGIN_ACTIVE, ClaimId.MEMORY_ADMISSION
CONTROL, SPECULATIVE, STOCK = (cuda.FOLDERS[name] for name in ("control", "speculative", "stock"))
WITH_PLUGIN = (CONTROL, SPECULATIVE)

Change = Callable[[Any], object]


def judge(name: str, change: Tamper) -> Callable[[Lab], Verdicts]:
    def act(lab: Lab) -> Verdicts:
        tree = Tree(cuda.files(), lab.dice(name))
        change(tree)
        return verdicts(derive(MappingSource(tree.files), cuda.profile()))

    return act


def ranks(path: str, change: Change, *only: int) -> Tamper:
    """Change what every rank, or only these, say in one file."""

    def act(tree: Tree) -> None:
        def each(reports: list[Any]) -> None:
            for report in reports:
                if not only or report["rank"] in only:
                    change(report)

        tree.edit(path, each)

    return act


def one_rank(path: str, change: Change) -> Tamper:
    """Change what a rank drawn by lot says."""
    return lambda tree: ranks(path, change, tree.random.choice(cuda.RANKS))(tree)


def all_of(*changes: Tamper) -> Tamper:
    def act(tree: Tree) -> None:
        for change in changes:
            change(tree)

    return act


def put(**values: Any) -> Change:
    return lambda report: report.update(values)


def a_boot(folders: tuple[str, ...], change: Callable[[str], Tamper]) -> Tamper:
    return lambda tree: change(tree.random.choice(folders))(tree)


# graphs

LOADED = f"{SPECULATIVE}/graphs-loaded.json"


def manager(change: Change, name: str = "target") -> Change:
    return lambda report: change(next(one for one in report["managers"] if one["name"] == name))


def drop(mode: str, size: int) -> Change:
    return lambda one: one[mode].remove(size)


def add(mode: str, size: int) -> Change:
    return lambda one: one[mode].append(size)


def reroute(row: tuple[Any, ...], mode: str, size: int, count: int) -> Change:
    """Some steps of this kind ran in another graph, and were replayed there."""

    def change(one: Any) -> None:
        step = next(found for found in one["dispatches"] if tuple(found[:5]) == row)
        step[5] -= count
        one["dispatches"].append([*row[:3], mode, size, count])
        for replay in one["replays"]:
            if tuple(replay[:2]) == row[3:5]:
                replay[2] -= count
        if mode != "NONE":
            one["replays"].append([mode, size, count])

    return change


def replays(mode: str, size: int, less: int) -> Change:
    def change(one: Any) -> None:
        next(row for row in one["replays"] if row[:2] == [mode, size])[2] -= less

    return change


def idle(one: Any) -> None:
    """Nothing was counted since the boot was ready."""
    for row in (*one["dispatches"], *one["replays"]):
        row[-1] = cuda.STARTED


def never_full(one: Any) -> None:
    """The load never brought eight requests together."""
    one["dispatches"] = [row for row in one["dispatches"] if row[4] != 48]
    one["replays"] = [row for row in one["replays"] if row[1] != 48]


def in_log(old: str, new: str) -> Tamper:
    return lambda tree: tree.replace(f"{SPECULATIVE}/engine.log.gz", old, new)


def no_bars(tree: Tree) -> None:
    path = f"{SPECULATIVE}/engine.log.gz"
    text = re.sub(r"\rCapturing[^\n\r]*\n?", "", tree.bytes(path).decode())
    tree.write(path, text.encode())


def another_process(report: Any) -> None:
    report["process"]["started"] += 1


DECODE_8 = (8, 48, 6, "FULL", 48)
MIXED = (3, 20, None, "PIECEWISE", 24)

GRAPH_FAULTS: tuple[tuple[str, Tamper, Verdict], ...] = (
    (
        "a rank lacks a graph",
        ranks(LOADED, manager(drop("full", 36)), 1),
        failed(CODE.GRAPH_SHAPE_MISSING, CODE.GRAPH_RANKS_DIFFER),
    ),
    (
        "no rank has a drafter's graph, and the log agrees",
        all_of(ranks(LOADED, manager(drop("full", 35), "drafter")), in_log("6/6", "5/5"), in_log("0/6", "0/5")),
        failed(CODE.GRAPH_SHAPE_MISSING, CODE.GRAPH_LOG_DISAGREES),
    ),
    (
        "a rank holds another graph",
        ranks(LOADED, manager(add("piecewise", 64)), 1),
        failed(CODE.GRAPH_SHAPE_EXTRA, CODE.GRAPH_RANKS_DIFFER),
    ),
    (
        "the drafter's graphs are of the target's decode length",
        ranks(LOADED, manager(put(queryLen=6), "drafter")),
        failed(CODE.GRAPH_CONFIG_MISMATCH),
    ),
    ("the engine lowered the mode", ranks(LOADED, manager(put(mode="PIECEWISE"))), failed(CODE.GRAPH_CONFIG_MISMATCH)),
    ("the engine chose other sizes", ranks(LOADED, put(sizes=[1, 2, 4, 8])), failed(CODE.GRAPH_CONFIG_MISMATCH)),
    ("the engine runs the other runner", ranks(LOADED, put(runner="V1")), failed(CODE.GRAPH_CONFIG_MISMATCH)),
    (
        "uniform decodes ran piecewise",
        ranks(LOADED, manager(reroute(DECODE_8, "PIECEWISE", 48, 9))),
        failed(CODE.GRAPH_DOWNGRADED),
    ),
    ("mixed steps ran eager", ranks(LOADED, manager(reroute(MIXED, "NONE", 20, 2))), failed(CODE.GRAPH_DOWNGRADED)),
    (
        "a graph that was chosen was never replayed",
        ranks(LOADED, manager(replays("FULL", 48, 400))),
        failed(CODE.GRAPH_NOT_REPLAYED),
    ),
    (
        "a rank replayed the drafter less often",
        one_rank(LOADED, manager(replays("FULL", 40, 1), "drafter")),
        failed(CODE.GRAPH_NOT_REPLAYED, CODE.GRAPH_RANKS_DIFFER),
    ),
    (
        "the load never reached the graph of its concurrency",
        all_of(
            ranks(LOADED, manager(never_full)),
            ranks(f"{SPECULATIVE}/graphs-ready.json", manager(never_full)),
        ),
        failed(CODE.GRAPH_NOT_REPLAYED, CODE.GRAPH_STEPS_UNCOUNTED),
    ),
    (
        "the workers counted fewer steps than the engine",
        ranks(LOADED, manager(idle)),
        failed(CODE.GRAPH_NOT_REPLAYED, CODE.GRAPH_STEPS_UNCOUNTED),
    ),
    (
        "the log counts fewer graphs",
        all_of(in_log("9/9", "8/8"), in_log("0/9", "0/8")),
        failed(CODE.GRAPH_LOG_DISAGREES),
    ),
    ("the log stops within a capture", in_log("7/7", "5/7"), failed(CODE.GRAPH_LOG_DISAGREES)),
    ("the log has no bar", no_bars, inconclusive(CODE.GRAPH_LOG_DISAGREES)),
    (
        "notes could not be taken",
        one_rank(LOADED, put(problems=["dispatch: KeyError: 'x'"])),
        inconclusive(CODE.ENVIRONMENT_INCOMPLETE),
    ),
    (
        "the managers were not watched",
        one_rank(LOADED, put(watched=["dispatcher", "breakable", "wrappers"])),
        inconclusive(CODE.ENVIRONMENT_INCOMPLETE),
    ),
    (
        "a rank cannot read its graphs",
        one_rank(LOADED, manager(put(piecewise=None))),
        inconclusive(CODE.ENVIRONMENT_INCOMPLETE),
    ),
    (
        "a count fell within the boot",
        one_rank(f"{SPECULATIVE}/graphs-ready.json", manager(put(replays=[["FULL", 6, 10**6]]))),
        inconclusive(CODE.ENVIRONMENT_INCOMPLETE),
    ),
    ("graphs of another boot", one_rank(LOADED, another_process), error(CODE.EVIDENCE_MISSING)),
    (
        "a rank left no account of its graphs",
        lambda tree: tree.edit(LOADED, lambda reports: reports.pop()),
        failed(CODE.RANK_MISSING),
    ),
)


# plugin


def plugin_file(folder: str, label: str = "loaded") -> str:
    return f"{folder}/plugin-{label}.json"


def own(change: Change) -> Change:
    return lambda report: change(report["report"])


def buffer(change: Change, lane: int = 0) -> Change:
    return own(lambda word: change(next(row for row in word["buffers"] if row["lane"] == lane)))


def stock_rank(report: Any) -> None:
    """The state of a rank that serves stock vLLM."""
    report.update({**cuda.plugin_report("stock", report["rank"]), "process": report["process"]})


def stock_layer(report: Any) -> None:
    found = report["methods"][0]
    stock = {
        **found,
        "runs": plugin_claim.STOCK,
        "runsSha256": plugin_claim.METHOD_SHA256,
        "layers": [found["layers"].pop()],
    }
    report["methods"].append(stock)


def moved(report: Any) -> None:
    report["now"]["buffers"][0]["address"] += 4096


def lost_draft_lane(report: Any) -> None:
    report["report"]["buffers"].pop()
    report["report"]["reservedBytes"] -= 40 * cuda.ROW
    for moment in ("profiled", "captured", "now"):
        report[moment]["buffers"] = report[moment]["buffers"][:1]
        report[moment]["reservedBytes"] = 4096 * cuda.ROW


def late(report: Any) -> None:
    """Nothing was reserved when the memory profile captured."""
    report["profiled"] = {"reservedBytes": 0, "buffers": []}


def short(row: Any) -> None:
    row.update(rows=2048, bytes=2048 * cuda.ROW)


def answers(change: Change) -> Tamper:
    return lambda tree: tree.edit(f"{STOCK}/serve.json", lambda served: change(served["requests"][0]["answer"]))


def other_bytes(*places: int) -> Tamper:
    """Other bytes on one rank of the stock boot, at one of these of `cuda.case`."""

    def act(tree: Tree) -> None:
        def change(cases: Any) -> None:
            cold = tree.random.choice(cases[0]["ranks"])["requests"][0]["cold"]
            cold[tree.random.choice(places)][3] = "f" * 64

        tree.edit(f"{STOCK}/kv-control.json.gz", change)

    return act


def in_boot(change: Change, *, every: bool = False) -> Tamper:
    """In a boot with the plugin, on one rank or on all."""
    return a_boot(WITH_PLUGIN, lambda folder: (ranks if every else one_rank)(plugin_file(folder), change))


PLUGIN_FAULTS: tuple[tuple[str, Tamper, Verdict], ...] = (
    ("the plugin is inactive on a rank", in_boot(stock_rank), failed(CODE.PLUGIN_INACTIVE, CODE.RANKS_DISAGREE)),
    ("an attention layer kept the stock method", in_boot(stock_layer, every=True), failed(CODE.PLUGIN_INACTIVE)),
    (
        "q_out was not used under capture",
        in_boot(buffer(lambda row: row["addresses"].update(capture=[]))),
        failed(CODE.PLUGIN_INACTIVE),
    ),
    (
        "the draft's context insertion is stock",
        ranks(plugin_file(SPECULATIVE), lambda report: report["context"].update(runs=plugin_claim.STOCK_CONTEXT)),
        failed(CODE.PLUGIN_INACTIVE),
    ),
    (
        "the replaced method is another one",
        in_boot(lambda report: report["methods"][0].update(stockSha256="0" * 64)),
        failed(CODE.PLUGIN_METHOD_MISMATCH),
    ),
    (
        "the replaced context insertion is another one",
        one_rank(plugin_file(SPECULATIVE), lambda report: report["context"].update(stock_sha256="0" * 64)),
        failed(CODE.PLUGIN_METHOD_MISMATCH),
    ),
    (
        "a rank runs other code of the plugin",
        in_boot(lambda report: report["methods"][0].update(runsSha256="0" * 64)),
        failed(CODE.RANKS_DISAGREE),
    ),
    ("q_out moved under load", in_boot(moved), failed(CODE.PLUGIN_ADDRESS_MOVED)),
    (
        "a live call was given another address",
        in_boot(buffer(lambda row: row["addresses"]["live"].append(4096))),
        failed(CODE.PLUGIN_ADDRESS_MOVED),
    ),
    ("q_out was not there while memory was profiled", in_boot(late), failed(CODE.PLUGIN_NOT_RESERVED)),
    (
        "the draft lane has no buffer",
        one_rank(plugin_file(SPECULATIVE), lost_draft_lane),
        failed(CODE.PLUGIN_NOT_RESERVED),
    ),
    ("q_out is smaller than the largest batch", in_boot(buffer(short)), failed(CODE.PLUGIN_NOT_RESERVED)),
    (
        "calls fell back to stock vLLM",
        in_boot(own(lambda w: w["counters"].update(stock=3))),
        failed(CODE.PLUGIN_FELL_BACK),
    ),
    (
        "the plugin is active in the stock boot",
        one_rank(
            plugin_file(STOCK),
            lambda report: report.update(
                {**cuda.plugin_report("control", report["rank"]), "process": report["process"]}
            ),
        ),
        failed(CODE.PLUGIN_NOT_OFF, CODE.RANKS_DISAGREE),
    ),
    ("the plugin changes an answer", answers(put(tokenIds=[5, 6, 7, 9])), failed(CODE.PLUGIN_CHANGES_OUTPUT)),
    ("the stock boot's answers are unknown", answers(put(tokenIds=None)), inconclusive(CODE.ENVIRONMENT_INCOMPLETE)),
    ("the plugin changes KV bytes", other_bytes(0, 1, 2), failed(CODE.PLUGIN_CHANGES_KV)),
    ("a rank cannot say what it runs", in_boot(put(methods=None)), inconclusive(CODE.ENVIRONMENT_INCOMPLETE)),
    ("the plugin's state of another boot", in_boot(another_process), error(CODE.EVIDENCE_MISSING)),
)


# memory


def memory_file(folder: str, label: str = "loaded") -> str:
    return f"{folder}/memory-{label}.json"


def grown(report: Any) -> None:
    report["allocator"]["allocated_bytes.all.peak"] += 2 * cuda.GIB


def loaded_memory(change: Change) -> Tamper:
    return a_boot(WITH_PLUGIN, lambda folder: one_rank(memory_file(folder), change))


def consumed_less(report: Any) -> None:
    """As if the reservation had been made after the profile: the figures still add up."""
    report["admission"]["consumed"] -= 4096 * cuda.ROW
    report["admission"]["activation"] += 4096 * cuda.ROW


def no_full_prefill(tree: Tree) -> None:
    for folder in WITH_PLUGIN:
        for label in ("ready", "loaded"):
            ranks(
                f"{folder}/graphs-{label}.json",
                manager(lambda one: one.update(dispatches=[row for row in one["dispatches"] if row[1] < 4096])),
            )(tree)


MEMORY_FAULTS: tuple[tuple[str, Tamper, Verdict], ...] = (
    ("memory grew past the admitted figure under load", loaded_memory(grown), failed(CODE.MEMORY_GREW)),
    (
        "the device holds more than was admitted",
        loaded_memory(lambda report: report["driver"].update(used=75 * cuda.GIB)),
        failed(CODE.MEMORY_GREW),
    ),
    (
        "the allocator retried under load",
        loaded_memory(lambda report: report["allocator"].update(num_alloc_retries=1)),
        failed(CODE.ALLOCATION_RETRY),
    ),
    (
        "an allocation failed under load",
        loaded_memory(lambda report: report["allocator"].update(num_ooms=1)),
        failed(CODE.ALLOCATION_RETRY),
    ),
    ("a rank's allocator cannot be read", loaded_memory(put(allocator=None)), inconclusive(CODE.METRIC_MISSING)),
    ("the engine's own figures cannot be read", loaded_memory(put(admission=None)), inconclusive(CODE.METRIC_MISSING)),
    (
        "the available bytes do not follow from the figures",
        loaded_memory(lambda report: report["admission"].update(activation=cuda.ACTIVATION + 1)),
        failed(CODE.ADMISSION_UNEXPLAINED),
    ),
    (
        "the KV cache is not the available memory in whole blocks",
        a_boot(
            WITH_PLUGIN,
            lambda folder: ranks(
                f"{folder}/workers.json",
                lambda report: report["kvCache"].update(bytes=report["kvCache"]["bytes"] - 4096),
            ),
        ),
        failed(CODE.ADMISSION_UNEXPLAINED),
    ),
    (
        "the reservation is not in the consumed memory",
        one_rank(memory_file(CONTROL), consumed_less),
        failed(CODE.RESERVATION_NOT_COUNTED),
    ),
    ("no step was as large as the engine allows", no_full_prefill, inconclusive(CODE.LOAD_TOO_SMALL)),
    (
        "a rank left no memory report",
        a_boot(WITH_PLUGIN, lambda folder: lambda tree: tree.edit(memory_file(folder), lambda reports: reports.pop())),
        failed(CODE.RANK_MISSING),
    ),
)


def _faults() -> Iterator[Fault]:
    for group, claim, rows in (
        (Group.GRAPHS, GRAPHS, GRAPH_FAULTS),
        (Group.PLUGIN, PLUGIN, PLUGIN_FAULTS),
        (Group.MEMORY, MEMORY, MEMORY_FAULTS),
    ):
        for name, change, verdict in rows:
            yield Fault(group, name, judge(name, change), {claim: verdict})


FAULTS = tuple(_faults())
GOOD = {
    "graphs, plugin and memory of two GPUs": judge("sound", lambda tree: None),
    "stock vLLM that grows beside the plugin": judge("stock grows", ranks(memory_file(STOCK), grown)),
    "bytes that no two boots share": judge("behind the indexer", other_bytes(3)),
}
