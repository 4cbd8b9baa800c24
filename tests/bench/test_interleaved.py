"""Functions timed in turns, and the programs that time single operations so."""

import jax.numpy as jnp
import numpy as np
import pytest

from bench import attention_cpu, interleaved, moe_cpu
from tjk.nn import moe


def test_median_of_calls_that_take_turns(monkeypatch):
    """Each reading of the clock is 1 s after the one before, and a call of `slow` adds 4 s."""
    seconds, called = [0], []

    def clock():
        seconds[0] += 1
        return seconds[0]

    def quick(x):
        called.append("quick")
        return x

    def slow(x):
        called.append("slow")
        seconds[0] += 4 if len(called) > 2 else 1000  # compiles at first
        return x

    monkeypatch.setattr(interleaved.time, "perf_counter", clock)
    medians = interleaved.median_milliseconds([quick, slow], (jnp.ones(()),), samples=3)
    assert medians == [1000, 5000]
    assert called == ["quick", "slow"] * 4


def test_gradient_is_that_of_the_sum_of_squares():
    x, y = jnp.asarray([1.0, 2.0]), jnp.asarray([3.0, 4.0])
    gradients = interleaved.gradient(lambda x, y: x * y, range(2))(x, y)
    np.testing.assert_allclose(gradients, [2 * x * y**2, 2 * x**2 * y])


def test_expert_layer_beside_the_baselines():
    config = moe.Config(d_model=8, d_hidden=16, experts=4)
    rows = moe_cpu.compare(config, 16, "float32", samples=1)
    assert [row[:2] for row in rows] == [["float32", "forward"], ["float32", "gradient"]]
    for _, _, ours, blocked, ragged_dot, *ratios in rows:
        assert min(ours, blocked, ragged_dot) > 0
        assert ratios == pytest.approx([ours / blocked, ours / ragged_dot])


def test_attention_beside_jaxs_own():
    rows = attention_cpu.compare("float32", True, 8, samples=1)
    assert [row[:4] for row in rows] == [
        ["float32", True, 8, "forward"],
        ["float32", True, 8, "gradient"],
    ]
    for *_, ours, theirs, ratio in rows:
        assert ratio == pytest.approx(ours / theirs)
