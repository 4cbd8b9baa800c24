"""Values and gradients of group_norm against float64, for every implementation."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.numerics import assert_within_budget
from tjk import executors
from tjk.ops import group_norm
from tjk.ops.normalization import reference
from tjk.ops.normalization.triton import tile_of

NAMES = ("y", "d_x", "d_scale", "d_bias")


@dataclasses.dataclass(frozen=True)
class Problem:
    """Sizes and flags of one call."""

    shape: tuple[int, ...] = (2, 5, 7, 12)
    groups: int = 3
    activation: str | None = "silu"
    mean: float = 0.0
    epsilon: float = 1e-5

    @property
    def options(self):
        return {"groups": self.groups, "epsilon": self.epsilon, "activation": self.activation}


@functools.cache
def inputs(p):
    """x, scale, bias and the cotangent in float64, numbers that bfloat16 has."""
    rng = np.random.default_rng(0)
    shapes = (p.shape, p.shape[-1:], p.shape[-1:], p.shape)
    drawn = [jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in shapes]
    x, *others = (np.float64(a) for a in drawn)
    return x + p.mean, *others


@functools.partial(jax.jit, static_argnums=(0, 1))
def _results(p, implementation, x, scale, bias, cotangent):
    def call(x, scale, bias):
        if implementation is None:
            return reference.group_norm(x, scale, bias, **p.options)
        return group_norm(x, scale, bias, implementation=implementation, **p.options)

    y, vjp = jax.vjp(call, x, scale, bias)
    return y, *vjp(cotangent)


def results(p, implementation, dtype, weights="float32"):
    exact = dtype == "float64"
    dtypes = (dtype, *(("float64",) * 2 if exact else (weights,) * 2), dtype)
    with jax.enable_x64(exact):
        arguments = [jnp.asarray(a, d) for a, d in zip(inputs(p), dtypes)]
        return [np.asarray(a) for a in _results(p, implementation, *arguments)]


def check(p, dtype, implementation, weights="float32"):
    """Fails unless output and gradients are within the budget."""
    actual = results(p, implementation, dtype, weights)
    exact, plain = results(p, None, "float64"), results(p, None, dtype, weights)
    for name, *values in zip(NAMES, actual, exact, plain, strict=True):
        # Sums over positions: each way of computing adds them up in an order of its own.
        inherent = 1e-6 * np.abs(values[1]).max() if name in ("d_scale", "d_bias") else 0.0
        assert_within_budget(name, *values, inherent=inherent)


def test_reference_is_the_formula():
    p = Problem((2, 3, 2, 6), groups=2, epsilon=0.1)
    x, scale, bias, _ = inputs(p)
    with jax.enable_x64(True):
        y = np.asarray(reference.group_norm(*map(jnp.asarray, (x, scale, bias)), **p.options))
    for b in range(2):
        for channels in (slice(0, 3), slice(3, 6)):
            group = x[b, ..., channels]
            z = (group - group.mean()) / np.sqrt(group.var() + 0.1)
            z = z * scale[channels] + bias[channels]
            np.testing.assert_allclose(y[b, ..., channels], z / (1 + np.exp(-z)), rtol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_dtypes(implementation, dtype, activation):
    check(Problem(activation=activation), dtype, implementation)


def test_weights_of_the_activations_dtype(implementation):
    check(Problem(), "bfloat16", implementation, weights="bfloat16")


# One row; a whole slab in a program; parts; groups of odd width, wider than a tile's lanes, of one
# channel; and all channels in one.
SHAPES = {
    (3, 8): (1, 2, 8),
    (1, 1, 33): (1, 3, 11, 33),
    (2, 600, 32): (4, 32),
    (1, 40, 33, 6): (1, 2, 3, 6),
    (1, 3, 5, 4, 48): (3, 16),
    (1, 5, 1300): (1, 2),
}


@pytest.mark.parametrize(("shape", "groups"), [(s, g) for s, of_s in SHAPES.items() for g in of_s])
def test_shapes(implementation, shape, groups):
    check(Problem(shape, groups), "float32", implementation)


@settings(max_examples=8, deadline=None, derandomize=True, phases=[Phase.generate])
@given(
    st.lists(st.integers(1, 9), max_size=3),
    st.sampled_from([1, 2, 3, 5]),
    st.integers(1, 7),
    st.sampled_from(["float32", "bfloat16"]),
)
def test_any_shape(implementation, spatial, groups, width, dtype):
    check(Problem((2, *spatial, groups * width), groups), dtype, implementation)


@pytest.mark.parametrize(("shape", "groups"), [((2, 2503, 8), 2), ((2, 5003, 12), 4)])
def test_parts_of_several_tiles(monkeypatch, shape, groups):
    """As where there are many more positions than multiprocessors; the last tile is not full."""
    monkeypatch.setattr(executors, "multiprocessors", lambda: 1)
    tile = tile_of(shape, groups, 4, 1, 1)
    assert tile.length >= 2 * tile.block_s
    assert tile.parts > 1
    assert shape[1] % tile.length % tile.block_s
    check(Problem(shape, groups), "float32", "triton")


@pytest.mark.parametrize("shape", [(1, 40, 8), (1, 2500, 8)])
@pytest.mark.parametrize("mean", [1024.0, -8192.0])
def test_mean_far_from_zero_takes_no_digits(implementation, shape, mean):
    """x is exact in float32, so the reference's error is that of its mean alone: a rounding."""
    p = Problem(shape, groups=2, mean=mean, activation=None)
    actual, exact = results(p, implementation, "float32"), results(p, None, "float64")
    rounding = 2.0**-23 * abs(mean)
    for name, value, right in zip(NAMES, actual, exact):
        assert np.abs(value - right).max() < 2 * rounding * max(1, np.abs(right).max()), name


@pytest.mark.parametrize("shape", [(1, 6, 8), (1, 2500, 8)])
def test_equal_values_are_normalized_to_the_bias(implementation, shape):
    x, bias = jnp.full(shape, 3.7), jnp.arange(8.0)
    y = group_norm(x, jnp.ones(8), bias, groups=2, implementation=implementation)
    if implementation == "triton":
        np.testing.assert_array_equal(y, jnp.broadcast_to(bias, shape))
    # A mean that is off by one in its last place is enlarged by 1 / sqrt(epsilon).
    bound = 3.7 * 2.0**-23 / np.sqrt(1e-5)
    np.testing.assert_allclose(y, jnp.broadcast_to(bias, shape), rtol=0, atol=bound)


@pytest.mark.parametrize("shape", [(2, 6, 8), (2, 2500, 8)])
def test_nan_stays_in_its_group(implementation, shape):
    x = jax.random.normal(jax.random.key(0), shape).at[1, 3, 5].set(jnp.nan)

    def call(x):
        return group_norm(x, jnp.ones(8), jnp.zeros(8), groups=2, implementation=implementation)

    y, vjp = jax.vjp(jax.jit(call), x)
    for result in (y, *vjp(jnp.ones(shape))):
        bad = np.isnan(np.asarray(result))
        assert bad[1, :, 4:].all()
        assert not bad[0].any()
        assert not bad[1, :, :4].any()


def test_two_runs_give_the_same_bits(implementation):
    p = Problem((1, 700, 24))
    for one, other in zip(
        results(p, implementation, "float32"), results(p, implementation, "float32")
    ):
        np.testing.assert_array_equal(one, other)
