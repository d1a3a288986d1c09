# SPDX-License-Identifier: Apache-2.0
"""Faults that only a GPU can have, in the evidence of a real run on two: graphs that are missing or not replayed, a
plugin that does not do its work, memory that grows past what was admitted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from qualify.claims import plugin as plugin_claim
from qualify.claims.model import ClaimId
from qualify.reasons import ReasonCode

from faults.lab import Lab, Tamper, Tree
from faults.model import Fault, Group, Verdict, Verdicts, error, failed, inconclusive, verdicts

CODE = ReasonCode
GRAPHS, PLUGIN, MEMORY = ClaimId.GRAPHS_CAPTURE, ClaimId.PLUGIN_ACTIVE, ClaimId.MEMORY_ADMISSION
CONTROL, COLD, RESTART, SPECULATIVE, STOCK = (
    "boots/01-control",
    "boots/02-cold",
    "boots/03-restart",
    "boots/04-speculative",
    "boots/05-stock",
)
WITH_PLUGIN = (CONTROL, COLD, RESTART, SPECULATIVE)
BOOTS = (*WITH_PLUGIN, STOCK)
RANKS = (0, 1)
GIB = 1 << 30

Change = Callable[[Any], object]


def judge(name: str, change: Tamper) -> Callable[[Lab], Verdicts]:
    def act(lab: Lab) -> Verdicts:
        return verdicts(lab.gpu.derive(lab.gpu.tampered(name, change)))

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
    return lambda tree: ranks(path, change, tree.random.choice(RANKS))(tree)


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


def graphs_file(folder: str, label: str = "loaded") -> str:
    return f"{folder}/graphs-{label}.json"


LOADED = graphs_file(SPECULATIVE)


def in_graphs(change: Change, *only: int) -> Tamper:
    """In a boot drawn by lot, on every rank or only on these."""
    return a_boot(BOOTS, lambda folder: ranks(graphs_file(folder), change, *only))


def in_graphs_of_a_rank(change: Change, label: str = "loaded") -> Tamper:
    return a_boot(BOOTS, lambda folder: one_rank(graphs_file(folder, label), change))


def manager(change: Change, name: str = "target") -> Change:
    return lambda report: change(next(one for one in report["managers"] if one["name"] == name))


def drop(mode: str) -> Change:
    """The second largest graph of a mode is not there."""
    return lambda one: one[mode].remove(sorted(one[mode])[-2])


def add(mode: str, size: int) -> Change:
    return lambda one: one[mode].append(size)


def busiest(one: Any, mode: str) -> Any:
    """The kind of step that ran most often in this mode."""
    return max((row for row in one["dispatches"] if row[3] == mode), key=lambda row: row[-1])


def count(rows: list[list[Any]], key: list[Any], by: int) -> None:
    """Add to the row of this key, which may be new."""
    found = next((row for row in rows if row[:-1] == key), None)
    if found is None:
        rows.append([*key, by])
    else:
        found[-1] += by


def reroute(mode: str, other: str) -> Change:
    """One of the commonest steps of a mode ran in another, and was replayed there."""

    def change(one: Any) -> None:
        *kind, _, size, _ = busiest(one, mode)
        tokens = kind[1]
        fitting = tokens if other == "NONE" else min(held for held in one["piecewise"] if held >= tokens)
        for row, graph, by in ((kind, [mode, size], -1), (kind, [other, fitting], 1)):
            count(one["dispatches"], [*row, *graph], by)
            if graph[0] != "NONE":
                count(one["replays"], graph, by)

    return change


def replays(mode: str, by: Callable[[int], int]) -> Change:
    """Fewer replays of the graph in which most steps of this mode ran."""

    def change(one: Any) -> None:
        graph = busiest(one, mode)[3:5]
        row = next(row for row in one["replays"] if row[:2] == graph)
        row[2] = by(row[2])

    return change


def idle(tree: Tree) -> None:
    """Nothing was counted since the boot was ready. The warm-up runs uniform decodes eager, before there are graphs: a
    count of them that is not its own would be a downgrade.
    """
    before = tree.json(graphs_file(SPECULATIVE, "ready"))

    def change(report: Any) -> None:
        ready = next(one for one in before if one["rank"] == report["rank"])
        counted = {one["name"]: one for one in ready["managers"]}
        for one in report["managers"]:
            one.update({name: counted[one["name"]][name] for name in ("dispatches", "replays")})

    ranks(LOADED, change)(tree)


def never_full(one: Any) -> None:
    """The load never brought as many requests together as the engine takes."""
    largest = max(one["full"])
    one["dispatches"] = [row for row in one["dispatches"] if row[3:5] != ["FULL", largest]]
    one["replays"] = [row for row in one["replays"] if row[:2] != ["FULL", largest]]


def in_log(old: str, new: str) -> Tamper:
    return lambda tree: tree.replace(f"{SPECULATIVE}/engine.log.gz", old, new)


def no_bars(tree: Tree) -> None:
    path = f"{SPECULATIVE}/engine.log.gz"
    text = re.sub(r"\rCapturing[^\n\r]*\n?", "", tree.bytes(path).decode())
    tree.write(path, text.encode())


def another_process(report: Any) -> None:
    report["process"]["started"] += 1


GRAPH_FAULTS: tuple[tuple[str, Tamper, Verdict], ...] = (
    (
        "a rank lacks a graph",
        in_graphs(manager(drop("full")), 1),
        failed(CODE.GRAPH_SHAPE_MISSING, CODE.GRAPH_RANKS_DIFFER),
    ),
    (
        "no rank has a drafter's graph, and the log agrees",
        all_of(ranks(LOADED, manager(drop("full"), "drafter")), in_log("6/6 [", "5/5 ["), in_log("/6 [", "/5 [")),
        failed(CODE.GRAPH_SHAPE_MISSING, CODE.GRAPH_LOG_DISAGREES),
    ),
    (
        "a rank holds another graph",
        in_graphs(manager(add("piecewise", 64)), 1),
        failed(CODE.GRAPH_SHAPE_EXTRA, CODE.GRAPH_RANKS_DIFFER),
    ),
    (
        "the drafter's graphs are of the target's decode length",
        ranks(LOADED, manager(put(queryLen=6), "drafter")),
        failed(CODE.GRAPH_CONFIG_MISMATCH),
    ),
    ("the engine lowered the mode", in_graphs(manager(put(mode="PIECEWISE"))), failed(CODE.GRAPH_CONFIG_MISMATCH)),
    ("the engine chose other sizes", in_graphs(put(sizes=[1, 2, 4, 8])), failed(CODE.GRAPH_CONFIG_MISMATCH)),
    ("the engine runs the other runner", in_graphs(put(runner="V1")), failed(CODE.GRAPH_CONFIG_MISMATCH)),
    (
        "uniform decodes ran piecewise",
        ranks(LOADED, manager(reroute("FULL", "PIECEWISE"))),
        failed(CODE.GRAPH_DOWNGRADED),
    ),
    (
        "mixed steps ran eager",
        ranks(graphs_file(CONTROL), manager(reroute("PIECEWISE", "NONE"))),
        failed(CODE.GRAPH_DOWNGRADED),
    ),
    (
        "a graph that was chosen was never replayed",
        ranks(LOADED, manager(replays("FULL", lambda times: 0))),
        failed(CODE.GRAPH_NOT_REPLAYED),
    ),
    (
        "a rank replayed the drafter less often",
        one_rank(LOADED, manager(replays("FULL", lambda times: times - 1), "drafter")),
        failed(CODE.GRAPH_NOT_REPLAYED, CODE.GRAPH_RANKS_DIFFER),
    ),
    (
        "the load never reached the graph of its concurrency",
        ranks(LOADED, manager(never_full)),
        failed(CODE.GRAPH_NOT_REPLAYED, CODE.GRAPH_STEPS_UNCOUNTED),
    ),
    (
        "the workers counted fewer steps than the engine",
        idle,
        failed(CODE.GRAPH_NOT_REPLAYED, CODE.GRAPH_STEPS_UNCOUNTED),
    ),
    (
        "the log counts fewer graphs",
        all_of(in_log("9/9 [", "8/8 ["), in_log("/9 [", "/8 [")),
        failed(CODE.GRAPH_LOG_DISAGREES),
    ),
    ("the log stops within a capture", in_log("7/7 [", "5/7 ["), failed(CODE.GRAPH_LOG_DISAGREES)),
    ("the log has no bar", no_bars, inconclusive(CODE.GRAPH_LOG_DISAGREES)),
    (
        "notes could not be taken",
        in_graphs_of_a_rank(put(problems=["dispatch: KeyError: 'x'"])),
        inconclusive(CODE.ENVIRONMENT_INCOMPLETE),
    ),
    (
        "the managers were not watched",
        in_graphs_of_a_rank(put(watched=["dispatcher", "breakable", "wrappers"])),
        inconclusive(CODE.ENVIRONMENT_INCOMPLETE),
    ),
    (
        "a rank cannot read its graphs",
        in_graphs_of_a_rank(manager(put(piecewise=None))),
        inconclusive(CODE.ENVIRONMENT_INCOMPLETE),
    ),
    (
        "a count fell within the boot",
        in_graphs_of_a_rank(manager(lambda one: count(one["replays"], one["replays"][0][:2], 10**6)), "ready"),
        inconclusive(CODE.ENVIRONMENT_INCOMPLETE),
    ),
    ("graphs of another boot", in_graphs_of_a_rank(another_process), error(CODE.EVIDENCE_MISSING)),
    (
        "a rank left no account of its graphs",
        a_boot(BOOTS, lambda folder: lambda tree: tree.edit(graphs_file(folder), lambda reports: reports.pop())),
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


def as_in(source: str, *folders: str) -> Tamper:
    """A rank is in the state in which the same rank of another boot was."""

    def in_folder(folder: str) -> Tamper:
        def act(tree: Tree) -> None:
            rank = tree.random.choice(RANKS)
            state = next(report for report in tree.json(plugin_file(source)) if report["rank"] == rank)
            ranks(plugin_file(folder), lambda report: report.update({**state, "process": report["process"]}), rank)(
                tree
            )

        return act

    return a_boot(folders, in_folder)


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
    for held in (report["report"], *(report[moment] for moment in ("profiled", "captured", "now"))):
        held["buffers"] = [row for row in held["buffers"] if row["lane"] == 0]
        held["reservedBytes"] = sum(row["bytes"] for row in held["buffers"])


def late(report: Any) -> None:
    """Nothing was reserved when the memory profile captured."""
    report["profiled"] = {"reservedBytes": 0, "buffers": []}


def short(row: Any) -> None:
    row.update(rows=row["rows"] // 2, bytes=row["bytes"] // 2)


def an_answer(change: Change) -> Tamper:
    """Change a greedy answer of the stock boot."""

    def act(tree: Tree) -> None:
        def edit(served: Any) -> None:
            change(tree.random.choice([one for one in served["requests"] if one["greedy"]])["answer"])

        tree.edit(f"{STOCK}/serve.json", edit)

    return act


def other_token(answer: Any) -> None:
    answer["tokenIds"][-1] += 1


INDEXER, CHOOSING = 1, 2048
"""ds4-mini's first layer with a sparse indexer, and the first token for which it has more rows than it picks: 512, each
of 4 tokens. Whatever lies behind both may differ from boot to boot.
"""


def other_bytes(*, settled: bool) -> Tamper:
    """Other bytes in a block of one rank of the stock boot: one that two boots must share, or one of the first that
    they need not.
    """

    def act(tree: Tree) -> None:
        def change(cases: Any) -> None:
            rank = tree.random.choice(cases[0]["ranks"])
            shared, behind, free = [], [], []
            for entry in rank["requests"][0]["cold"]:
                tensor = rank["tensors"][entry[0]]
                end = entry[1] * tensor["tokensPerBlock"] + entry[2]
                shared += [entry] if layer_of(tensor) <= INDEXER else []
                behind += [entry] if layer_of(tensor) > INDEXER and end == CHOOSING else []
                free += [entry] if layer_of(tensor) > INDEXER and CHOOSING < end <= CHOOSING + 256 else []
            tree.random.choice(tree.random.choice((shared, behind)) if settled else free)[3] = "f" * 64

        tree.edit(f"{STOCK}/kv-control.json.gz", change)

    return act


def layer_of(tensor: Any) -> int:
    return int(tensor["layer"].split(".")[2])


def in_boot(change: Change, *, every: bool = False) -> Tamper:
    """In a boot with the plugin, on one rank or on all."""
    return a_boot(WITH_PLUGIN, lambda folder: (ranks if every else one_rank)(plugin_file(folder), change))


PLUGIN_FAULTS: tuple[tuple[str, Tamper, Verdict], ...] = (
    ("the plugin is inactive on a rank", as_in(STOCK, *WITH_PLUGIN), failed(CODE.PLUGIN_INACTIVE, CODE.RANKS_DISAGREE)),
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
        as_in(CONTROL, STOCK),
        failed(CODE.PLUGIN_NOT_OFF, CODE.RANKS_DISAGREE),
    ),
    ("the plugin changes an answer", an_answer(other_token), failed(CODE.PLUGIN_CHANGES_OUTPUT)),
    ("the stock boot's answers are unknown", an_answer(put(tokenIds=None)), inconclusive(CODE.ENVIRONMENT_INCOMPLETE)),
    ("the plugin changes KV bytes", other_bytes(settled=True), failed(CODE.PLUGIN_CHANGES_KV)),
    ("a rank cannot say what it runs", in_boot(put(methods=None)), inconclusive(CODE.ENVIRONMENT_INCOMPLETE)),
    ("the plugin's state of another boot", in_boot(another_process), error(CODE.EVIDENCE_MISSING)),
)


# memory


def memory_file(folder: str, label: str = "loaded") -> str:
    return f"{folder}/memory-{label}.json"


def grown(report: Any) -> None:
    report["allocator"]["allocated_bytes.all.peak"] += 2 * GIB


def fuller(report: Any) -> None:
    report["driver"]["used"] += GIB


WITHOUT_CACHE = (CONTROL, SPECULATIVE)
"""With no cache server on their devices, whose memory the driver could not tell from the engine's."""


