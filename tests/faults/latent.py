# SPDX-License-Identifier: Apache-2.0
"""Faults in the KV evidence of latent attention, of a real run on two GPUs: every rank holds the same bytes, one rank
stores them for all, and five KV-cache groups hold compressed rows, an indexer's keys and the state of compressors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qualify.claims.model import ClaimId
from qualify.reasons import ReasonCode

from faults.device import judge, layer_of
from faults.kv import PATHS, RESTORING, STORED, Case, a_case, controls, other_digest, with_damage
from faults.lab import Tamper, Tree
from faults.model import Fault, Group, Verdict, failed

CODE = ReasonCode
INDEXER = ".indexer.k_cache"
STATE = ".compressor.state_cache"
"""Ends of the names of layers."""


def entries(rank: Case, arm: str, wanted: Callable[[Any], bool]) -> list[Any]:
    """The digests of an arm, `cold` or `restored`, whose tensor is wanted."""
    return [entry for entry in rank["requests"][0][arm] if wanted(rank["tensors"][entry[0]])]


def named(end: str) -> Callable[[Any], bool]:
    return lambda tensor: bool(tensor["layer"].endswith(end))


def indexer_key(case: Case, tree: Tree) -> None:
    """Other keys of the indexer on one rank, which would only make it choose other rows."""
    entry = tree.random.choice(entries(tree.random.choice(case["ranks"]), "restored", named(INDEXER)))
    entry[3] = other_digest(entry[3])


def same_damage(case: Case, tree: Tree) -> None:
    """The one stored copy was bad: all ranks hold the same wrong bytes, so they agree with each other."""
    place = tree.random.choice(case["ranks"][0]["requests"][0]["restored"])[:3]
    for rank in case["ranks"]:
        for entry in rank["requests"][0]["restored"]:
            if entry[:3] == place:
                entry[3] = other_digest(entry[3])


def short_state(case: Case, tree: Tree) -> None:
    """A block of a compressor's state is missing. Its window is as short as two blocks of 4 tokens."""
    rank = tree.random.choice(case["ranks"])
    rank["requests"][0]["restored"].remove(tree.random.choice(entries(rank, "restored", named(STATE))))


def ranks_apart(tree: Tree) -> None:
    """A cold block differs between the ranks where two boots may differ (behind the first indexer), and where no
    restore reaches (a sliding window that has moved on): nothing else can tell.
    """

    def change(cases: list[Case]) -> None:
        rank = tree.random.choice(cases[0]["ranks"])
        found = entries(rank, "cold", lambda tensor: tensor["window"] is not None and layer_of(tensor) > 1)
        middle = [entry for entry in found if 4096 < entry[1] * rank["tensors"][entry[0]]["tokensPerBlock"] < 8192]
        entry = tree.random.choice(middle)
        entry[3] = other_digest(entry[3])

    tree.edit(PATHS["cold"], change)


def two_writers(tree: Tree) -> None:
    """The other rank stored a chunk as well."""
    tree.edit(STORED, lambda stored: stored["files"].append({**tree.random.choice(stored["files"]), "rank": 1}))


def lose_a_group(cases: list[Case], tree: Tree) -> None:
    cases.remove(tree.random.choice([case for case in cases if case["fault"]["damage"] == "staleGroup"]))


def damaged_for_one(cases: list[Case], tree: Tree) -> None:
    """The damaged file reached one rank, though there is one file for both."""
    whole = with_damage(cases, "none")
    with_damage(cases, "flipInFile")["ranks"][1]["requests"] = whole["ranks"][1]["requests"]


LATENT: tuple[tuple[str, Tamper, Verdict], ...] = (
    ("latent: the indexer's keys are others on a rank", a_case(indexer_key, *RESTORING), failed(CODE.BYTES_DIFFER)),
    ("latent: all ranks restored the same wrong block", a_case(same_damage, *RESTORING), failed(CODE.BYTES_DIFFER)),
    ("latent: a compressor's state is one block short", a_case(short_state, *RESTORING), failed(CODE.RESTORE_SHORT)),
    ("latent: the ranks' cold bytes differ", ranks_apart, failed(CODE.RANKS_DISAGREE)),
    ("latent: a second rank stored a chunk", two_writers, failed(CODE.STORED_FILES_MISMATCH)),
    ("latent: a group has no negative control", controls(lose_a_group), failed(CODE.NEGATIVE_CONTROL_MISSING)),
    (
        "latent: a damaged file reached one rank",
        controls(damaged_for_one),
        failed(CODE.NEGATIVE_CONTROL_UNEXPECTED),
    ),
)

FAULTS: tuple[Fault, ...] = tuple(
    Fault(Group.KV, name, judge(name, change), {ClaimId.KV_RESTORE: verdict}) for name, change, verdict in LATENT
)
