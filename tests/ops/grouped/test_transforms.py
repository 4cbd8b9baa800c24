"""grouped_matmul under JAX's transformations, and its errors."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ops.grouped.oracle import gradients, inputs
from tjk.ops import grouped_matmul
from tjk.ops.grouped import reference

SIZES = jnp.array([13, 0, 20], jnp.int32)


def operands():
    lhs, rhs, d_out = (jnp.float32(x) for x in inputs(40, 16, 24, 3))
    return lhs, rhs, d_out


@pytest.fixture
def multiply(implementation):
    return functools.partial(grouped_matmul, implementation=implementation, precision="highest")


@pytest.mark.parametrize("axes", [(0, None, None), (None, 0, None), (None, None, 0), (1, 0, 0)])
def test_vmap(multiply, axes):
    lhs, rhs, _ = operands()
    stacked = (
        jnp.stack([lhs, 2 * lhs, -lhs], axis=axes[0] or 0),
        jnp.stack([rhs, rhs + 1, -rhs]),
        jnp.stack([SIZES, SIZES[::-1], jnp.array([0, 40, 0], jnp.int32)]),
    )
    used = [x if axis is not None else y for axis, x, y in zip(axes, stacked, (lhs, rhs, SIZES))]
    out = jax.vmap(multiply, axes)(*used)
    for i in range(3):
        one = [x if a is None else jnp.take(x, i, a) for a, x in zip(axes, used)]
        np.testing.assert_allclose(out[i], multiply(*one), rtol=1e-5, atol=1e-5)


def test_gradient_of_vmap(multiply):
    lhs, rhs, d_out = operands()

    def loss(lhs, rhs):
        out = jax.vmap(multiply, (0, None, None))(jnp.stack([lhs, 2 * lhs]), rhs, SIZES)
        return jnp.sum(out * d_out)

    def expected(lhs, rhs):
        out = reference.grouped_matmul(lhs, rhs, SIZES)
        return jnp.sum(3 * out * d_out)

    for ours, theirs in zip(
        jax.jit(jax.grad(loss, (0, 1)))(lhs, rhs), jax.grad(expected, (0, 1))(lhs, rhs)
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def test_jit_scan_and_remat(multiply):
    lhs, rhs, d_out = operands()
    plain = gradients(functools.partial(multiply, group_sizes=SIZES), lhs, rhs, d_out)

    def scanned(lhs, rhs):
        def step(carry, sizes):
            return carry, jax.checkpoint(multiply)(lhs, rhs, sizes)

        return jax.lax.scan(step, None, SIZES[None])[1][0]

    for a, b in zip(plain, gradients(scanned, lhs, rhs, d_out)):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_sizes_are_data(multiply):
    """Other sizes compile nothing again."""
    lhs, rhs, _ = operands()
    call = jax.jit(multiply)
    for sizes in ([1, 2, 3], [0, 0, 40], [40, 0, 0]):
        call(lhs, rhs, jnp.array(sizes, jnp.int32))
    assert call._cache_size() == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_runs_give_the_same_bits(implementation, dtype):
    call = functools.partial(grouped_matmul, group_sizes=SIZES, implementation=implementation)
    cast = [x.astype(dtype) for x in operands()]
    for a, b in zip(gradients(call, *cast), gradients(call, *cast)):
        np.testing.assert_array_equal(np.float32(a), np.float32(b))


def test_x64(implementation):
    lhs, rhs, _ = inputs(40, 16, 24, 3)
    with jax.enable_x64(True):
        out = grouped_matmul(
            jnp.float32(lhs), jnp.float32(rhs), jnp.int64(SIZES), implementation=implementation
        )
        assert out.dtype == jnp.float32
        exact = grouped_matmul(jnp.asarray(lhs), jnp.asarray(rhs), jnp.asarray(SIZES))
        expected = reference.grouped_matmul(jnp.asarray(lhs), jnp.asarray(rhs), SIZES)
        np.testing.assert_allclose(exact, expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(out, expected, rtol=1e-2, atol=2e-2)


WRONG = {
    "lhs rank": (
        {"lhs": jnp.ones((2, 4, 5))},
        ValueError,
        "lhs must have shape (M, K), got (2, 4, 5)",
    ),
    "rhs rank": ({"rhs": jnp.ones((5, 6))}, ValueError, "rhs must have shape (G, K, N) with K=5"),
    "width": (
        {"rhs": jnp.ones((3, 4, 6))},
        ValueError,
        "rhs must have shape (G, K, N) with K=5",
    ),
    "sizes": ({"group_sizes": jnp.ones(2, int)}, ValueError, "group_sizes must have shape (G,)"),
    "kind of sizes": ({"group_sizes": jnp.ones(3)}, TypeError, "group_sizes must be integers"),
    "integers": ({"lhs": jnp.ones((4, 5), int)}, TypeError, "lhs must have dtype float32 or"),
    "two dtypes": (
        {"rhs": jnp.ones((3, 5, 6), jnp.bfloat16)},
        TypeError,
        "rhs must have the dtype of lhs (float32), got bfloat16",
    ),
    "output": ({"preferred_element_type": int}, TypeError, "preferred_element_type must be one"),
    "precision": ({"precision": "fast"}, ValueError, "precision must be None, 'default'"),
    "implementation": ({"implementation": "cuda"}, ValueError, "implementation must be None"),
}


@pytest.mark.parametrize(("change", "error", "message"), WRONG.values(), ids=WRONG)
def test_wrong_arguments(change, error, message):
    right = {"lhs": jnp.ones((4, 5)), "rhs": jnp.ones((3, 5, 6)), "group_sizes": SIZES}
    with pytest.raises(error, match=re.escape(f"grouped_matmul: {message}")):
        grouped_matmul(**right | change)


def test_triton_refuses_float64():
    with jax.enable_x64(True), pytest.raises(NotImplementedError, match="does not take float64"):
        grouped_matmul(
            jnp.ones((4, 5)), jnp.ones((3, 5, 6)), jnp.array(SIZES), implementation="triton"
        )
