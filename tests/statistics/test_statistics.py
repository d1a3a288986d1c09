# SPDX-License-Identifier: Apache-2.0
"""Known values and properties of every figure; the vectors are those of docs/statistics.md."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from qualify import statistics

SERIES = [100 - 20 * 0.8**i + (i * i % 7) - 3 for i in range(120)]
OTHERS = [100, 101, 99, 100, 102, 98, 100, 101, 99, 100, 100, 101, 99, 100]

values = st.lists(st.floats(0.1, 1e6), min_size=5, max_size=80)


def autoregressive(rho: float, count: int, seed: int) -> list[float]:
    source = random.Random(seed)
    level, series = 0.0, []
    for _ in range(count):
        level = rho * level + source.gauss(0, 1)
        series.append(100 + level)
    return series


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(2, 4.303), (4, 2.776), (7, 2.365), (9, 2.262), (14, 2.145), (19, 2.093), (29, 2.045)],
)
def test_t_quantiles_equal_the_published_table(freedom: int, quantile: float) -> None:
    """The 95 % table agrees with published values to their three digits."""
    assert round(statistics.t_quantile(freedom), 3) == quantile


@pytest.mark.parametrize("level", [0.95, 0.99])
@pytest.mark.parametrize("freedom", range(1, 31))
def test_every_t_quantile_encloses_its_level(level: float, freedom: int) -> None:
    """Each entry of the table has the two-sided probability it stands for, by the exact finite sums."""
    angle = math.atan(statistics.t_quantile(freedom, level) / math.sqrt(freedom))
    assert two_sided(angle, freedom) == pytest.approx(level, abs=2e-7)


def two_sided(angle: float, freedom: int) -> float:
    """P(|T| <= t) for t = tan(angle) * sqrt(freedom), in closed form."""
    cosine = math.cos(angle)
    if freedom % 2 == 0:
        term = total = 1.0
        for k in range(1, freedom - 2, 2):
            term *= cosine**2 * k / (k + 1)
            total += term
        return math.sin(angle) * total
    term = cosine
    total = term if freedom > 1 else 0.0
    for k in range(2, freedom - 1, 2):
        term *= cosine**2 * k / (k + 1)
        total += term
    return 2 / math.pi * (angle + math.sin(angle) * total)


def test_t_quantile_refuses_what_the_table_lacks() -> None:
    """Another level or no degree of freedom is an error, not a guess."""
    for arguments in ((0, 0.95), (5, 0.9)):
        with pytest.raises(ValueError, match="no t quantile"):
            statistics.t_quantile(*arguments)


def test_mser5_finds_the_transient_of_the_vector() -> None:
    """MSER-5 cuts 15 samples of the documented series, and the rest has the documented mean."""
    found = statistics.mser5(SERIES)
    assert found.cut == 15
    assert found.statistic == pytest.approx(0.00717999, abs=1e-8)
    assert found.uncut == pytest.approx(0.337136, abs=1e-6)
    assert statistics.mean(SERIES[found.cut :]) == pytest.approx(98.966491, abs=1e-6)


def test_batch_means_and_trend_of_the_vector() -> None:
    """Ten batch means of the documented series: mean, half-width, rank correlation, drift."""
    means = statistics.batch_means(SERIES, 10)
    interval = statistics.mean_interval(means)
    found = statistics.trend(means)
    assert interval.point == pytest.approx(98.15, abs=1e-9)
    assert interval.half == pytest.approx(1.765118, abs=1e-6)
    assert found.rank == pytest.approx(0.636364, abs=1e-6)
    assert found.drift == pytest.approx(0.04555, abs=1e-5)


def test_ratio_of_sums_is_not_the_mean_of_ratios() -> None:
    """The ratio vector: 2.8 with half-width 0.108530, where the mean of ratios would be 2.798663."""
    found = statistics.ratio_of_sums([140, 150, 130, 145, 135], [50, 52, 49, 51, 48])
    assert found.point == 2.8
    assert found.half == pytest.approx(0.108530, abs=1e-6)
    assert (found.low, found.high) == (pytest.approx(2.69147, abs=1e-5), pytest.approx(2.90853, abs=1e-5))


def test_mean_of_boots_of_the_vector() -> None:
    """Five boots: t interval over their means, and their coefficient of variation."""
    boots = [72.57, 72.31, 72.80, 72.46, 72.65]
    assert statistics.mean_interval(boots).half == pytest.approx(0.230863, abs=1e-6)
    assert statistics.variation(boots) == pytest.approx(0.002563, abs=1e-6)


def test_prediction_range_of_the_vector() -> None:
    """The range for the last of 15 batches, and that a value outside it is a late drop."""
    low, high = statistics.prediction_range(OTHERS)
    assert (low, high) == (pytest.approx(96.764, abs=1e-3), pytest.approx(103.236, abs=1e-3))
    assert not statistics.late_drop([float(value) for value in [*OTHERS, 97]])
    assert statistics.late_drop([float(value) for value in [*OTHERS, 96]])


@pytest.mark.parametrize(
    ("count", "share", "expected"),
    [(100, 0.9, (84, 96)), (400, 0.99, (392, 400)), (1000, 0.99, (983, 997))],
)
def test_percentile_ranks_of_the_vector(count: int, share: float, expected: tuple[int, int]) -> None:
    """Order statistics that hold a percentile with 95 %."""
    assert statistics.percentile_ranks(count, share) == expected


@pytest.mark.parametrize(("share", "least"), [(0.5, 6), (0.9, 36), (0.95, 72), (0.99, 368), (0.999, 3688)])
def test_a_percentile_needs_its_sample(share: float, least: int) -> None:
    """One request fewer than the smallest sample gives no interval, so the percentile is not printed."""
    assert statistics.percentile_ranks(least, share) is not None
    assert statistics.percentile_ranks(least - 1, share) is None
    assert statistics.percentile_interval([1.0] * (least - 1), share) is None


def test_batches_drop_the_remainder_at_the_start() -> None:
    """Equal slices; what does not fill one is cut where a transient would be."""
    assert statistics.batches([1, 2, 3, 4, 5, 6, 7], 3) == [[2, 3], [4, 5], [6, 7]]


def test_correlated_samples_need_longer_batches() -> None:
    """White noise keeps ten batches; strong correlation leaves fewer, and stronger none."""
    assert statistics.usable_batches(autoregressive(0.0, 300, 1), 10) == 10
    assert statistics.usable_batches(autoregressive(0.85, 100, 1), 10) in (None, 5, 6, 7)
    assert statistics.usable_batches(autoregressive(0.99, 100, 1), 10) is None


def test_batch_means_keep_their_promise_where_naive_intervals_break_it() -> None:
    """Over 400 seeded series with correlation 0.6, ten batches of 18 cover the mean at least 90 % of the time."""
    covered = 0
    for seed in range(400):
        interval = statistics.mean_interval(statistics.batch_means(autoregressive(0.6, 180, seed), 10))
        covered += interval.low <= 100 <= interval.high
    assert covered >= 0.9 * 400


def test_a_constant_series_has_no_correlation_and_no_width() -> None:
    """A counter that grows evenly gives a correlation of unknown, and an interval of width 0."""
    assert statistics.lag1([5.0] * 20) is None
    assert statistics.correlation_samples([5.0] * 20) == 1.0
    assert statistics.mean_interval([5.0] * 10).half == 0.0


@settings(deadline=None)
@given(values, st.floats(0.01, 100))
def test_ratio_scales_with_its_unit(series: list[float], factor: float) -> None:
    """Measuring tokens in another unit scales point and half-width alike."""
    spacings = [1.0 + index % 3 for index in range(len(series))]
    one = statistics.ratio_of_sums(series, spacings)
    other = statistics.ratio_of_sums([factor * value for value in series], spacings)
    assert other.point == pytest.approx(factor * one.point, rel=1e-9)
    assert other.half == pytest.approx(factor * one.half, rel=1e-6, abs=1e-9 * abs(other.point))


@settings(deadline=None)
@given(values)
def test_equal_spacing_makes_the_ratio_a_mean(series: list[float]) -> None:
    """With equal denominators the ratio of sums is the mean and has the interval of the mean."""
    ratio = statistics.ratio_of_sums(series, [1.0] * len(series))
    plain = statistics.mean_interval(series)
    assert ratio.point == pytest.approx(plain.point, rel=1e-9)
    assert ratio.half == pytest.approx(plain.half, rel=1e-6, abs=1e-9 * plain.point)


@settings(deadline=None)
@given(values)
def test_results_carry_twelve_digits(series: list[float]) -> None:
    """Rounding is idempotent, so a recomputed figure can be compared exactly."""
    interval = statistics.mean_interval(series)
    for figure in interval[:2]:
        assert statistics.significant(figure) == figure


@settings(deadline=None)
@given(st.lists(st.integers(0, 5), min_size=3, max_size=30))
def test_ranks_are_a_permutation_with_shared_ties(series: list[int]) -> None:
    """Ranks sum to n(n+1)/2 whatever the ties, and equal values share one rank."""
    found = statistics.ranks(series)
    assert sum(found) == len(series) * (len(series) + 1) / 2
    assert all(found[i] == found[j] for i in range(len(series)) for j in range(i) if series[i] == series[j])
