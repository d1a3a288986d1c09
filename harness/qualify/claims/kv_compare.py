# SPDX-License-Identifier: Apache-2.0
"""Cold bytes against restored bytes. Pure: the same function judges real restores and negative controls."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from qualify.errors import EvidenceError
from qualify.probes.kv_records import Case, Digest, RankCapture
from qualify.probes.workers import KvTensor


class Place(NamedTuple):
    """Where bytes stand: `block` is the position in the block table, `tokens` how many of its tokens are meant."""

    rank: int
    group: int
    layer: str
    part: int
    block: int
    tokens: int

    def __str__(self) -> str:
        return (
            f"rank {self.rank}, group {self.group}, {self.layer}, part {self.part}, block {self.block}, "
            f"first {self.tokens} tokens"
        )


Digests = Mapping[Place, str]

LAYER = re.compile(r"\blayers\.(\d+)\.")
INDEXER = ".indexer.k_cache"
LEAST_SELECTED = 512
"""How many rows a sparse indexer picks at least: vLLM's selection takes 512, 1024 or 2048."""


@dataclass(frozen=True)
class GroupResult:
    """What was compared of one engine group on one rank. `blocks` counts per tensor, `byte_count` all of them."""

    rank: int
    group: int
    specs: tuple[str, ...]
    window: int | None
    tokens_per_block: int
    tensors: int
    blocks: int
    byte_count: int
    mismatches: int
    no_cold: int
    short: int
    not_retained: int
    cold_root: str
    restored_root: str


@dataclass(frozen=True)
class Comparison:
    """`differing`: restored with other bytes. `unseen`: restored, never seen cold. `short`: needed by attention, not
    restored.
    """

    groups: tuple[GroupResult, ...]
    restored: frozenset[Place]
    differing: frozenset[Place]
    unseen: frozenset[Place]
    short: frozenset[Place]
    first_difference: str | None


def compare(cold: Case, restored: Case) -> Comparison:
    """Compare every restored place of every rank with the cold arm."""
    before, after = cold_digests(cold), restored_digests(restored)
    needed = {place for capture in restored.ranks for place in needed_places(capture)}
    differing = {place for place, digest in after.items() if place in before and before[place] != digest}
    unseen = after.keys() - before.keys()
    short = needed - after.keys()
    return Comparison(
        groups=tuple(_groups(restored.ranks, before, after, differing, short)),
        restored=frozenset(after),
        differing=frozenset(differing),
        unseen=frozenset(unseen),
        short=frozenset(short),
        first_difference=_first(before, after, differing),
    )


def cold_digests(case: Case) -> dict[Place, str]:
    return _digests((capture, request.cold) for capture in case.ranks for request in capture.requests)


def restored_digests(case: Case) -> dict[Place, str]:
    """A group that is never cached is computed anew, so its blocks are not restored ones."""
    found = _digests((capture, request.restored) for capture in case.ranks for request in capture.requests)
    never = {tensor.group for capture in case.ranks for tensor in capture.tensors if tensor.cacheable is False}
    return {place: digest for place, digest in found.items() if place.group not in never}


@dataclass(frozen=True)
class TwoBoots:
    """Cold bytes of two boots. `settled`: how many places must be the same, `differing`: those of them that are not.

    `open_places` and `open_differing` count the places where equal bytes are not to be expected.
    """

    settled: int
    differing: tuple[Place, ...]
    open_places: int
    open_differing: int


def compare_boots(ours: Case, theirs: Case) -> TwoBoots:
    """Two computations of the same prompt; see `first_open` for what may differ."""
    here, there = cold_digests(ours), cold_digests(theirs)
    different = sorted(place for place in here.keys() | there.keys() if here.get(place) != there.get(place))
    first, sizes = first_open([tensor for capture in ours.ranks for tensor in capture.tensors]), block_sizes(ours)
    settled = sum(not _is_open(place, first, sizes) for place in here)
    differing = tuple(place for place in different if not _is_open(place, first, sizes))
    return TwoBoots(settled, differing, len(here) - settled, len(different) - len(differing))


