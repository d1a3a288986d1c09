# SPDX-License-Identifier: Apache-2.0
"""Statistics of a measured window: intervals, autocorrelation, steadiness, percentiles.

Pure functions over sequences. Sums are exact (`math.fsum`) in the order given and every result is rounded to 12
significant digits, so that `run` and `review` get the same figure from the same evidence. What the figures mean,
and the test vectors, are in docs/statistics.md.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

# Two-sided Student t quantiles by degrees of freedom, 1 to 30. They are a table and not a function, so that no
# platform's mathematics library can change an interval.
_T_975 = (
    12.706205, 4.302653, 3.182446, 2.776445, 2.570582, 2.446912, 2.364624, 2.306004, 2.262157, 2.228139,
    2.200985, 2.178813, 2.160369, 2.144787, 2.131450, 2.119905, 2.109816, 2.100922, 2.093024, 2.085963,
    2.079614, 2.073873, 2.068658, 2.063899, 2.059539, 2.055529, 2.051831, 2.048407, 2.045230, 2.042272,
)  # fmt: skip
_T_995 = (
    63.656741, 9.924843, 5.840909, 4.604095, 4.032143, 3.707428, 3.499483, 3.355387, 3.249836, 3.169273,
    3.105807, 3.054540, 3.012276, 2.976843, 2.946713, 2.920782, 2.898231, 2.878440, 2.860935, 2.845340,
    2.831360, 2.818756, 2.807336, 2.796940, 2.787436, 2.778715, 2.770683, 2.763262, 2.756386, 2.749996,
)  # fmt: skip

MIN_BATCHES = 5
"""Fewer batches give no interval: t(3) is so wide that it says nothing."""
BATCH_TO_TAU = 3.0
"""A batch must be this many times as long as the autocorrelation time."""
TREND_RANK = 0.648
"""Spearman's rank correlation of 10 batch means that chance reaches in 5 % of steady series."""
TREND_DRIFT = 0.01
"""Fitted drift over the window, as a fraction of the mean, below which a trend does not matter."""
MSER_CUT = 0.25
"""Share of the window that MSER-5 may cut before the start counts as a transient."""
LATE_BATCHES = 15


class Interval(NamedTuple):
    """A 95 % confidence interval; `half` is its half-width in the unit of `point`."""

    point: float
    half: float
    replicates: int

    @property
    def low(self) -> float:
        return significant(self.point - self.half)

    @property
    def high(self) -> float:
        return significant(self.point + self.half)


class Mser(NamedTuple):
    """Where MSER-5 ends the initial transient: samples to cut, and the statistic at that cut and without one."""

    cut: int
    statistic: float
    uncut: float


class Trend(NamedTuple):
    """Spearman's correlation of batch means with time, and the fitted drift over the window over the mean."""

    rank: float
    drift: float


class Range(NamedTuple):
    low: float
    high: float


def significant(value: float, digits: int = 12) -> float:
    """`value` rounded to significant digits."""
    return float(f"{value:.{digits}g}")


