"""The definition itself, against a loop in NumPy and against finite differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from tests.ops.ssd.oracle import Problem, cast, inputs
from tjk.ops.ssd import reference


def _loop(x, dt, A, B, C, D, z, dt_bias, initial_state, segment_ids, reverse):
    y, states = np.zeros_like(x), initial_state.copy()
    L = x.shape[1]
    for b in range(x.shape[0]):
        for h in range(x.shape[2]):
            g = h // (x.shape[2] // B.shape[2])
            state, previous = states[b, h], None
            for t in range(L)[::-1] if reverse else range(L):
                if previous is not None and segment_ids[b, t] != previous:
                    state = np.zeros_like(state)
                previous = segment_ids[b, t]
                step = np.log1p(np.exp(dt[b, t, h] + dt_bias[h]))
                state = np.exp(step * A[h]) * state + step * np.outer(x[b, t, h], B[b, t, g])
                gate = z[b, t, h] / (1 + np.exp(-z[b, t, h]))
                y[b, t, h] = (state @ C[b, t, g] + D[h] * x[b, t, h]) * gate
            states[b, h] = state
    return y, states


@pytest.mark.parametrize("reverse", [False, True])
def test_values(reverse):
    problem = Problem(B=2, L=9, H=4, G=2, segments=True, reverse=reverse)
    arrays = {k: v for k, v in inputs(problem).items() if not k.startswith("d_")}
    expected = _loop(**arrays, reverse=reverse)
    with jax.enable_x64(True):
        actual = reference.ssd_scan(**cast(arrays, "float64"), **problem.flags())
    for a, b in zip(actual, expected):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


def test_gradients():
    problem = Problem(L=4, P=2, R=3, segments=True)
    with jax.enable_x64(True):
        arrays = cast(inputs(problem), "float64")
        ids = arrays["segment_ids"]
        operands = {k: v for k, v in arrays.items() if not k.startswith(("d_", "seg"))}

        def f(operands):
            y, state = reference.ssd_scan(**operands, segment_ids=ids, **problem.flags())
            return jnp.sin(y).sum() + jnp.sin(state).sum()

        check_grads(f, (operands,), order=1, modes=("rev",))
