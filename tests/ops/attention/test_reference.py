"""The oracle itself: against loops in NumPy, and its derivative against finite differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from tests.ops.attention.oracle import Shape, inputs
from tjk.ops.attention import reference

SHAPE = Shape(B=2, T=5, S=6, N=4, K=2, H=3, V=2)
OPTIONS = {
    "nothing": {},
    "causal": {"window": (None, 0)},
    "window": {"window": (2, 1)},
    "huge window": {"window": (2**40, 2**40)},
    "beyond all keys": {"window": (-(2**40), None)},
    "lengths": {"query_lengths": [5, 3], "key_lengths": [0, 4]},
    "bias": {"bias": (1, 4, 5, 6)},
    "mask": {"mask": (2, 1, 5, 6)},
    "all": {
        "window": (3, 2),
        "query_lengths": [4, 0],
        "key_lengths": [6, 5],
        "bias": (2, 1, 1, 6),
        "mask": (1, 4, 5, 1),
    },
}


def arguments(window=(None, None), query_lengths=None, key_lengths=None, bias=None, mask=None):
    """What follows query, key and value, as NumPy arrays; bias and mask are given by shape."""
    rng = np.random.default_rng(1)
    return (
        None if bias is None else rng.standard_normal(bias),
        None if mask is None else rng.random(mask) > 0.4,
        None if query_lengths is None else np.array(query_lengths, np.int32),
        None if key_lengths is None else np.array(key_lengths, np.int32),
        window,
    )


def by_loops(query, key, value, bias, mask, query_lengths, key_lengths, window, scale):
    B, T, N, _ = query.shape
    S, K, V = value.shape[1:]
    bias = np.broadcast_to(0 if bias is None else bias, (B, N, T, S))
    mask = np.broadcast_to(True if mask is None else mask, (B, N, T, S))
    query_lengths = [T] * B if query_lengths is None else query_lengths
    key_lengths = [S] * B if key_lengths is None else key_lengths
    left, right = (float("inf") if x is None else x for x in window)
    output, logsumexp = np.zeros((B, T, N, V)), np.full((B, N, T), -np.inf)
    for b, t, n in np.ndindex(B, T, N):
        head = n // (N // K)
        seen = [
            s
            for s in range(key_lengths[b])
            if t - left <= s <= t + right and mask[b, n, t, s] and t < query_lengths[b]
        ]
        if seen:
            logits = np.array([scale * query[b, t, n] @ key[b, s, head] for s in seen])
            weights = np.exp(logits + bias[b, n, t, seen])
            output[b, t, n] = weights @ value[b, seen, head] / weights.sum()
            logsumexp[b, n, t] = np.log(weights.sum())
    return output, logsumexp


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_value(options):
    operands, (*rest, window) = inputs(SHAPE)[:3], arguments(**options)
    expected = by_loops(*operands, *rest, window, scale=0.7)
    with jax.enable_x64(True):
        actual = reference.attention(
            *jax.tree.map(jnp.asarray, (*operands, *rest)), scale=0.7, window=window
        )
        for name, a, e in zip(("output", "logsumexp"), actual, expected):
            np.testing.assert_allclose(a, e, rtol=1e-13, atol=1e-13, err_msg=name)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_derivative(options):
    """Rows that see nothing have an infinite logsumexp, but a derivative: 0."""
    bias, *rest, window = arguments(**options)
    *operands, _, weight = inputs(SHAPE)

    def finite(query, key, value, bias):
        output, logsumexp = reference.attention(
            query, key, value, bias, *rest, scale=0.7, window=window
        )
        return output, jnp.where(logsumexp == -jnp.inf, 0, logsumexp) * weight.swapaxes(1, 2)

    with jax.enable_x64(True):
        rest = jax.tree.map(jnp.asarray, rest)
        operands = jax.tree.map(jnp.asarray, (*operands, bias))
        check_grads(jax.jit(finite), operands, order=1, modes=["rev"], rtol=1e-6, atol=1e-6)
