"""Long sequences, decays near 0 and near 1, steps of 100."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ops.ssd.oracle import Problem, cast, check, compiled, definition, inputs
from tjk.ops.ssd import ssd_scan


def _mixed_steps(problem, rng):
    """Steps from 1e-4 to 100, any after any: decays from 1 to 0 with A = -100."""
    shape = problem.B, problem.L, problem.H
    return 10.0 ** rng.uniform(-4, 2, shape)


@pytest.mark.parametrize("A", [-100.0, -0.5])
def test_large_steps_beside_small_ones(implementation, A):
    """A sum of logarithms in float32 alone would be wrong by 1e-3 where it reaches 1e4."""
    problem = Problem(L=60, z=False, bias=False, softplus=False, chunk=64)
    arrays = inputs(problem) | {"A": np.full(problem.H, A)}
    arrays["dt"] = _mixed_steps(problem, np.random.default_rng(1))
    # A log of 10 is rounded by 5e-7 itself, and so much its exponential.
    check(problem, "float32", implementation, arrays=arrays, inherent=1e-6)


def test_one_step_that_wipes_everything_out(implementation):
    """What follows it is exactly what follows a restart: no digit is lost to a log of -1e4."""
    problem = Problem(L=60, state=False, z=False, bias=False, softplus=False, chunk=64)
    arrays = inputs(problem) | {"A": np.array([-100.0, -90.0])}
    arrays["dt"] = np.full((1, 60, 2), 1e-4)
    arrays["dt"][:, 20] = 100.0
    operands = cast(arrays, "float32")
    results = compiled(problem, implementation)(operands)
    exact, _ = definition(operands, **problem.flags())
    for name, value in results.items():
        error = np.abs(value - exact[name]) / np.abs(exact[name]).max()
        assert error.max() < 2e-6, name
    # Before the wipe-out, where steps are small, gradients are of their own size.
    np.testing.assert_allclose(results["d_dt"][:, :20], exact["d_dt"][:, :20], rtol=1e-3)


@pytest.mark.parametrize("value", [1e-8, 100.0])
def test_decays_of_one_and_of_zero(implementation, value):
    problem = Problem(L=40, bias=False, softplus=False, chunk=32)
    arrays = inputs(problem) | {"A": np.full(problem.H, -100.0)}
    arrays["dt"] = np.full((1, 40, 2), value)
    check(problem, "float32", implementation, arrays=arrays)


@functools.cache
def _long(implementation):
    def run(x, dt, A, B, C, d_y):
        scan = functools.partial(ssd_scan, implementation=implementation)
        y, vjp = jax.vjp(scan, x, dt, A, B, C)
        return y, *vjp(d_y)

    return jax.jit(run)


@pytest.mark.parametrize("kind", ["near 0", "near 1", "mixed"])
def test_65536_tokens(kind):
    rng = np.random.default_rng(0)
    L = 65536
    dt = {
        "near 0": np.full((1, L, 1), 100.0),
        "near 1": np.full((1, L, 1), 1e-7),
        "mixed": 10.0 ** rng.uniform(-7, 2, (1, L, 1)),
    }[kind]
    x, B, C, d_y = (rng.standard_normal((1, L, 1, 4)) for _ in range(4))
    operands = (jnp.asarray(a, jnp.float32) for a in (x, dt, np.full(1, -50.0), B, C, d_y))
    y, *gradients = _long("xla")(*operands)
    assert all(np.isfinite(a).all() for a in (y, *gradients))
    h = np.zeros((4, 4))
    expected = np.empty((L, 4))
    for t in range(L):
        h = np.exp(-50.0 * dt[0, t, 0]) * h + dt[0, t, 0] * np.outer(x[0, t, 0], B[0, t, 0])
        expected[t] = h @ C[0, t, 0]
    np.testing.assert_allclose(y[0, :, 0], expected, rtol=0, atol=2e-5 * np.abs(expected).max())
