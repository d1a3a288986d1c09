# SPDX-License-Identifier: Apache-2.0
"""CUDA-graph oracle: which sizes vLLM must capture, computed from the configuration the engine holds.

Rules follow vLLM 0.25.1 and 0.32.0 (`config/vllm.py`, `config/compilation.py`, `v1/cudagraph_dispatcher.py`,
`v1/worker/gpu/cudagraph_utils.py`). A configuration outside them gives `Unknown`, never a guess.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

DEFAULT_CAPTURE_CEILING = 512
"""Largest default capture size in tokens; compute capability 10.x uses `BLACKWELL_CAPTURE_CEILING`."""
BLACKWELL_CAPTURE_CEILING = 1024


class Runner(StrEnum):
    """Model runner of a worker: both run under the "V1" engine."""

    V1 = "V1"
    V2 = "V2"


class GraphMode(StrEnum):
    """`cudagraph_mode` by the engine's own names."""

    NONE = "NONE"
    PIECEWISE = "PIECEWISE"
    FULL = "FULL"
    FULL_DECODE_ONLY = "FULL_DECODE_ONLY"
    FULL_AND_PIECEWISE = "FULL_AND_PIECEWISE"

    @property
    def has_full_decode(self) -> bool:
        return self in (GraphMode.FULL, GraphMode.FULL_DECODE_ONLY, GraphMode.FULL_AND_PIECEWISE)

    @property
    def has_piecewise(self) -> bool:
        return self in (GraphMode.PIECEWISE, GraphMode.FULL_AND_PIECEWISE)


class Drafter(StrEnum):
    """Drafters whose capture rule is known. MTP and EAGLE draft one token after another."""

    DSPARK = "dspark"
    DFLASH = "dflash"
    MTP = "mtp"
    EAGLE = "eagle"


@dataclass(frozen=True, slots=True)
class Unknown:
    """The oracle does not cover this configuration."""

    reason: str


@dataclass(frozen=True, slots=True)
class GraphSets:
    """Expected capture sizes in tokens, ascending. None: the manager does not exist or cannot be seen.

    `drafter_full` belongs to DSpark and DFlash; the prefill and decode sets to MTP and EAGLE.
    """

    piecewise: tuple[int, ...]
    full: tuple[int, ...]
    drafter_full: tuple[int, ...] | None = None
    drafter_prefill_piecewise: tuple[int, ...] | None = None
    drafter_prefill_full: tuple[int, ...] | None = None
    drafter_decode_full: tuple[int, ...] | None = None

    def managers(self) -> dict[str, Manager]:
        """The managers that exist, by the names that the workers give them; see `facts.Role`."""
        found = {"target": Manager(self.piecewise, self.full)}
        if self.drafter_full is not None:
            found["drafter"] = Manager((), self.drafter_full)
        if self.drafter_prefill_full is not None:
            found["drafterPrefill"] = Manager(self.drafter_prefill_piecewise or (), self.drafter_prefill_full)
        if self.drafter_decode_full is not None:
            found["drafterDecode"] = Manager((), self.drafter_decode_full)
        return found


@dataclass(frozen=True, slots=True)
class Manager:
    """Capture sizes of one manager in tokens, ascending."""

    piecewise: tuple[int, ...]
    full: tuple[int, ...]

    def chosen(self, tokens: int, *, uniform: bool) -> tuple[str, int]:
        """Mode and size of the graph that V2 takes for a step: the smallest FULL one that fits if the step is a
        `uniform` decode, else the smallest PIECEWISE one, else none at the step's own size. Not for mode FULL, whose
        graphs also take mixed steps.
        """
        for mode, sizes in (("FULL", self.full if uniform else ()), ("PIECEWISE", self.piecewise)):
            fits = [size for size in sizes if size >= tokens]
            if fits:
                return mode, min(fits)
        return "NONE", tokens


