# SPDX-License-Identifier: Apache-2.0
"""Faults in the throughput evidence of a real run, and in windows long enough to be judged for steadiness."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from typing import Any

from fake_engine import cells
from fake_engine.bench import judged, run_record
from fake_engine.cells import Steps
from qualify import profiles
from qualify.claims.model import ClaimId
from qualify.reasons import ReasonCode

from faults.evidence import CONTROL, SERVED, SPECULATIVE, fault
from faults.lab import Lab, Tamper, Tree
from faults.model import Fault, Group, Verdict, Verdicts, error, failed, inconclusive, invalid, verdicts

CODE = ReasonCode
LOAD = ClaimId.THROUGHPUT_SUSTAINED

Cell = dict[str, Any]


def cell_path(tree: Tree, boot: str, concurrency: int) -> str:
    path = f"{boot}/throughput/c{concurrency}.json"
    return path if path in tree.files else f"{path}.gz"


def a_cell(
    change: Callable[[Cell, Tree], object],
    boots: tuple[str, ...] = SERVED,
    concurrencies: tuple[int, ...] = (1, 4),
) -> Tamper:
    def act(tree: Tree) -> None:
        path = cell_path(tree, tree.random.choice(boots), tree.random.choice(concurrencies))
        tree.edit(path, lambda cell: change(cell, tree))

    return act


def a_page(
    name: str, by: int, boots: tuple[str, ...] = SERVED, concurrencies: tuple[int, ...] = (1, 4), label: str = ""
) -> Tamper:
    """Add to a counter of the page after the load."""

    def act(tree: Tree) -> None:
        path = f"{tree.random.choice(boots)}/throughput/c{tree.random.choice(concurrencies)}-after.prom.gz"
        pattern = re.compile(rf"^({re.escape(name)}\{{[^}}]*{label}[^}}]*\}}) (\S+)$", re.MULTILINE)
        text, count = pattern.subn(lambda found: f"{found[1]} {float(found[2]) + by}", tree.bytes(path).decode(), 1)
        if not count:
            raise ValueError(f"{path} has no {name}")
        tree.write(path, text.encode())

    return act


def replay(*ways: tuple[tuple[str, int], tuple[str, int]]) -> Tamper:
    """A whole cell in the place of another."""

    def act(tree: Tree) -> None:
        (boot, concurrency), (place, number) = tree.random.choice(ways)
        cell = tree.bytes(cell_path(tree, boot, concurrency))
        tree.write(cell_path(tree, place, number), cell)
        for moment in ("before", "after"):
            page = tree.bytes(f"{boot}/throughput/c{concurrency}-{moment}.prom.gz")
            tree.write(f"{place}/throughput/c{number}-{moment}.prom.gz", page)

    return act


def load(cell: Cell) -> list[Cell]:
    return [request for request in cell["requests"] if not request["warmup"]]


def fail_a_request(cell: Cell, tree: Tree) -> None:
    tree.random.choice(load(cell)).update(error="ReadTimeout", finishReason=None)


def misuse(cell: Cell, tree: Tree) -> None:
    tree.random.choice(cell["requests"])["completionTokens"] += 1


def lose_a_token(cell: Cell, tree: Tree) -> None:
    tree.random.choice(cell["requests"])["deliveredTokens"] -= 1


def restart(cell: Cell, tree: Tree) -> None:
    """The engine was started again within the window, and counts on as if it had not been."""
    middle = len(cell["samples"]) // 2
    for sample in cell["samples"][middle:]:
        sample["processStart"] += 20


def fall(cell: Cell, tree: Tree) -> None:
    """Counters start anew; no page shows a process start time."""
    middle = len(cell["samples"]) // 2
    base = cell["samples"][middle]["generationTokens"]
    for sample in cell["samples"]:
        sample["processStart"] = None
    for sample in cell["samples"][middle:]:
        sample["generationTokens"] -= base


def cut_the_series(cell: Cell, tree: Tree) -> None:
    del cell["samples"][len(cell["samples"]) // 2 :]


def thin_the_series(cell: Cell, tree: Tree) -> None:
    """The whole window, in five samples."""
    last = len(cell["samples"]) - 1
    cell["samples"] = [cell["samples"][last * index // 4] for index in range(5)]


def stall(cell: Cell, tree: Tree) -> None:
    """Half of the window without a token."""
    samples = cell["samples"]
    start, end = len(samples) // 4, len(samples) * 3 // 4
    for sample in samples[start:end]:
        for name in ("generationTokens", "steps", "drafts", "draftTokens", "acceptedTokens"):
            sample[name] = samples[start][name]


def silence(cell: Cell, tree: Tree) -> None:
    tree.random.choice(load(cell))["times"]["longestSilence"] = 6.0


def slow_client(cell: Cell, tree: Tree) -> None:
    cell["ceiling"]["tokensPerSecond"] = 20.0


def idle_slots(cell: Cell, tree: Tree) -> None:
    """Requests that were sent late: the slots stood empty."""
    for request in cell["requests"]:
        times = request["times"]
        times["sent"] = times["intended"] = times["firstToken"] = times["ended"] - 0.01


def hide_steps(cell: Cell, tree: Tree) -> None:
    for sample in cell["samples"]:
        sample["steps"] = None


def hide_running(cell: Cell, tree: Tree) -> None:
    for sample in cell["samples"]:
        sample["running"] = 0.0


def no_drafts(cell: Cell, tree: Tree) -> None:
    for name in ("drafts", "draftTokens", "acceptedTokens"):
        for sample in cell["samples"]:
            sample[name] = cell["samples"][0][name]


def page_before_twice(tree: Tree) -> None:
    place = f"{tree.random.choice(SERVED)}/throughput/c{tree.random.choice((1, 4))}"
    tree.write(f"{place}-after.prom.gz", tree.bytes(f"{place}-before.prom.gz"))


STEPS = "vllm:iteration_tokens_total_count"

CELLS: tuple[tuple[str, Tamper, Verdict], ...] = (
    ("a request of the load failed", a_cell(fail_a_request), invalid(CODE.REQUEST_FAILED)),
    ("the window ended early", a_cell(lambda cell, tree: cell.update(failure="x")), invalid(CODE.REQUEST_FAILED)),
    ("usage of a request is one too high", a_cell(misuse), invalid(CODE.USAGE_MISMATCH)),
    ("a token was counted and not delivered", a_cell(lose_a_token), invalid(CODE.USAGE_MISMATCH)),
    ("the engine restarted within the window", a_cell(restart), invalid(CODE.COUNTER_RESET)),
    ("a counter fell within the window", a_cell(fall), invalid(CODE.COUNTER_RESET)),
    ("the series is cut", a_cell(cut_the_series), inconclusive(CODE.INSUFFICIENT_SAMPLES)),
    ("too few samples", a_cell(thin_the_series), inconclusive(CODE.INSUFFICIENT_SAMPLES)),
    ("the drafter proposed nothing", a_cell(no_drafts, (SPECULATIVE,)), inconclusive(CODE.INSUFFICIENT_SAMPLES)),
    ("tokens stopped for half of the window", a_cell(stall), failed(CODE.STALLED)),
    ("a stream was silent for six seconds", a_cell(silence), failed(CODE.STALLED)),
    ("the client is too slow", a_cell(slow_client), invalid(CODE.CLIENT_LIMITED)),
    ("the client left its slots empty", a_cell(idle_slots), invalid(CODE.CLIENT_LIMITED)),
    ("engine steps are not exposed", a_cell(hide_steps), error(CODE.METRIC_MISSING)),
    ("the engine says it holds no request", a_cell(hide_running), invalid(CODE.IDENTITY_BROKEN)),
    (
        "the engine was not idle around the load",
        a_cell(lambda cell, tree: cell.update(drained=False)),
        invalid(CODE.TOKEN_COUNT_MISMATCH),
    ),
    ("another client took tokens", a_page("vllm:generation_tokens_total", 7), invalid(CODE.TOKEN_COUNT_MISMATCH)),
    ("a step was counted twice", a_page(STEPS, 7, (CONTROL,), (1,)), invalid(CODE.IDENTITY_BROKEN)),
    (
        "prompt tokens were computed twice",
        a_page("vllm:prompt_tokens_by_source_total", 64, label="local_compute"),
        invalid(CODE.IDENTITY_BROKEN),
    ),
    (
        "accepted tokens are too many",
        a_page("vllm:spec_decode_num_accepted_tokens_total", 7, (SPECULATIVE,)),
        invalid(CODE.IDENTITY_BROKEN),
    ),
    ("the page after the load is the one before it", page_before_twice, invalid(CODE.TOKEN_COUNT_MISMATCH)),
    (
        "a cell is of another concurrency",
        replay(((CONTROL, 1), (CONTROL, 4)), ((SPECULATIVE, 4), (SPECULATIVE, 1))),
        error(CODE.PARSE_FAILED),
    ),
    (
        "the cell of the boot without drafter stands for the one with",
        replay(((CONTROL, 1), (SPECULATIVE, 1)), ((CONTROL, 4), (SPECULATIVE, 4))),
        error(CODE.EVIDENCE_MISSING),
    ),
    (
        "the cell of the boot with drafter stands for the one without",
        replay(((SPECULATIVE, 1), (CONTROL, 1)), ((SPECULATIVE, 4), (CONTROL, 4))),
        error(CODE.EVIDENCE_MISSING),
    ),
)


# windows of two minutes, which no quick run has


def noise(dice: random.Random) -> list[int]:
    """Mirrored in the middle, because a draw without a trend may happen to have one."""
    half = [200 + dice.randint(-4, 4) for _ in range(60)]
    return [*half, *reversed(half)]


def drift(dice: random.Random) -> list[int]:
    return [count - index // 6 for index, count in enumerate(noise(dice))]


def late_drop(dice: random.Random) -> list[int]:
    return [count - 60 if index >= 112 else count for index, count in enumerate(noise(dice))]


def correlated(dice: random.Random) -> list[int]:
    """Slow waves without a trend. Always the same: another draw may happen to drift."""
    source, level, found = random.Random(3), 0.0, []
    for _ in range(120):
        level = 0.97 * level + source.gauss(0, 1)
        found.append(200 + round(level / 2))
    return found


SERIES: tuple[tuple[str, Callable[[random.Random], list[int]], Verdict], ...] = (
    ("throughput drifts", drift, invalid(CODE.NOT_STEADY)),
    ("throughput drops at the end", late_drop, invalid(CODE.LATE_DROP)),
    ("throughput comes in slow waves", correlated, inconclusive(CODE.AUTOCORRELATED)),
)


def window(name: str, shape: Callable[[random.Random], list[int]]) -> Callable[[Lab], Verdicts]:
    def act(lab: Lab) -> Verdicts:
        plan = Steps(shape(lab.dice(name)))
        boot, folder = cells.boot(), lab.folder()
        cells.write(folder, boot, run_record(), plan)
        profile = cells.profile_of(profiles.load("cpu-smoke"), boot, len(plan.steps) * plan.spacing)
        return verdicts([judged(folder, profile, LOAD)])

    return act


def _faults() -> Iterator[Fault]:
    for name, change, verdict in CELLS:
        yield fault(Group.THROUGHPUT, name, change, {LOAD: verdict})
    for name, shape, verdict in SERIES:
        yield Fault(Group.THROUGHPUT, name, window(name, shape), {LOAD: verdict})


FAULTS = tuple(_faults())
GOOD = {"a steady window of two minutes": window("steady", noise)}
