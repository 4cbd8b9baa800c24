"""Where segments start, against a count by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from tjk.segments import resets, runs

IDS = np.int32([[5, 5, 7, 7, 5, 5], [1, 2, 3, 3, 3, 3], [0, 0, 0, 0, 0, 0]])


def test_runs_count_the_changes_in_the_order_of_the_scan():
    forward = [[0, 0, 1, 1, 2, 2], [0, 1, 2, 2, 2, 2], [0] * 6]
    backward = [[2, 2, 1, 1, 0, 0], [2, 1, 0, 0, 0, 0], [0] * 6]
    for reverse, expected in ((False, forward), (True, backward)):
        np.testing.assert_array_equal(runs("op", IDS, IDS.shape, reverse), expected)
    assert runs("op", IDS, IDS.shape, False).dtype == jnp.int32


def test_resets_stand_at_the_first_position_of_a_segment():
    np.testing.assert_array_equal(resets(IDS, False)[0], [False, False, True, False, True, False])
    np.testing.assert_array_equal(resets(IDS, True)[0], [False, True, False, True, False, False])


def test_one_position_and_none():
    assert runs("op", IDS[:, :1], (3, 1), True).tolist() == [[0], [0], [0]]
    assert runs("op", IDS[:, :0], (3, 0), False).shape == (3, 0)
    assert runs("op", None, (3, 6), False) is None


def test_bad_segment_ids():
    with pytest.raises(TypeError, match="op: segment_ids must be integers, got float32"):
        runs("op", np.float32(IDS), IDS.shape, False)
    with pytest.raises(ValueError, match=r"op: segment_ids must have shape \(B, L\) with B=3, L=5"):
        runs("op", IDS, (3, 5), False)
