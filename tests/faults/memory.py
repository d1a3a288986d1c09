# SPDX-License-Identifier: Apache-2.0
"""Faults in the memory evidence of a real run; growth is in `device`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from qualify.claims.model import ClaimId
from qualify.reasons import ReasonCode

from faults.evidence import BOOTS, fault, of_a_boot, relog
from faults.lab import Tamper, Tree
from faults.model import Fault, Group, Verdict, failed, inconclusive

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
    relog(tree, path, "".join(line for line in lines if "KV cache size" not in line).encode())


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


def _faults() -> Iterator[Fault]:
    for name, change, verdict in ADMISSION:
        yield fault(Group.MEMORY, name, change, {MEMORY: verdict})


FAULTS = tuple(_faults())