def told_boots(two: TwoBoots) -> dict[str, int]:
    """For the report. The places left open sit behind a selection that takes its rows in no fixed order."""
    return {
        "compared": two.settled,
        "different": len(two.differing),
        "leftOpen": two.open_places,
        "leftOpenDifferent": two.open_differing,
    }


def first_open(tensors: Collection[KvTensor]) -> tuple[int, int] | None:
    """(layer, token) from which on two computations of one prompt may differ; None where they may not.

    A sparse indexer (DeepSeek-V4) picks the best of a layer's compressed rows. vLLM 0.32.0 writes each of them into the
    next free slot, in the order in which threads arrive (`top_k_per_row_prefill`), and attention adds up in that order.
    So every cache behind the first indexer may differ from the first token on that has more rows than are picked. What
    comes before is computed in a fixed order: all layers up to that one, and all tokens that need no choice.
    """
    indexers = [tensor for tensor in tensors if tensor.layer.endswith(INDEXER)]
    if not indexers:
        return None
    first = min(indexers, key=lambda tensor: _layer(tensor.layer))
    ratio = first.tokens_per_block // first.shape[1]
    return _layer(first.layer) + 1, LEAST_SELECTED * ratio


def _is_open(place: Place, first: tuple[int, int] | None, sizes: Mapping[int, int]) -> bool:
    """Whether a place holds a token from which on boots may differ; `sizes` gives tokens per block by group."""
    if first is None or place.group not in sizes:
        return False
    layer, token = first
    return _layer(place.layer) >= layer and place.block * sizes[place.group] + place.tokens > token


def _layer(name: str) -> int:
    """The number of a layer; one without a number counts as the last."""
    found = LAYER.search(name)
    return int(found[1]) if found else 1 << 30


def fault_places(case: Case) -> frozenset[Place]:
    """Where the workers say that they damaged restored blocks."""
    return frozenset(_digests((capture, capture.faults) for capture in case.ranks))


def needed_places(capture: RankCapture) -> frozenset[Place]:
    """What attention reads of the restored tokens: all of them, or the last window of them.

    The token after `computed` looks back `window` tokens including itself, so the window needs the last window - 1.
    """
    return frozenset(
        place
        for request in capture.requests
        for tensor in capture.tensors
        if tensor.cacheable is not False
        for place in _span(capture.rank, tensor, *_needed_tokens(tensor, request.computed_tokens))
    )


