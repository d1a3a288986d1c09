# SPDX-License-Identifier: Apache-2.0
"""What the managers of one rank did under load: counts after it less counts before it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from qualify.observe.graphs import GraphMode
from qualify.probes.graph_records import GraphManager, GraphReport

Steps = Counter[tuple[int | None, int, int | None, str, int]]
Graphs = Counter[tuple[str, int]]
"""Counts by (mode, size)."""


@dataclass(frozen=True)
class Used:
    """What one manager of one rank did under load."""

    steps: Steps
    replays: Graphs

    @property
    def chosen(self) -> Graphs:
        found: Graphs = Counter()
        for (_, _, _, mode, size), count in self.steps.items():
            if mode != GraphMode.NONE:
                found[mode, size] += count
        return found

    @property
    def eager(self) -> int:
        return sum(count for (_, _, _, mode, _), count in self.steps.items() if mode == GraphMode.NONE)

    @property
    def largest(self) -> int:
        """Tokens of the largest step."""
        return max((tokens for _, tokens, _, _, _ in self.steps), default=0)


def under_load(ready: GraphReport, loaded: GraphReport) -> dict[str, Used | None]:
    """By manager; None where a count is unknown, fell, or is of another process."""
    same = ready.rank == loaded.rank and ready.process == loaded.process and ready.process is not None
    before = {one.name: one for one in ready.managers or ()}
    return {one.name: _used(before.get(one.name), one) if same else None for one in loaded.managers or ()}


def _used(before: GraphManager | None, after: GraphManager) -> Used | None:
    if before is None or None in (before.dispatches, before.replays, after.dispatches, after.replays):
        return None
    steps = _difference(before.dispatches or (), after.dispatches or ())
    replays = _difference(before.replays or (), after.replays or ())
    return None if steps is None or replays is None else Used(steps, replays)


def _difference(before: Iterable[tuple[Any, ...]], after: Iterable[tuple[Any, ...]]) -> Counter[Any] | None:
    found: Counter[Any] = Counter({row[:-1]: row[-1] for row in after})
    found.subtract({row[:-1]: row[-1] for row in before})
    return None if any(count < 0 for count in found.values()) else +found
