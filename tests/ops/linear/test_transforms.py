"""linear_scan under JAX's transformations, and its errors."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ops.linear.oracle import Problem, inputs
from tjk.ops.linear import linear_scan, linear_scan_step

ARGUMENTS = {k: jnp.asarray(a, "float32") for k, a in inputs(Problem(L=9)).items()}


@pytest.fixture
def scan(implementation):
    def call(a, x, state):
        options = {"initial_state": state, "return_final_state": True}
        return linear_scan(a, x, implementation=implementation, **options)

    return call


def loss(scan, *arguments):
    y, state = scan(*arguments)
    return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.sin(state))


@pytest.mark.parametrize("mapped", [(1,), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("varying", [False, True])
def test_vmap_and_its_gradient(scan, varying, mapped):
    a, x, state = ARGUMENTS.values()
    one = [a if varying else a[0, 0], x, state]
    axes = [0 if i in mapped else None for i in range(3)]
    second = [v / 2 if i in mapped else v for i, v in enumerate(one)]
    stacked = [jnp.stack(v) if i in mapped else v[0] for i, v in enumerate(zip(one, second))]
    value = jax.value_and_grad(functools.partial(loss, scan), mapped)
    together = jax.jit(jax.vmap(value, axes))(*stacked)
    for i, arguments in enumerate((one, second)):
        expected = value(*arguments)
        for v, right in zip(jax.tree.leaves(together), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(v[i], right, rtol=2e-5, atol=2e-5)


def test_remat_in_a_scan(scan):
    def looped(*arguments):
        def step(carry, _):
            return carry + jax.checkpoint(functools.partial(loss, scan))(*arguments), None

        return jax.lax.scan(step, 0.0, None, length=2)[0]

    gradients = jax.jit(jax.grad(looped, (0, 1, 2)))(*ARGUMENTS.values())
    expected = jax.grad(functools.partial(loss, scan), (0, 1, 2))(*ARGUMENTS.values())
    for v, right in zip(gradients, expected):
        np.testing.assert_allclose(v, 2 * right, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("shape", [(0, 9, 5), (2, 0, 5), (2, 9, 0)])
def test_nothing_to_scan(implementation, shape):
    B, _, D = shape
    state = jnp.ones((B, D))
    y, last = linear_scan(
        jnp.ones(D),
        jnp.ones(shape),
        initial_state=state,
        return_final_state=True,
        implementation=implementation,
    )
    assert y.shape == shape
    if 0 in (B, shape[1], D):
        np.testing.assert_array_equal(last, state)


def test_double_precision_is_xla_only():
    with jax.enable_x64(True):
        for dtype in ("float64", "complex128"):
            a, x = (jnp.asarray(ARGUMENTS[name], dtype) for name in ("a", "x"))
            assert linear_scan(a, x).dtype == dtype
            with pytest.raises(NotImplementedError, match=f"does not take {dtype}"):
                linear_scan(a, x, implementation="triton")


WRONG = {
    "x": ({"x": jnp.ones((9, 5))}, ValueError, "x must have shape (B, L, D), got (9, 5)"),
    "a": ({"a": jnp.ones((2, 8, 5))}, ValueError, "a must have shape (B, L, D) with B=2, L=9, D=5"),
    "fixed a": ({"a": jnp.ones(4)}, ValueError, "a must have shape (D,) with D=5, got (4,)"),
    "state": (
        {"initial_state": jnp.ones((2, 4))},
        ValueError,
        "initial_state must have shape (B, D) with B=2, D=5, got (2, 4)",
    ),
    "dtype": ({"x": jnp.ones((2, 9, 5), int)}, TypeError, "x must have dtype float32 or"),
    "complex a": (
        {"a": jnp.ones((5,), jnp.complex64)},
        TypeError,
        "a must have dtype float32, got complex64",
    ),
    "state's dtype": (
        {"initial_state": jnp.ones((2, 5), jnp.bfloat16)},
        TypeError,
        "initial_state must have dtype float32, got bfloat16",
    ),
    "segments": ({"segment_ids": jnp.ones((2, 8), int)}, ValueError, "segment_ids must have shape"),
    "kind": ({"segment_ids": jnp.ones((2, 9))}, TypeError, "segment_ids must be integers"),
    "implementation": ({"implementation": "cuda"}, ValueError, "implementation must be None"),
}


@pytest.mark.parametrize(("change", "error", "message"), WRONG.values(), ids=WRONG)
def test_wrong_arguments(change, error, message):
    with pytest.raises(error, match=f"linear_scan: .*{re.escape(message)}"):
        linear_scan(**ARGUMENTS | change)


def test_wrong_step():
    a, x, state = ARGUMENTS.values()
    with pytest.raises(ValueError, match=r"linear_scan_step: x must have shape \(B, D\), got"):
        linear_scan_step(state, a, x)
    with pytest.raises(ValueError, match=r"state must have shape \(B, D\) with B=2, D=5"):
        linear_scan_step(state[1:], a[:, 0], x[:, 0])