def cold_places(capture: RankCapture, boundary: int) -> frozenset[Place]:
    """What a cold capture must hold: every full block of the prompt, and the block that `boundary` cuts."""
    return frozenset(
        place
        for request in capture.requests
        for tensor in capture.tensors
        for place in (
            *_span(capture.rank, tensor, 0, request.prompt_tokens // tensor.tokens_per_block * tensor.tokens_per_block),
            *_cut(capture.rank, tensor, boundary),
        )
    )


def within_chunks(
    places: Iterable[Place], chunks: Iterable[int], chunk_tokens: int, sizes: Mapping[int, int]
) -> set[Place]:
    """The places whose block lies in one of these cache chunks; `sizes` gives tokens per block by group."""
    wanted = set(chunks)
    return {place for place in places if place.block * sizes[place.group] // chunk_tokens in wanted}


def block_sizes(case: Case) -> dict[int, int]:
    return {tensor.group: tensor.tokens_per_block for capture in case.ranks for tensor in capture.tensors}


def equal_on_ranks(case: Case) -> dict[int, tuple[int, int]]:
    """Per group: how many places hold the same bytes on another rank as on the first, of how many compared."""
    digests = cold_digests(case)
    ranks = [capture.rank for capture in case.ranks]
    found: dict[int, tuple[int, int]] = {}
    for place, digest in digests.items():
        if place.rank == ranks[0]:
            equal, total = found.get(place.group, (0, 0))
            for other in ranks[1:]:
                same = digests.get(place._replace(rank=other)) == digest
                equal, total = equal + same, total + 1
            found[place.group] = (equal, total)
    return found


def _needed_tokens(tensor: KvTensor, computed: int) -> tuple[int, int]:
    first = 0 if tensor.window is None else max(0, computed - tensor.window + 1)
    return first, computed


def _span(rank: int, tensor: KvTensor, first: int, end: int) -> Iterable[Place]:
    """Places that hold tokens [first, end), the last one cut at `end`."""
    size = tensor.tokens_per_block
    for block in range(first // size, end // size):
        yield Place(rank, tensor.group, tensor.layer, tensor.part, block, size)
    if first < end:
        yield from _cut(rank, tensor, end)


def _cut(rank: int, tensor: KvTensor, boundary: int) -> Iterable[Place]:
    block, rest = divmod(boundary, tensor.tokens_per_block)
    if rest:
        yield Place(rank, tensor.group, tensor.layer, tensor.part, block, rest)


def _digests(captures: Iterable[tuple[RankCapture, tuple[Digest, ...]]]) -> dict[Place, str]:
    found: dict[Place, str] = {}
    for capture, digests in captures:
        for index, block, tokens, digest in digests:
            if not 0 <= index < len(capture.tensors):
                raise EvidenceError(f"rank {capture.rank}: a digest names tensor {index} of {len(capture.tensors)}")
            tensor = capture.tensors[index]
            found[Place(capture.rank, tensor.group, tensor.layer, tensor.part, block, tokens)] = digest
    return found


def _groups(
    captures: tuple[RankCapture, ...],
    before: Digests,
    after: Digests,
    differing: set[Place],
    short: set[Place],
) -> Iterable[GroupResult]:
    cold: dict[tuple[int, int], list[Place]] = {}
    for place in before:
        cold.setdefault((place.rank, place.group), []).append(place)
    for capture in captures:
        computed = max((request.computed_tokens for request in capture.requests), default=0)
        for group in sorted({tensor.group for tensor in capture.tensors}):
            tensors = [tensor for tensor in capture.tensors if tensor.group == group]
            here = [place for place in after if (place.rank, place.group) == (capture.rank, group)]
            sizes = {(tensor.layer, tensor.part): tensor for tensor in tensors}
            windows = [tensor.window for tensor in tensors if tensor.window is not None]
            yield GroupResult(
                rank=capture.rank,
                group=group,
                specs=tuple(sorted({tensor.spec for tensor in tensors})),
                window=max(windows) if len(windows) == len(tensors) else None,
                tokens_per_block=tensors[0].tokens_per_block,
                tensors=len(tensors),
                blocks=len({(place.block, place.tokens) for place in here}),
                byte_count=sum(_bytes(place, sizes[place.layer, place.part]) for place in here),
                mismatches=sum(place in differing for place in here),
                no_cold=sum(place not in before for place in here),
                short=sum((place.rank, place.group) == (capture.rank, group) for place in short),
                not_retained=sum(
                    _below(place, computed, after, tensors[0]) for place in cold.get((capture.rank, group), ())
                ),
                cold_root=_root((place, before.get(place, "")) for place in here),
                restored_root=_root((place, after[place]) for place in here),
            )


def _bytes(place: Place, tensor: KvTensor) -> int:
    return tensor.block_bytes * place.tokens // tensor.tokens_per_block


def _below(place: Place, computed: int, after: Digests, tensor: KvTensor) -> bool:
    """Whether a full cold block below the restored length was not restored."""
    full = place.tokens == tensor.tokens_per_block
    return full and (place.block + 1) * place.tokens <= computed and place not in after


def _root(digests: Iterable[tuple[Place, str]]) -> str:
    lines = "".join(f"{place} {digest}\n" for place, digest in sorted(digests))
    return hashlib.sha256(lines.encode()).hexdigest()


def _first(before: Digests, after: Digests, differing: set[Place]) -> str | None:
    """The first difference in reading order, with both digests."""
    if not differing:
        return None
    place = min(differing)
    return f"{place}: cold {before[place][:16]}, restored {after[place][:16]}"
