# SPDX-License-Identifier: Apache-2.0
"""Arithmetic over one throughput cell: what the engine counted in the window, and what the client saw of it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from qualify import statistics
from qualify.claims.model import Estimate
from qualify.probes.load_records import Cell, LoadRequest, Sample
from qualify.reasons import ReasonCode

Counter = Callable[[Sample], float | None]


@dataclass(frozen=True)
class Window:
    """The samples of a cell as differences. All its counters must be known in every sample that is asked for."""

    cell: Cell

    @property
    def seconds(self) -> float:
        """From the first sample to the last."""
        samples = self.cell.samples
        return samples[-1].at - samples[0].at if samples else 0.0

    @cached_property
    def spacings(self) -> list[float]:
        return [later.at - earlier.at for earlier, later in itertools.pairwise(self.cell.samples)]

    def differences(self, counter: Counter) -> list[float]:
        """Increase of a counter from sample to sample."""
        values = [value for sample in self.cell.samples if (value := counter(sample)) is not None]
        return [later - earlier for earlier, later in itertools.pairwise(values)]

    def increase(self, counter: Counter) -> float:
        return math.fsum(self.differences(counter))

    def rates(self, counter: Counter) -> list[float]:
        """Increase per second from sample to sample, by the times at which the samples were really taken."""
        return [step / spacing for step, spacing in zip(self.differences(counter), self.spacings, strict=True)]

    def mean_gauge(self, gauge: Counter) -> float:
        return statistics.mean([value for sample in self.cell.samples if (value := gauge(sample)) is not None])

    def longest_stall(self, counter: Counter) -> float:
        """Longest time in seconds over which the counter did not grow."""
        longest = current = 0.0
        for step, spacing in zip(self.differences(counter), self.spacings, strict=True):
            current = 0.0 if step > 0 else current + spacing
            longest = max(longest, current)
        return longest

    def late(self) -> float:
        """Share of the window for which samples that missed a whole interval or more were late."""
        planned = self.cell.sample_seconds
        return math.fsum(spacing - planned for spacing in self.spacings if spacing >= 2 * planned) / self.seconds

    def occupancy(self, began: Callable[[LoadRequest], float | None]) -> float:
        """Mean number of requests between `began` and their end within the window, by the client's own times."""
        start, end = self.cell.samples[0].at, self.cell.samples[-1].at
        spans = (
            max(0.0, min(request.times.ended, end) - max(first, start))
            for request in self.cell.requests
            if (first := began(request)) is not None
        )
        return math.fsum(spans) / (end - start)

    def ended_within(self) -> int:
        """Requests that ended within the window."""
        start, end = self.cell.samples[0].at, self.cell.samples[-1].at
        return sum(start <= request.times.ended <= end for request in self.cell.requests)


def estimate(
    name: str, unit: str, scope: str, numerators: Sequence[float], denominators: Sequence[float], batches: int | None
) -> Estimate:
    """Ratio of sums with its interval over `batches` of one boot; no interval when no batch can be long enough."""
    if batches is None:
        return Estimate(
            name=name,
            unit=unit,
            scope=scope,
            point=statistics.significant(math.fsum(numerators) / math.fsum(denominators)),
            low=None,
            high=None,
            method="ratio of sums",
            replicates=len(numerators),
            replicate_unit="sample",
            reason=ReasonCode.AUTOCORRELATED,
        )
    above = [math.fsum(batch) for batch in statistics.batches(numerators, batches)]
    below = [math.fsum(batch) for batch in statistics.batches(denominators, batches)]
    interval = statistics.ratio_of_sums(above, below)
    return Estimate(
        name=name,
        unit=unit,
        scope=scope,
        point=interval.point,
        low=interval.low,
        high=interval.high,
        method="batch means, ratio of sums, within one boot",
        replicates=interval.replicates,
        replicate_unit="batch",
        reason=ReasonCode.SINGLE_REPLICATE,
    )
