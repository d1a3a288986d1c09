# SPDX-License-Identifier: Apache-2.0
"""What each worker says of its CUDA graphs, once when the boot is ready and again after its load.

Sizes are token counts. A value that could not be read is null, and `unknown` names the reason.
"""

from __future__ import annotations

from qualify.model import Record
from qualify.probes.workers import ProcessIdentity

DispatchRow = tuple[int | None, int, int | None, str, int, int]
"""(requests, tokens, tokens of every request of a uniform step, mode, size of the graph, count)."""

ReplayRow = tuple[str, int, int]
"""(mode, size, count)."""


def graphs_file(label: str) -> str:
    return f"graphs-{label}.json"


class GraphManager(Record):
    """The graphs of the target or of a drafter. `planned` is what it means to capture, the rest what it did."""

    name: str
    mode: str | None
    query_len: int | None
    """Tokens of one request in a uniform decode step."""
    piecewise: tuple[int, ...] | None
    full: tuple[int, ...] | None
    planned_piecewise: tuple[int, ...] | None
    planned_full: tuple[int, ...] | None
    dispatches: tuple[DispatchRow, ...] | None
    replays: tuple[ReplayRow, ...] | None
    """Since the worker began; what counts is the difference between two moments."""
    unknown: dict[str, str]


class CaptureRound(Record):
    """One capture of one manager, in order; `label` is that of its progress bar in the log, without the mode."""

    label: str
    profiling: bool
    piecewise: tuple[int, ...] | None
    full: tuple[int, ...] | None
    unknown: dict[str, str]


class GraphReport(Record):
    """One rank. `sizes` are those the engine holds after it chose its attention backend."""

    rank: int
    process: ProcessIdentity | None
    runner: str | None
    sizes: tuple[int, ...] | None
    max_size: int | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    managers: tuple[GraphManager, ...] | None
    passes: tuple[CaptureRound, ...] | None
    watched: tuple[str, ...] | None
    """What of the engine is watched; nothing is counted of the rest."""
    problems: tuple[str, ...] | None
    """Notes that could not be taken: counts are then incomplete."""
    unknown: dict[str, str]
