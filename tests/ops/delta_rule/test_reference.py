"""The reference against a loop in NumPy, and its derivative against differences."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from tests.ops.delta_rule.oracle import Shape, inputs, segments
from tjk.ops.delta_rule import reference

SHAPE = Shape(B=2, L=7, H=2, K=3, V=4)


def _loop(q, k, v, g, beta, state, ids, *, scale, l2_normalize, reverse):
    """S_t = exp(g_t) S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T,  o_t = scale S_t q_t."""
    if l2_normalize:
        q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    B, L, H, K = q.shape
    o, last = np.zeros(v.shape), np.zeros(state.shape)
    for b in range(B):
        for h in range(H):
            S, previous = state[b, h].T, None
            for t in range(L)[:: -1 if reverse else 1]:
                if previous is not None and ids[b, t] != previous:
                    S = np.zeros_like(S)
                previous = ids[b, t]
                key = k[b, t, h][:, None]
                S = np.exp(g[b, t, h]) * S @ (np.eye(K) - beta[b, t, h] * key @ key.T)
                S += beta[b, t, h] * v[b, t, h][:, None] @ key.T
                o[b, t, h] = scale * S @ q[b, t, h]
            last[b, h] = S.T
    return o, last


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("l2_normalize", [False, True])
def test_against_numpy(l2_normalize, reverse):
    operands = inputs(SHAPE)[:6]
    ids = segments(SHAPE, (2, 5))
    options = {"scale": 0.3, "l2_normalize": l2_normalize, "reverse": reverse}
    expected = _loop(*operands, ids, **options)
    with jax.enable_x64(True):
        actual = reference.gated_delta_rule(*map(jnp.asarray, operands), ids, **options)
        for a, b in zip(actual, expected):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


def test_derivative():
    with jax.enable_x64(True):
        operands = [jnp.asarray(x) for x in inputs(SHAPE)[:6]]
        rule = functools.partial(reference.gated_delta_rule, l2_normalize=True)
        check_grads(jax.jit(rule), operands, order=1, modes=["rev"])
