"""Values and gradients of selective_scan against float64, for every implementation.

Few shapes and options, for each costs the compilation of three programs.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.numerics import assert_within_budget
from tests.ops.selective.oracle import (
    FLAGS,
    Problem,
    cast,
    check,
    compiled,
    everything,
    segment_ids,
)
from tjk.ops.selective import reference, selective_scan, triton, xla


@pytest.fixture
def short_chunks(monkeypatch):
    """Chunks of 16 steps, so that few steps make several chunks, and parts of time."""
    compiled.cache_clear()
    for module in (triton, xla):
        monkeypatch.setattr(module, "SPACING", 16)
    monkeypatch.setattr(triton, "_OUTER", 2)
    yield
    compiled.cache_clear()


@pytest.mark.parametrize(
    ("L", "dtype"),
    [
        *[(L, "float32") for L in (1, 7, 64, 65, 1000)],
        *[(7, "bfloat16"), (65, "bfloat16"), (7, "float16")],
    ],
)
def test_lengths(implementation, L, dtype):
    if implementation == "triton" and L == 1000:
        pytest.skip("too long for the interpreter; test_chunks has several chunks")
    check(everything(L=L), dtype, implementation)


@pytest.mark.parametrize(("L", "flags"), [(33, FLAGS), (48, ())])
def test_chunks(implementation, L, flags, short_chunks):
    check(Problem(L=L, **dict.fromkeys(flags, True)), "float32", implementation)


def test_one_program_for_all_channels(monkeypatch):
    """On a small card a program adds up the gradients of B and C block by block of channels."""
    monkeypatch.setattr(triton.executors, "multiprocessors", lambda: 1)
    compiled.cache_clear()
    check(Problem(L=3, D=18), "float32", "triton")
    compiled.cache_clear()


def test_shipped_chunks(implementation):
    check(Problem(L=260, D=2, R=1), "float32", implementation)


@pytest.mark.parametrize("row", range(8))
def test_pairs_of_flags(implementation, row):
    """An orthogonal array: in eight rows each pair of flags takes all four values."""
    flags = {flag: bool((row & (i + 1)).bit_count() % 2) for i, flag in enumerate(FLAGS)}
    check(Problem(B=2, **flags), "float32", implementation)


@pytest.mark.parametrize(("D", "R"), [(1, 1), (18, 5), (2, 17)])
def test_widths(implementation, D, R):
    check(Problem(L=3, D=D, R=R, softplus=True, skip=True), "float32", implementation)


@pytest.mark.parametrize(
    ("R", "dtype"),
    [(64, "float32"), (200, "float32"), (256, "float32"), (16, "bfloat16"), (128, "bfloat16")],
)
def test_many_states(implementation, R, dtype):
    """How a thread's states are laid out depends on how many there are: the forward pass alone."""
    problem = Problem(L=9, D=2, R=R)
    arguments = cast(problem, dtype)
    names = ("x", "delta", "A", "B", "C")
    inputs = [arguments[name] for name in names]
    y = selective_scan(*inputs, implementation=implementation)
    plain, _ = reference.selective_scan(*inputs)
    with jax.enable_x64(True):
        wide = (jnp.asarray(np.asarray(x), "float64") for x in inputs)
        exact = np.asarray(reference.selective_scan(*wide)[0])
    assert_within_budget("y", y, exact, plain)


def test_narrow_parameters(implementation):
    """A, D and the bias in x's dtype."""
    check(everything(), "bfloat16", implementation, narrow=True)


def test_wide_step_sizes(implementation):
    """delta in float32 beside bfloat16."""
    problem = everything()
    operands = cast(problem, "bfloat16")
    operands["delta"] = operands["delta"].astype(jnp.float32)
    results = compiled(implementation, **problem.options)(operands, segment_ids(problem))
    expected = compiled(None, **problem.options)(operands, segment_ids(problem))
    assert results["d delta"].dtype == jnp.float32
    for name, value in results.items():
        tolerance = 2 * float(jnp.finfo(value.dtype).eps) + 1e-6
        value, right = np.float32(value), np.float32(expected[name])
        np.testing.assert_allclose(value, right, rtol=0, atol=tolerance * np.abs(right).max())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_runs_give_the_same_bits(implementation, dtype):
    problem = everything()
    run = compiled(implementation, **problem.options)
    operands = cast(problem, dtype), segment_ids(problem)
    first, second = run(*operands), run(*operands)
    for name, value in first.items():
        np.testing.assert_array_equal(np.float32(value), np.float32(second[name]), name)


def test_growing_states(implementation):
    """Positive exponents are legal: nothing clamps them."""
    problem = Problem()
    operands = cast(problem, "float32")
    operands["A"] = -operands["A"]
    actual, expected = (
        compiled(name, **problem.options)(operands, None) for name in (implementation, None)
    )
    for name, value in actual.items():
        if value is not None:
            np.testing.assert_allclose(value, expected[name], rtol=1e-4, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("A", [-1e-6, -1.0, -1e3])
def test_long_sequences_stay_finite(A):
    """Decays near 1 and near 0, delta up to 100."""
    L, D, R = 65536, 2, 1
    draw = np.random.default_rng(0).random
    x, delta, B, C = (jnp.asarray(draw((1, L, n)), jnp.float32) for n in (D, D, R, R))

    @jax.jit
    def run(*operands):
        y, vjp = jax.vjp(lambda *a: selective_scan(*a, implementation="xla"), *operands)
        return y, vjp(jnp.ones_like(y))

    results = run(x, 100 * delta, jnp.full((D, R), A), B, C)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(results))


def test_extreme_step_sizes(implementation):
    """Steps of 0 and 100, softplus of both signs, decays that underflow: finite gradients."""
    problem = everything()
    operands = cast(problem, "float32")
    delta = jnp.asarray([-200.0, -20.0, 0.0, 20.0, 100.0, 100.0, -100.0])
    operands["delta"] = jnp.broadcast_to(delta[:, None], operands["delta"].shape)
    operands["A"] = 100 * operands["A"]
    actual, expected = (
        compiled(name, **problem.options)(operands, None) for name in (implementation, None)
    )
    for name, value in actual.items():
        scale = np.abs(expected[name]).max()
        np.testing.assert_allclose(
            value, expected[name], rtol=1e-5, atol=1e-6 * scale, err_msg=name
        )
