"""Values and gradients of selective_scan against float64, for every implementation."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.ops.selective.oracle import Problem, cast, check, compiled, everything, segment_ids
from tjk.ops.selective import triton, xla

FLAGS = ("skip", "gate", "bias", "softplus", "state", "segments", "reverse")


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
        *[(7, "bfloat16"), (65, "bfloat16"), (7, "float16"), (64, "float16")],
    ],
)
def test_lengths(implementation, L, dtype):
    if implementation == "triton" and L == 1000:
        pytest.skip("too long for the interpreter; test_chunks has several chunks")
    check(everything(B=1, L=L, D=3, R=2), dtype, implementation)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_plain(implementation, dtype):
    check(Problem(), dtype, implementation)


@pytest.mark.parametrize(("L", "flags"), [(33, FLAGS), (48, FLAGS), (48, ())])
def test_chunks(implementation, L, flags, short_chunks):
    problem = Problem(B=1, L=L, D=3, R=2, **dict.fromkeys(flags, True))
    check(problem, "float32", implementation)


def test_shipped_chunks(implementation):
    check(Problem(B=1, L=260, D=2, R=1, softplus=True), "float32", implementation)


@pytest.mark.parametrize(
    ("D", "R"), [(1, 1), (3, 2), (33, 4), (130, 5), (2, 16), (9, 33), (5, 128), (4, 256), (5, 200)]
)
def test_widths(implementation, D, R):
    check(Problem(B=1, L=4, D=D, R=R, softplus=True, skip=True), "float32", implementation)


@pytest.mark.parametrize("R", [16, 128])
def test_widths_in_16_bits(implementation, R):
    check(Problem(B=1, L=4, D=9, R=R, softplus=True, gate=True), "bfloat16", implementation)


@pytest.mark.parametrize("row", range(8))
def test_pairs_of_flags(implementation, row):
    """An orthogonal array: in eight rows each pair of flags takes all four values."""
    flags = {flag: bool((row & (i + 1)).bit_count() % 2) for i, flag in enumerate(FLAGS)}
    check(Problem(B=1, L=7, D=3, R=2, **flags), "float32", implementation)


def test_narrow_parameters(implementation):
    """A, D and the bias in x's dtype; delta in float32 beside bfloat16."""
    problem = everything(L=9)
    check(problem, "bfloat16", implementation, narrow=True)
    operands = cast(problem, "bfloat16")
    operands["delta"] = operands["delta"].astype(jnp.float32)
    results = compiled(implementation, **problem.options)(operands, segment_ids(problem))
    expected = compiled(None, **problem.options)(operands, segment_ids(problem))
    assert results["d delta"].dtype == jnp.float32
    for name, value in results.items():
        scale = np.abs(np.float32(expected[name])).max()
        tolerance = 2 * float(jnp.finfo(value.dtype).eps) * scale
        np.testing.assert_allclose(
            np.float32(value), np.float32(expected[name]), rtol=0, atol=max(tolerance, 1e-6 * scale)
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_runs_give_the_same_bits(implementation, dtype):
    problem = everything(L=18)
    run = compiled(implementation, **problem.options)
    operands = cast(problem, dtype), segment_ids(problem)
    first, second = run(*operands), run(*operands)
    for name, value in first.items():
        np.testing.assert_array_equal(np.float32(value), np.float32(second[name]), name)


@settings(max_examples=4, deadline=None, derandomize=True, phases=[Phase.generate])
@given(st.data())
def test_random_problems(implementation, data):
    flags = {flag: data.draw(st.booleans()) for flag in FLAGS}
    problem = Problem(
        B=data.draw(st.integers(1, 3)),
        L=data.draw(st.sampled_from([1, 2, 5, 8, 17])),
        D=data.draw(st.sampled_from([1, 2, 7, 16])),
        R=data.draw(st.sampled_from([1, 2, 5, 8])),
        **flags,
    )
    check(problem, "float32", implementation, seed=data.draw(st.integers(0, 9)))
