# SPDX-License-Identifier: Apache-2.0
"""Faults in the memory evidence: admission of a real run, and growth as a CUDA engine would report it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from qualify.claims.model import ClaimId
from qualify.probes.workers import Allocator, DriverMemory, MemoryReport, memory_file
from qualify.profiles import Profile
from qualify.reasons import ReasonCode

from faults.evidence import BOOTS, fault, of_a_boot
from faults.lab import Lab, Tamper, Tree
from faults.model import Fault, Group, Verdict, Verdicts, failed, inconclusive, verdicts

CODE = ReasonCode
MEMORY = ClaimId.MEMORY_ADMISSION
TOKENS = re.compile(r"(KV cache size: )([\d,]+)( tokens)")
LABEL = re.compile(r'(kv_cache_size_tokens=")(\d+)(")')


def in_text(file: str, pattern: re.Pattern[str], value: str, boots: tuple[str, ...] = BOOTS) -> Tamper:
    """Another figure where the pattern's second group stands."""

    def change(tree: Tree) -> None:
        path = f"{tree.random.choice(boots)}/{file}"
        text, count = pattern.subn(rf"\g<1>{value}\g<3>", tree.bytes(path).decode())
        if not count:
            raise ValueError(f"{path} does not hold {pattern.pattern}")
        tree.write(path, text.encode())

    return change


def a_cache(**values: Any) -> Tamper:
    """Another figure in one rank's KV cache."""
    return of_a_boot("workers.json", lambda workers, tree: tree.random.choice(workers)["kvCache"].update(values))


def no_cache_known(workers: Any, tree: Tree) -> None:
    for worker in workers:
        worker["kvCache"] = None


def silent_log(tree: Tree) -> None:
    path = f"{tree.random.choice(BOOTS)}/engine.log.gz"
    lines = tree.bytes(path).decode().splitlines(keepends=True)
    tree.write(path, "".join(line for line in lines if "KV cache size" not in line).encode())


def little_memory(tree: Tree) -> None:
    """All sources agree on fewer tokens than the profile demands."""
    boot = tree.random.choice(BOOTS)
    in_text("engine.log.gz", TOKENS, "1,024", (boot,))(tree)
    in_text("admission.prom", LABEL, "1024", (boot,))(tree)

    def shrink(workers: Any) -> None:
        for worker in workers:
            worker["kvCache"]["tokens"] = 1024

    tree.edit(f"{boot}/workers.json", shrink)


ADMISSION: tuple[tuple[str, Tamper, Verdict], ...] = (
    ("the log admits other tokens", in_text("engine.log.gz", TOKENS, "7,777"), failed(CODE.ADMISSION_DISAGREES)),
    ("the metrics admit other tokens", in_text("admission.prom", LABEL, "7777"), failed(CODE.ADMISSION_DISAGREES)),
    ("a rank admits other blocks", a_cache(blocks=7), failed(CODE.RANKS_DISAGREE, CODE.ADMISSION_DISAGREES)),
    ("a rank took other bytes", a_cache(bytes=7), failed(CODE.RANKS_DISAGREE)),
    ("the log says nothing of the KV cache", silent_log, inconclusive(CODE.ADMISSION_MISSING)),
    ("no rank can read its KV cache", of_a_boot("workers.json", no_cache_known), inconclusive(CODE.ADMISSION_MISSING)),
    ("less is admitted than promised", little_memory, failed(CODE.KV_BELOW_FLOOR)),
)


# growth: records of a CUDA engine beside the real admission

GIB = 1 << 30


def report(rank: int) -> MemoryReport:
    allocator = Allocator(
        allocated_current=40 * GIB,
        allocated_peak=41 * GIB,
        reserved_current=42 * GIB,
        reserved_peak=43 * GIB,
        retries=0,
        out_of_memory=0,
    )
    return MemoryReport(
        rank=rank,
        resident_bytes=None,
        resident_peak_bytes=None,
        control_group_bytes=None,
        allocator=allocator,
        driver=DriverMemory(used=50 * GIB, total=80 * GIB),
        budget_bytes=60 * GIB,
        unknown={},
    )


def cuda(profile: Profile) -> Profile:
    return profile.model_copy(update={"engine": profile.engine.model_copy(update={"kind": "cuda"})})


def on_cuda(name: str, change: Callable[[list[dict[str, Any]], Tree], object]) -> Callable[[Lab], Verdicts]:
    """Judge memory alone, with `change` made to what the ranks of one boot report after the load."""

    def act(lab: Lab) -> Verdicts:
        tree = Tree(dict(lab.files), lab.dice(name))
        sound = [json.loads(report(rank).model_dump_json()) for rank in range(lab.profile.engine.tensor_parallel)]
        for boot in BOOTS:
            for moment in ("ready", "loaded"):
                tree.write(f"{boot}/{memory_file(moment)}", json.dumps(sound).encode())
        path = f"{tree.random.choice(BOOTS)}/{memory_file('loaded')}"
        reports = tree.json(path)
        change(reports, tree)
        tree.write(path, json.dumps(reports).encode())
        return verdicts(lab.derive(tree.files, cuda(lab.profile)), MEMORY)

    return act


def a_rank(**values: Any) -> Callable[[list[dict[str, Any]], Tree], object]:
    return lambda reports, tree: tree.random.choice(reports).update(values)


def count(name: str) -> Callable[[list[dict[str, Any]], Tree], object]:
    return lambda reports, tree: tree.random.choice(reports)["allocator"].update({name: 1})


GROWTH: tuple[tuple[str, Callable[[list[dict[str, Any]], Tree], object], Verdict], ...] = (
    (
        "memory grew past the budget under load",
        a_rank(driver={"used": 61 * GIB, "total": 80 * GIB}),
        failed(CODE.MEMORY_GREW),
    ),
    ("the allocator retried under load", count("num_alloc_retries"), failed(CODE.ALLOCATION_RETRY)),
    ("an allocation failed under load", count("num_ooms"), failed(CODE.ALLOCATION_RETRY)),
    ("a rank's allocator cannot be read", a_rank(allocator=None), inconclusive(CODE.METRIC_MISSING)),
    ("a rank left no memory report", lambda reports, tree: reports.pop(), failed(CODE.RANK_MISSING)),
)


def _faults() -> Iterator[Fault]:
    for name, change, verdict in ADMISSION:
        yield fault(Group.MEMORY, name, change, {MEMORY: verdict})
    for name, growth, verdict in GROWTH:
        yield Fault(Group.MEMORY, name, on_cuda(name, growth), {MEMORY: verdict})


FAULTS = tuple(_faults())
GOOD = {"memory that does not grow on CUDA": on_cuda("sound", lambda reports, tree: None)}
