"""The reference against a loop in NumPy, and its derivatives against finite differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from tests.ops.selective.oracle import Problem, arrays, everything, segment_ids
from tjk.ops.selective import reference


def _loop(a, ids, reverse, softplus):
    """y and the final state of one sequence of `arrays`, from the formula."""
    delta = a["delta"] if a["delta_bias"] is None else a["delta"] + a["delta_bias"]
    if softplus:
        delta = np.log1p(np.exp(delta))
    h = np.zeros(a["A"].shape) if a["initial_state"] is None else a["initial_state"]
    y = np.zeros_like(a["x"])
    order = range(len(y))[::-1] if reverse else range(len(y))
    last = None
    for t in order:
        if ids is not None and last is not None and ids[t] != last:
            h = np.zeros_like(h)
        last = None if ids is None else ids[t]
        u = (delta[t] * a["x"][t])[:, None] * a["B"][t]
        h = np.exp(delta[t][:, None] * a["A"]) * h + u
        y[t] = h @ a["C"][t]
        if a["D"] is not None:
            y[t] += a["D"] * a["x"][t]
        if a["z"] is not None:
            y[t] *= a["z"][t] / (1 + np.exp(-a["z"][t]))
    return y, h


def _arguments(problem):
    rest = {**arrays(problem)}
    del rest["d_y"], rest["d_state"]
    return rest


@pytest.mark.parametrize("problem", [Problem(), everything()], ids=["plain", "everything"])
def test_is_the_formula(problem):
    a, ids = _arguments(problem), segment_ids(problem)
    with jax.enable_x64(True):
        y, state = reference.selective_scan(**a, **problem.options, segment_ids=ids)
    shared = ("A", "D", "delta_bias")
    for b in range(problem.B):
        one = {k: x if x is None or k in shared else x[b] for k, x in a.items()}
        expected = _loop(one, None if ids is None else ids[b], problem.reverse, problem.softplus)
        np.testing.assert_allclose(y[b], expected[0], rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(state[b], expected[1], rtol=1e-12, atol=1e-12)


def test_derivatives():
    problem = everything(L=4, D=2, R=2)
    a, ids = _arguments(problem), segment_ids(problem)
    with jax.enable_x64(True):
        a = jax.tree.map(jnp.asarray, a)
        check_grads(
            lambda a: reference.selective_scan(**a, **problem.options, segment_ids=ids),
            (a,),
            order=1,
            modes=["rev"],
        )