def loaded_memory(change: Change, folders: tuple[str, ...] = WITH_PLUGIN) -> Tamper:
    return a_boot(folders, lambda folder: one_rank(memory_file(folder), change))


def consumed_less(tree: Tree) -> None:
    """As if a rank's reservation had been made after the profile: the figures still add up."""
    reserved = tree.json(plugin_file(CONTROL))[0]["report"]["reservedBytes"]

    def change(report: Any) -> None:
        report["admission"]["consumed"] -= reserved
        report["admission"]["activation"] += reserved

    one_rank(memory_file(CONTROL), change)(tree)


def one_token_less(one: Any) -> None:
    """The largest steps, which are eager, were smaller."""
    largest = max(one["dispatches"], key=lambda row: row[1])
    largest[1] -= 1
    largest[4] -= 1


MEMORY_FAULTS: tuple[tuple[str, Tamper, Verdict], ...] = (
    ("memory grew past the admitted figure under load", loaded_memory(grown), failed(CODE.MEMORY_GREW)),
    (
        "the device holds more than was admitted",
        loaded_memory(fuller, WITHOUT_CACHE),
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
        loaded_memory(lambda report: report["admission"].update(activation=report["admission"]["activation"] + 1)),
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
        consumed_less,
        failed(CODE.RESERVATION_NOT_COUNTED),
    ),
    (
        "no step was as large as the engine allows",
        all_of(*(ranks(graphs_file(folder), manager(one_token_less)) for folder in WITH_PLUGIN)),
        inconclusive(CODE.LOAD_TOO_SMALL),
    ),
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
    "the run on two GPUs": judge("sound", lambda tree: None),
    "stock vLLM that grows beside the plugin": judge("stock grows", ranks(memory_file(STOCK), grown)),
    "bytes that no two boots share": judge("behind the indexer", other_bytes(settled=False)),
}
