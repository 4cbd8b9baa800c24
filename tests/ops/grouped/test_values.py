"""Values and gradients of grouped_matmul against float64, for every implementation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.ops.grouped.oracle import NAMES, check, gradients, inputs
from tjk.ops import grouped_matmul

SIZES = {
    "one group": ([70], 70),
    "several": ([30, 0, 41, 29], 100),
    "all in the first": ([90, 0, 0], 90),
    "all in the last": ([0, 0, 90], 90),
    "none": ([0, 0], 20),
    "rows left over": ([10, 0, 20], 67),
    "one row": ([0, 1, 0], 1),
    "one row each": ([1] * 9, 9),
    "whole tiles": ([64, 128, 64], 256),
    "one more and one less": ([65, 63, 1], 129),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("sizes", "M"), SIZES.values(), ids=SIZES)
def test_group_sizes(implementation, sizes, M, dtype):
    check(sizes, dtype, implementation, M=M, K=40, N=24)


@pytest.mark.parametrize(
    ("K", "N"), [(1, 1), (7, 130), (130, 7), (33, 33), (64, 128), (300, 16), (16, 257)]
)
def test_widths(implementation, K, N):
    check([20, 0, 33], "float32", implementation, M=60, K=K, N=N, precision="highest")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_widths_without_a_mask(implementation, dtype):
    """Widths of whole tiles, whose loads have no mask."""
    check([50, 80], dtype, implementation, M=150, K=64, N=128)


def test_many_groups(implementation):
    sizes = np.random.default_rng(0).integers(0, 5, 100)
    check(sizes, "float32", implementation, M=int(sizes.sum()) + 3, K=16, N=16)


def test_many_rows_of_one_group(implementation):
    """So many that the rows of the contraction are shared by several programs."""
    check([1100], "float32", implementation, M=1105, K=16, N=16, precision="highest")


@pytest.mark.parametrize("sizes", [[70, 50], [-5, 40], [100, 2**31 - 1], [2**31 - 1] * 3])
def test_impossible_sizes(implementation, sizes):
    """Rows that do not exist are not touched, and a negative size is 0."""
    lhs, rhs, _ = (jnp.float32(x) for x in inputs(60, 16, 16, len(sizes)))
    call = functools.partial(grouped_matmul, implementation=implementation, precision="highest")
    real = np.diff(np.minimum(np.cumsum([0, *np.maximum(sizes, 0)]), 60))
    np.testing.assert_array_equal(
        call(lhs, rhs, jnp.array(sizes, jnp.int32)), call(lhs, rhs, jnp.array(real, jnp.int32))
    )


def test_rows_behind_the_groups_are_not_used(implementation):
    call = functools.partial(
        grouped_matmul, group_sizes=jnp.array([9, 20], jnp.int32), implementation=implementation
    )
    operands = [jnp.float32(x) for x in inputs(50, 24, 16, 2)]
    lhs, rhs, d_out = operands
    garbage = (lhs.at[29:].set(jnp.nan), rhs, d_out.at[29:].set(jnp.nan))
    clean, dirty = gradients(call, *operands), gradients(call, *garbage)
    for name, a, b in zip(NAMES, clean, dirty):
        np.testing.assert_array_equal(a, b, name)
    assert (clean[0][29:] == 0).all()
    assert (clean[1][29:] == 0).all()


def test_groups_do_not_mix(implementation):
    """NaN in one group's rows and matrix stays there."""
    call = functools.partial(
        grouped_matmul, group_sizes=jnp.array([9, 20, 7], jnp.int32), implementation=implementation
    )
    lhs, rhs, d_out = (jnp.float32(x) for x in inputs(36, 24, 16, 3))
    dirty = (lhs.at[9:29].set(jnp.nan), rhs.at[1].set(jnp.nan), d_out.at[9:29].set(jnp.nan))
    clean = gradients(call, lhs, rhs, d_out)
    for a, b, mine in zip(clean, gradients(call, *dirty), (slice(9, 29), slice(9, 29), 1)):
        np.testing.assert_array_equal(np.delete(a, mine, 0), np.delete(b, mine, 0))
        assert np.isnan(b[mine]).all()


FORMS = {
    "plain": {},
    "wider output": {"preferred_element_type": jnp.float32},
    "highest": {"precision": "highest"},
    "enum": {"precision": jax.lax.Precision.HIGHEST},
}


@pytest.mark.parametrize("options", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_argument_forms_of_ragged_dot(implementation, options, dtype):
    lhs, rhs, _ = (jnp.asarray(x, dtype) for x in inputs(40, 24, 16, 3))
    sizes = np.array([10, 0, 25], np.int32)
    ours = grouped_matmul(lhs, rhs, sizes, implementation=implementation, **options)
    theirs = jax.lax.ragged_dot(lhs, rhs, sizes, **options)
    assert ours.dtype == theirs.dtype
    tolerance = 2e-2 if dtype == "bfloat16" else 1e-5 if "precision" in options else 1e-2
    np.testing.assert_allclose(
        np.float32(ours), np.float32(theirs), rtol=tolerance, atol=5 * tolerance
    )


@pytest.mark.parametrize(("M", "K", "N", "G"), [(0, 4, 3, 2), (5, 0, 3, 2), (5, 4, 0, 2)])
def test_empty(implementation, M, K, N, G):
    sizes = jnp.full(G, M // G, jnp.int32)
    call = functools.partial(grouped_matmul, group_sizes=sizes, implementation=implementation)
    out, d_lhs, d_rhs = gradients(call, jnp.ones((M, K)), jnp.ones((G, K, N)), jnp.ones((M, N)))
    assert (out.shape, d_lhs.shape, d_rhs.shape) == ((M, N), (M, K), (G, K, N))
    assert not out.any()
    assert not d_lhs.any()
    assert not d_rhs.any()


@settings(max_examples=6, deadline=None, derandomize=True, phases=[Phase.generate])
@given(st.lists(st.integers(0, 50), min_size=1, max_size=5), st.integers(0, 40), st.data())
def test_random_problems(implementation, sizes, more, data):
    widths = st.sampled_from([1, 5, 16, 31, 32, 65])
    M = max(1, sum(sizes) + more)
    K, N = data.draw(widths), data.draw(widths)
    check(sizes, "float32", implementation, M=M, K=K, N=N, precision="highest")
