"""route_top_k against float64: values, gradients, the choice among equals and non-numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

from tests.ops.routing.oracle import NORMALIZE, check, draw, gradients, ours, plain
from tjk.ops import route_top_k
from tjk.ops.routing import reference

SHAPES = [
    (7, 1, 1),
    (1, 5, 2),
    (7, 8, 8),
    (130, 33, 2),
    (7, 64, 64),
    (130, 256, 1),
    (0, 5, 2),
]


@pytest.mark.parametrize(("M", "E", "k"), SHAPES)
def test_shapes(implementation, M, E, k):
    check(*draw(M, E, k, "float32"), k, implementation)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("M", "E", "k"), [(130, 8, 2), (7, 256, 5)])
def test_dtypes(implementation, M, E, k, dtype):
    """In half precision many logits are equal, too."""
    check(*draw(M, E, k, dtype), k, implementation)


def test_large_logits(implementation):
    """Most weights underflow."""
    logits, d_weights = draw(7, 8, 8, "float32")
    check(100 * logits, d_weights, 8, implementation)


INF, NAN = np.inf, np.nan
ROWS = {
    "all equal": ([2, 2, 2, 2, 2], [0, 1, 2, 3, 4]),
    "pairs": ([1, 3, 1, 3, 2], [1, 3, 4, 0, 2]),
    "zeros of both signs": ([-0.0, 0.0, -0.0, 0.0, -1], [0, 1, 2, 3, 4]),
    "-0.0 below all": ([3, -0.0, 1, 0.0, 2], [0, 4, 2, 1, 3]),
    "-inf": ([-INF, 1, -INF, 2, -INF], [3, 1, 0, 2, 4]),
    "nothing but -inf": ([-INF] * 5, [0, 1, 2, 3, 4]),
    "inf": ([0, INF, -INF, 5, INF], [1, 4, 3, 0, 2]),
    "largest finite": ([-3e38, 3e38, -INF, INF, 0], [3, 1, 4, 0, 2]),
    "NaN": ([0, NAN, INF, NAN, -INF], [1, 3, 2, 0, 4]),
    "NaN of either sign": ([NAN, 1, -NAN, 2, NAN], [0, 2, 4, 3, 1]),
    "nothing but NaN": ([-NAN, NAN, -NAN, NAN, NAN], [0, 1, 2, 3, 4]),
    "below the least normal": ([-1e-40, 0.0, 3e-40, 1e-40, -3e-40], [2, 3, 1, 0, 4]),
}
LOGITS = np.array([logits for logits, _ in ROWS.values()], np.float32)
ORDER = np.array([order for _, order in ROWS.values()])


@functools.cache
def routed(dtype, k, implementation):
    """Experts (rows, k) of `ROWS`, the same for both kinds of normalization."""
    route = jax.jit(ours(implementation), static_argnums=(1, 2))
    experts = [route(jnp.asarray(LOGITS, dtype), k, normalize)[1] for normalize in NORMALIZE]
    np.testing.assert_array_equal(*experts)
    return np.asarray(experts[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("k", [1, 3, 5])
@pytest.mark.parametrize("row", range(len(ROWS)), ids=ROWS)
def test_order(implementation, row, k, dtype):
    assert routed(dtype, k, implementation)[row].tolist() == ORDER[row, :k].tolist()


def test_order_in_float16(implementation):
    """Where the largest finite numbers are infinite, and the smallest are 0."""
    rows = np.array([not ("finite" in name or "normal" in name) for name in ROWS])
    with np.errstate(over="ignore"):
        experts = routed("float16", 5, implementation)
    np.testing.assert_array_equal(experts[rows], ORDER[rows])


@pytest.mark.parametrize("k", [2, 5])
def test_what_is_not_a_number_stays_so(implementation, k):
    """Weights and gradients are NaN where, and only where, those of plain JAX are."""
    rows = np.array(["normal" not in name for name in ROWS])  # plain JAX takes those for equal
    logits, d_weights = jnp.asarray(LOGITS[rows]), jnp.asarray(draw(rows.sum(), 5, k, "float32")[1])
    actual = gradients(ours(implementation), logits, d_weights, k)
    for a, b in zip(
        jax.tree.leaves(actual), jax.tree.leaves(gradients(plain, logits, d_weights, k))
    ):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_float64():
    with jax.enable_x64(True):
        logits, d_weights = draw(7, 6, 3, "float64")
        logits = logits.at[0].set(jnp.array([1.0, 1 + 1e-12, -0.0, 0.0, -jnp.inf, jnp.nan]))
        actual = gradients(ours("xla"), logits, d_weights, 3)
        expected = gradients(plain, logits, d_weights, 3)
        assert actual[0][0].dtype == actual[0][1].dtype == jnp.float64
        for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected)):
            np.testing.assert_allclose(a, b, rtol=1e-13, atol=1e-13)


def test_double_precision_mode_changes_nothing(implementation):
    logits, d_weights = draw(7, 8, 3, "bfloat16")
    expected = gradients(ours(implementation), logits, jnp.float32(d_weights), 3)
    with jax.enable_x64(True):
        actual = gradients(ours(implementation), logits, jnp.asarray(d_weights), 3)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected)):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_more_experts_than_the_kernel_takes():
    logits, d_weights = draw(3, 1500, 4, "float32")
    check(logits, d_weights, 4, None)


def test_two_runs_give_the_same_bits(implementation):
    logits, d_weights = draw(130, 8, 2, "float32")
    runs = [gradients(ours(implementation), logits, jnp.float32(d_weights), 2) for _ in range(2)]
    for a, b in zip(*map(jax.tree.leaves, runs)):
        np.testing.assert_array_equal(a, b)


FEW = st.sampled_from([-INF, -2.0, -0.0, 0.0, 1.5, INF, NAN])  # so that many are equal


@settings(max_examples=10, deadline=None, derandomize=True, phases=[Phase.generate])
@given(st.lists(st.lists(FEW, min_size=9, max_size=9), min_size=4, max_size=4))
def test_random_order(implementation, logits):
    """k different experts, as a stable descending sort has them."""
    logits = np.array(logits, np.float32)
    _, experts = jax.jit(ours(implementation), static_argnums=(1, 2))(logits, 6, "selected")
    for row, chosen in zip(logits, experts):
        expected = sorted(range(9), key=lambda e, row=row: -INF if row[e] != row[e] else -row[e])
        nan = [e for e in range(9) if row[e] != row[e]]  # before inf, which has the same key
        assert chosen.tolist() == [*nan, *(e for e in expected if e not in nan)][:6]


def test_the_reference_itself():
    """Against NumPy, and its derivative against finite differences."""
    with jax.enable_x64(True):
        logits, _ = draw(5, 7, 3, "float64")
        for normalize in NORMALIZE:
            weights, experts = reference.route_top_k(logits, 3, normalize=normalize)
            order = np.argsort(-np.asarray(logits), axis=1)[:, :3]
            shares = np.exp(logits)
            chosen = np.take_along_axis(shares, order, axis=1)
            total = (chosen if normalize == "selected" else shares).sum(1, keepdims=True)
            np.testing.assert_array_equal(experts, order)
            np.testing.assert_allclose(weights, chosen / total, rtol=1e-14)
            route = jax.jit(lambda x, n=normalize: reference.route_top_k(x, 3, normalize=n)[0])
            check_grads(route, (logits,), order=1, modes=["rev"])


def test_example():
    weights, experts = route_top_k(jnp.array([[0.0, 2.0, 2.0]]), 2)
    assert experts.tolist() == [[1, 2]]
    assert weights.tolist() == [[0.5, 0.5]]
