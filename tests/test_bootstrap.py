"""Percentile bootstrap over clusters: which resamples are drawn, and whether its intervals cover what they should."""

from __future__ import annotations

import math

import numpy as np
import pytest

from predmask.bootstrap import LEAST_CLUSTERS, Estimate, estimate, interval, resampled_sums


def of_mean(values: np.ndarray, *, samples: int = 4000, seed: int = 0) -> tuple[float, float]:
    low, high = interval(resampled_sums(values[:, None], samples=samples, seed=seed)[:, 0] / len(values), len(values))
    assert low is not None
    assert high is not None
    return low, high


def test_the_resamples_are_numpys_own() -> None:
    values = np.array([[0.5, 1.0], [0.25, -2.0], [1.0, 0.0]])
    generator = np.random.RandomState(7)
    expected = [values[generator.randint(3, size=3)].sum(0) for _ in range(50)]
    assert resampled_sums(values, samples=50, seed=7) == pytest.approx(np.array(expected))


def test_the_stream_is_frozen() -> None:
    """Published intervals can be computed again: the legacy generator with seed 0 draws 4 0 3 3 3, then 1 3 2 4 0."""
    drawn = resampled_sums(np.eye(5, dtype=np.int64), samples=2).astype(int)
    assert drawn.tolist() == [[1, 0, 0, 3, 1], [1, 1, 1, 1, 1]]


@pytest.mark.parametrize(("problems", "rate"), [(30, 0.5), (100, 0.2), (400, 0.9)])
def test_an_interval_of_a_share_is_that_of_the_binomial(problems: int, rate: float) -> None:
    hits = np.zeros(problems)
    hits[: round(problems * rate)] = 1.0
    # The resampled mean is Binomial(P, rate) / P: its percentiles, from exact integers.
    cumulative = np.cumsum([math.comb(problems, k) * rate**k * (1 - rate) ** (problems - k) for k in range(problems)])
    expected = [np.searchsorted(cumulative, share) / problems for share in (0.025, 0.975)]
    assert of_mean(hits) == pytest.approx(expected, abs=1.01 / problems)


def test_an_interval_of_a_mean_is_the_normal_one_where_there_are_many_problems() -> None:
    averages = np.random.RandomState(3).binomial(16, np.random.RandomState(4).beta(0.5, 1.5, size=500)) / 16
    error = averages.std(ddof=1) / math.sqrt(500)
    assert of_mean(averages) == pytest.approx(
        (averages.mean() - 1.96 * error, averages.mean() + 1.96 * error), abs=0.15 * error
    )


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    """Problems of different difficulty, 8 samples each; over all problems there might be, the mean is 1/4."""
    generator = np.random.RandomState(11)
    covered = 0
    for _ in range(300):
        averages = generator.binomial(8, generator.beta(0.5, 1.5, size=60)) / 8
        low, high = of_mean(averages, samples=300)
        covered += low <= 0.25 <= high
    assert 0.90 <= covered / 300 <= 0.98


def test_samples_of_one_problem_do_not_count_as_problems() -> None:
    """Ten problems, each with 100 samples that agree: the interval is that of ten, not of a thousand."""
    low, high = of_mean(np.array([0.0] * 5 + [1.0] * 5))
    assert high - low > 0.5


def test_no_interval_where_it_would_say_nothing() -> None:
    values = np.linspace(0, 1, 101)
    assert interval(values, LEAST_CLUSTERS - 1) == (None, None)
    assert interval(values, LEAST_CLUSTERS) == pytest.approx((0.025, 0.975))
    assert interval(np.append(values, [math.nan] * 10), LEAST_CLUSTERS) == (None, None)
    assert estimate(math.nan, values, 50) == Estimate(None, None, None)
    assert estimate(0.5, values, 50).value == 0.5
