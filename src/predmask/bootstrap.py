"""Intervals by resampling whole clusters: answers to one problem, or tokens of one seed, are not independent."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

SAMPLES = 4000
LEVEL = 0.95
LEAST_CLUSTERS = 10
"""Of fewer, resampling shows too few different samples to be an interval."""


class Estimate(NamedTuple):
    """A figure with its percentile interval (see `interval`); None where there is nothing that it is a figure of."""

    value: float | None
    low: float | None
    high: float | None


def resampled_sums(
    values: NDArray[np.int64] | NDArray[np.float64], *, samples: int = SAMPLES, seed: int = 0
) -> NDArray[np.float64]:
    """[samples, X] sums of the rows of `values` [C, X] over C clusters that are drawn with replacement.

    All columns of a sample share their clusters, so that figures formed from them are paired (Efron and Tibshirani,
    "An Introduction to the Bootstrap", 1993). The same arguments give the same numbers.
    """
    # NumPy's legacy generator: its stream is frozen, so that published intervals can be computed again.
    generator = np.random.RandomState(seed)
    clusters = len(values)
    sums = np.empty((samples, values.shape[1]))
    for sample in sums:
        drawn = np.bincount(generator.randint(clusters, size=clusters), minlength=clusters)
        sample[:] = drawn @ values
    return sums


def interval(values: NDArray[np.float64], clusters: int) -> tuple[float, float] | tuple[None, None]:
    """The percentile interval at `LEVEL` of resampled values [samples], NaN where a sample has nothing of the figure.

    None with fewer than `LEAST_CLUSTERS` clusters, and where so few of them count that many samples have nothing.
    """
    known = values[~np.isnan(values)]
    if clusters < LEAST_CLUSTERS or len(known) < LEVEL * len(values):
        return None, None
    low, high = np.percentile(known, [50 * (1 - LEVEL), 50 * (1 + LEVEL)])
    return float(low), float(high)


def estimate(value: float, values: NDArray[np.float64], clusters: int) -> Estimate:
    """A figure (NaN where there is nothing) with the interval of its resampled values."""
    return Estimate(None, None, None) if math.isnan(value) else Estimate(float(value), *interval(values, clusters))
