"""Intervals that hold what they promise, of samples whose true ratio is known."""

import numpy as np
import pytest

from bench.statistics import LEAST_SAMPLES, geometric_mean, interval, spread


def test_interval_encloses_the_true_ratio():
    """Nine rounds, whose common slowness has no part in the ratio; 95 % of 200 are 190."""
    rng = np.random.default_rng(1)
    hits = widths = 0
    for _ in range(200):
        together = rng.lognormal(0.0, 0.3, 9)
        ours, theirs = (rng.lognormal(0.0, 0.05, 9) * together for _ in range(2))
        low, high = interval(3.0 * theirs, ours)
        assert low <= high
        hits += bool(low <= 3.0 and high >= 3.0)
        widths += high - low
    assert hits >= 180
    assert widths / 200 < 1.2  # it would be more than 2 if rounds were not kept together


def test_interval_is_the_same_each_time():
    ours, theirs = np.random.default_rng(2).lognormal(0.0, 0.1, (2, 9))
    assert interval(theirs, ours) == interval(theirs, ours)


def test_interval_of_equal_rounds_has_no_width():
    assert interval([4.0] * 9, [2.0] * 9) == (2.0, 2.0)


def test_samples_of_unequal_number_are_drawn_apart():
    low, high = interval([2.0, 2.0, 2.0, 2.0, 2.0, 4.0], [1.0] * 9)
    assert low == 2.0 <= high <= 4.0


@pytest.mark.parametrize("count", [0, LEAST_SAMPLES - 1])
def test_few_samples_have_no_interval(count):
    assert interval([1.0] * count, [1.0] * 9) is None
    assert interval([1.0] * 9, [1.0] * count) is None


def test_spread_and_geometric_mean():
    assert spread(1.9, 2.0, 2.1) == pytest.approx(0.1)
    assert geometric_mean([2.0, 4.0, 8.0]) == pytest.approx(4.0)
