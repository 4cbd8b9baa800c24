"""The ssm suite's baselines: values and gradients of every scan, both ways, in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.ssm_baselines import CHUNK, SCANS, _solve
from bench.suites.ssm import DEFINITION

B, H, D = 2, 3, 6


def draw(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


def operands(op, L):
    """Float64, in the order of the function's arguments."""
    if op == "linear_scan":
        size, phase = np.linspace(0.5, 0.99, D), np.linspace(0, 1, D)
        return size * np.exp(1j * phase), draw(0, B, L, D) + 1j * draw(1, B, L, D)
    if op == "causal_conv1d":
        return draw(0, B, L, D), draw(1, D, 4), draw(2, D)
    if op == "selective_scan":
        A = -np.abs(draw(2, D, 5))
        x, delta, C, d = draw(0, B, L, D), draw(1, B, L, D), draw(4, B, L, 5), draw(5, D)
        return x, delta, A, draw(3, B, L, 5), C, d
    if op == "ssd_scan":
        x, dt, A = draw(0, B, L, H, 4), draw(1, B, L, H), -np.abs(draw(2, H))
        return x, dt, A, draw(3, B, L, 1, 5), draw(4, B, L, 1, 5), draw(5, H), draw(6, H)
    q, k, v = (draw(seed, B, L, H, width) for seed, width in ((0, 4), (1, 4), (2, 5)))
    return q, k, v, -np.abs(draw(3, B, L, H)), 1 / (1 + np.exp(draw(4, B, L, H)))


def call(scans, op, reverse, *operands):
    if op == "selective_scan":
        return scans.selective_scan(*operands, delta_softplus=True, reverse=reverse)
    if op == "ssd_scan":
        *operands, bias = operands
        return scans.ssd_scan(*operands, dt_bias=bias, dt_softplus=True, reverse=reverse)
    if op == "gated_delta_rule":
        return scans.gated_delta_rule(*operands, l2_normalize=True, reverse=reverse)
    if op == "causal_conv1d":
        return scans.causal_conv1d(*operands, activation="silu", reverse=reverse)
    return scans.linear_scan(*operands, reverse=reverse)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def value_and_gradients(scans, op, reverse, *operands):
    y, vjp = jax.vjp(functools.partial(call, scans, op, reverse), *operands)
    cotangent = jnp.cos(jnp.arange(y.size, dtype=y.real.dtype)).reshape(y.shape)
    return y, *vjp(cotangent.astype(y.dtype))


def results(scans, op, L, reverse):
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, value_and_gradients(scans, op, reverse, *operands(op, L)))


@pytest.mark.parametrize(("L", "reverse"), [(5, True), (CHUNK + 1, False)])
@pytest.mark.parametrize("op", SCANS._fields)
def test_value_and_gradients_are_the_operations(op, reverse, L):
    both = zip(results(SCANS, op, L, reverse), results(DEFINITION, op, L, reverse), strict=True)
    for i, (x, right) in enumerate(both):
        np.testing.assert_allclose(x, right, rtol=1e-9, atol=1e-9 * np.abs(right).max(), err_msg=i)


def test_triangular_systems_are_solved_to_a_few_roundings():
    """The powers of all 64 rows at once lost two digits more."""
    k = draw(0, 64, CHUNK, 16)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    lower, right = np.tril(k @ k.swapaxes(1, 2), -1), draw(1, 64, CHUNK, 3)
    exact = np.linalg.solve(np.eye(CHUNK) + lower, right)
    solved = _solve(jnp.float32(lower), jnp.float32(right))
    assert np.abs(solved - exact).max() < 8 * 2.0**-23 * np.abs(exact).max()