def round_up(size: int, multiple: int) -> int:
    """Smallest multiple of `multiple` that is not below `size`."""
    return -(-size // multiple) * multiple


def size_grid(limit: int) -> tuple[int, ...]:
    """Sizes of an explicit maximum without a list: 1, 2, 4, then step 8 below 256 and step 16 from there."""
    grid = [1, 2, 4, *range(8, 256, 8), *range(256, limit + 1, 16)]
    return tuple(size for size in grid if size <= limit)


def default_sizes(
    max_num_seqs: int,
    spec_tokens: int,
    max_num_batched_tokens: int,
    ceiling: int = DEFAULT_CAPTURE_CEILING,
) -> tuple[int, ...]:
    """Capture sizes that vLLM 0.32 chooses when neither a list nor a maximum is configured."""
    query_len = spec_tokens + 1
    widest = min(2 * max_num_seqs * query_len, ceiling)
    limit = min(widest, max_num_batched_tokens)
    sizes = set(size_grid(limit))
    if max_num_batched_tokens <= limit:
        sizes.add(max_num_batched_tokens)
    if query_len > 1:
        most = min(max_num_seqs, ceiling)
        uniform: Iterable[int] = (count * query_len for count in {*size_grid(most), most})
    else:
        uniform = (max_num_seqs,)
    sizes.update(size for size in uniform if size <= limit)
    return tuple(sorted(sizes))


def explicit_sizes(sizes: Iterable[int], max_num_batched_tokens: int) -> tuple[int, ...]:
    """An explicit list as the engine keeps it: without duplicates, cut at the token budget, ascending."""
    return tuple(sorted({size for size in sizes if size <= max_num_batched_tokens}))


def expected_sets(
    *,
    runner: Runner | str,
    mode: GraphMode | str,
    sizes: Iterable[int],
    max_num_seqs: int,
    spec_tokens: int = 0,
    drafter: Drafter | str | None = None,
    drafter_query_len: int | None = None,
    max_capture_size: int | None = None,
    unusual: str | None = None,
) -> GraphSets | Unknown:
    """Capture sets of target and drafter for the *effective* configuration.

    `sizes`, `max_capture_size` (default: the largest size) and `max_num_seqs` are those the engine holds after
    start, before V1 rounds them. `drafter_query_len` overrides the drafter's query length when the model says
    so. `unusual` names an option outside the rules (LoRA cases, microbatching, a fork); it makes the answer
    unknown.
    """
    try:
        known_runner, known_mode = Runner(runner), GraphMode(mode)
        known_drafter = None if drafter is None else Drafter(drafter)
    except ValueError as error:
        return Unknown(f"outside the capture rules: {error}")
    if unusual is not None:
        return Unknown(f"outside the capture rules: {unusual}")
    grid = tuple(sorted(set(sizes)))
    problem = _problem(grid, max_num_seqs, spec_tokens, known_drafter)
    if problem is not None:
        return Unknown(problem)
    if known_mode is GraphMode.NONE or not grid:
        return GraphSets((), ())
    limit = max_capture_size or grid[-1]
    if known_runner is Runner.V1:
        return _v1_sets(known_mode, grid, limit, max_num_seqs, spec_tokens)
    plan = _Plan(known_mode, grid, limit, max_num_seqs)
    piecewise, full = plan.manager(spec_tokens + 1)
    if known_drafter is None:
        return GraphSets(piecewise, full)
    if known_drafter in (Drafter.DSPARK, Drafter.DFLASH):
        natural = spec_tokens if known_drafter is Drafter.DSPARK else spec_tokens + 1
        return GraphSets(piecewise, full, drafter_full=plan.decode_only(drafter_query_len or natural))
    prefill_piecewise, prefill_full = plan.manager(spec_tokens + 1)
    decode = plan.decode_only(1) if spec_tokens > 1 else None
    return GraphSets(
        piecewise,
        full,
        drafter_prefill_piecewise=prefill_piecewise,
        drafter_prefill_full=prefill_full,
        drafter_decode_full=decode,
    )


def _problem(sizes: tuple[int, ...], max_num_seqs: int, spec_tokens: int, drafter: Drafter | None) -> str | None:
    if any(size < 1 for size in sizes) or max_num_seqs < 1 or spec_tokens < 0:
        return "capture sizes and max_num_seqs must be positive, the number of draft tokens not negative"
    if drafter is not None and spec_tokens == 0:
        return "a drafter needs a number of draft tokens"
    return None


@dataclass(frozen=True, slots=True)
class _Plan:
    """Inputs shared by the V2 managers of target and drafter."""

    mode: GraphMode
    sizes: tuple[int, ...]
    limit: int
    max_num_seqs: int

    def manager(self, query_len: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(PIECEWISE, FULL) of a manager that follows the configured mode."""
        if self.mode is GraphMode.FULL:
            return (), self.sizes
        piecewise = self.sizes if self.mode.has_piecewise else ()
        return piecewise, self.decode_only(query_len)

    def decode_only(self, query_len: int) -> tuple[int, ...]:
        """FULL sizes for uniform decode steps of `query_len` tokens per request."""
        if not self.mode.has_full_decode:
            return ()
        widest = min(self.limit, self.max_num_seqs * query_len)
        rounded = {round_up(size, query_len) for size in self.sizes}
        return tuple(sorted(size for size in rounded if size <= widest))


def _v1_sets(
    mode: GraphMode, sizes: tuple[int, ...], limit: int, max_num_seqs: int, spec_tokens: int
) -> GraphSets | Unknown:
    query_len = spec_tokens + 1
    if mode.has_full_decode and spec_tokens > 0:
        rounded = {round_up(size, query_len) for size in sizes}
        sizes = tuple(sorted(size for size in rounded if size <= limit))
        if not sizes and query_len <= limit:
            sizes = (query_len,)
        if not sizes:
            return Unknown(f"no capture size up to {limit} is a multiple of {query_len}: V1 refuses to start")
    if mode is GraphMode.FULL:
        return GraphSets((), sizes)
    piecewise = sizes if mode.has_piecewise else ()
    full = tuple(size for size in sizes if query_len <= size <= max_num_seqs * query_len)
    return GraphSets(piecewise, full if mode.has_full_decode else ())
