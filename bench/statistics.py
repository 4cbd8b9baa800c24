"""Speedups with their confidence intervals, spreads and geometric means."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import bootstrap

WIDE_SPREAD = 0.1
RESAMPLES = 1000
# The extremes of n samples enclose the median with probability 1 - 2^(1-n). No interval within them
# can do better, and below 6 samples that is less than 95 %.
LEAST_SAMPLES = 6


@dataclass(frozen=True)
class Speedup:
    """median(baseline) / median(ours), and its 95 % confidence interval where there is one."""

    ratio: float
    interval: tuple[float, float] | None


def interval(baseline: Sequence[float], ours: Sequence[float]) -> tuple[float, float] | None:
    """95 % confidence interval of median(baseline) / median(ours); None below 6 samples.

    The percentile bootstrap: of the intervals that scipy has, the one that still encloses the ratio
    when samples are as few as a row's. Samples of equal number belong to the same rounds and are
    drawn together. The seed is fixed, so the same samples give the same interval.
    """
    if min(len(baseline), len(ours)) < LEAST_SAMPLES:
        return None
    result = bootstrap(
        (baseline, ours),
        _ratio_of_medians,
        paired=len(baseline) == len(ours),
        vectorized=True,
        n_resamples=RESAMPLES,
        method="percentile",
        rng=np.random.default_rng(0),
    )
    low, high = result.confidence_interval
    return float(low), float(high)


def spread(q1: float, median: float, q3: float) -> float:
    """The distance of the quartiles in relation to the median."""
    return (q3 - q1) / median


def geometric_mean(values: Iterable[float]) -> float:
    """exp(mean(log(values))); the values are positive and at least one."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def _ratio_of_medians(baseline: np.ndarray, ours: np.ndarray, axis: int) -> np.ndarray:
    return np.median(baseline, axis=axis) / np.median(ours, axis=axis)