def t_quantile(freedom: int, level: float = 0.95) -> float:
    """Student t for a two-sided interval of level 0.95 or 0.99. Above 30 degrees of freedom: t(30), which is wider.

    Raises ValueError for another level or no degree of freedom.
    """
    if level not in (0.95, 0.99) or freedom < 1:
        raise ValueError(f"no t quantile for level {level} and {freedom} degrees of freedom")
    table = _T_975 if level == 0.95 else _T_995
    return table[min(freedom, len(table)) - 1]


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean; ValueError if there is no value."""
    if not values:
        raise ValueError("the mean of no values is unknown")
    return math.fsum(values) / len(values)


def deviation(values: Sequence[float]) -> float:
    """Sample standard deviation (n - 1)."""
    if len(values) < 2:
        raise ValueError("a standard deviation needs two values")
    centre = mean(values)
    return math.sqrt(math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1))


def variation(values: Sequence[float]) -> float:
    """Coefficient of variation: standard deviation over mean."""
    return significant(deviation(values) / mean(values))


def mean_interval(values: Sequence[float]) -> Interval:
    """Mean and t interval of independent values, such as batch means or the means of boots."""
    half = t_quantile(len(values) - 1) * deviation(values) / math.sqrt(len(values))
    return Interval(significant(mean(values)), significant(half), len(values))


def batches(values: Sequence[float], count: int) -> list[Sequence[float]]:
    """`count` equal consecutive slices; a remainder is dropped at the start, where the transient would be."""
    size = len(values) // count
    if size < 1:
        raise ValueError(f"{len(values)} values do not fill {count} batches")
    first = len(values) - size * count
    return [values[first + index * size : first + (index + 1) * size] for index in range(count)]


def batch_means(values: Sequence[float], count: int) -> list[float]:
    return [mean(batch) for batch in batches(values, count)]


def ratio_of_sums(numerators: Sequence[float], denominators: Sequence[float]) -> Interval:
    """Sum over sum with its t interval by linearisation; never the mean of ratios.

    Raises ValueError when the two differ in length, hold fewer than two pairs, or the denominators sum to 0.
    """
    count = len(numerators)
    if count != len(denominators) or count < 2:
        raise ValueError("a ratio needs two or more pairs")
    below = math.fsum(denominators)
    if below == 0:
        raise ValueError("the denominators of a ratio sum to 0")
    ratio = math.fsum(numerators) / below
    residuals = (y - ratio * x for y, x in zip(numerators, denominators, strict=True))
    error = math.sqrt(math.fsum(r * r for r in residuals) / (count * (count - 1))) / abs(below / count)
    return Interval(significant(ratio), significant(t_quantile(count - 1) * error), count)


def lag1(values: Sequence[float]) -> float | None:
    """Autocorrelation at lag 1; None for fewer than three values or a constant series."""
    if len(values) < 3:
        return None
    centre = mean(values)
    deviations = [value - centre for value in values]
    power = math.fsum(d * d for d in deviations)
    if power <= 1e-24 * max(1.0, centre * centre) * len(values):
        return None
    products = math.fsum(a * b for a, b in itertools.pairwise(deviations))
    return significant(products / power)


def correlation_samples(values: Sequence[float]) -> float:
    """Autocorrelation time in samples, (1 + r1) / (1 - r1); at least 1, and 1 for a constant series."""
    r1 = lag1(values)
    if r1 is None:
        return 1.0
    return significant(max(1.0, (1 + r1) / (1 - r1)))


def usable_batches(values: Sequence[float], wanted: int) -> int | None:
    """The largest number of batches, `wanted` to MIN_BATCHES, each at least 3 autocorrelation times long; else None."""
    needed = BATCH_TO_TAU * correlation_samples(values)
    return next((count for count in range(wanted, MIN_BATCHES - 1, -1) if len(values) // count >= needed), None)


def mser5(values: Sequence[float]) -> Mser:
    """Initial transient by the marginal standard error rule over means of 5; at most the first half is cut.

    Raises ValueError for fewer than 20 values.
    """
    means = [mean(values[start : start + 5]) for start in range(0, len(values) - 4, 5)]
    if len(means) < 4:
        raise ValueError("MSER-5 needs 20 values")

    def statistic(cut: int) -> float:
        kept = means[cut:]
        centre = mean(kept)
        return math.fsum((value - centre) ** 2 for value in kept) / len(kept) ** 2

    cut = min(range(len(means) // 2 + 1), key=statistic)
    return Mser(5 * cut, significant(statistic(cut)), significant(statistic(0)))


def ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1; ties share their mean rank."""
    order = sorted(values)
    return [order.index(value) + (order.count(value) + 1) / 2 for value in values]


def trend(means: Sequence[float]) -> Trend:
    """Rank correlation with time and relative drift from first to last of batch means. ValueError below three."""
    count = len(means)
    if count < 3:
        raise ValueError("a trend needs three batch means")
    times = [float(index) for index in range(count)]
    ranked = _correlation(ranks(means), times)
    middle = mean(times)
    slope = math.fsum((t - middle) * value for t, value in zip(times, means, strict=True)) / math.fsum(
        (t - middle) ** 2 for t in times
    )
    return Trend(significant(ranked), significant(slope * count / mean(means)))


def prediction_range(others: Sequence[float]) -> Range:
    """Where one more value lies with 99 % probability, if it comes from the same normal distribution."""
    count = len(others)
    half = t_quantile(count - 1, 0.99) * deviation(others) * math.sqrt(1 + 1 / count)
    centre = mean(others)
    return Range(significant(centre - half), significant(centre + half))


def late_drop(values: Sequence[float]) -> bool:
    """Whether the last of 15 batches lies outside the 99 % prediction range of the other 14."""
    means = batch_means(values, LATE_BATCHES)
    low, high = prediction_range(means[:-1])
    return not low <= means[-1] <= high


def percentile_ranks(count: int, share: float) -> tuple[int, int] | None:
    """Ranks (from 1) of the order statistics that hold the percentile with 95 %; None if the sample is too small.

    The lower rank l is the largest with P(X <= l - 1) <= 0.025, the upper rank u the smallest with
    P(X <= u - 1) >= 0.975, X binomial(count, share).
    """
    cumulative = 0.0
    lower: int | None = None
    for successes in range(count):
        cumulative += math.exp(_log_binomial(count, successes, share))
        if cumulative <= 0.025:
            lower = successes + 1
        if cumulative >= 0.975:
            return None if lower is None else (lower, successes + 1)
    return None


def percentile_interval(values: Sequence[float], share: float) -> tuple[float, float, float] | None:
    """Percentile (nearest rank) with its 95 % interval (point, low, high); None if the sample is too small."""
    found = percentile_ranks(len(values), share)
    if found is None:
        return None
    order = sorted(values)
    point = order[max(0, math.ceil(share * len(values)) - 1)]
    return significant(point), significant(order[found[0] - 1]), significant(order[found[1] - 1])


def _correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Pearson's correlation; 0 when either does not vary, because then nothing rises or falls with the other."""
    a, b = mean(first), mean(second)
    power = math.fsum((x - a) ** 2 for x in first) * math.fsum((y - b) ** 2 for y in second)
    if power == 0:
        return 0.0
    return math.fsum((x - a) * (y - b) for x, y in zip(first, second, strict=True)) / math.sqrt(power)


def _log_binomial(count: int, successes: int, share: float) -> float:
    choose = math.lgamma(count + 1) - math.lgamma(successes + 1) - math.lgamma(count - successes + 1)
    return choose + successes * math.log(share) + (count - successes) * math.log1p(-share)
