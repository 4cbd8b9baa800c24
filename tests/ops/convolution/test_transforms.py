"""causal_conv1d under JAX's transformations, and its errors."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ops.convolution.oracle import Problem, inputs
from tjk.ops.convolution import causal_conv1d, causal_conv1d_step

SMALL = Problem(L=9)
ARGUMENTS = {k: jnp.asarray(a, "float32") for k, a in inputs(SMALL).items()}


@pytest.fixture
def convolve(implementation):
    def call(x, weight, bias, state):
        options = {"initial_state": state, "activation": "silu", "return_final_state": True}
        return causal_conv1d(x, weight, bias, implementation=implementation, **options)

    return call


def loss(convolve, *arguments):
    y, state = convolve(*arguments)
    return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.sin(state))


@pytest.mark.parametrize("mapped", [(0,), (1, 3), (0, 1, 2, 3)])
def test_vmap_and_its_gradient(convolve, mapped):
    one, other = list(ARGUMENTS.values()), [2 * a for a in ARGUMENTS.values()]
    axes = [0 if i in mapped else None for i in range(4)]
    second = [b if i in mapped else a for i, (a, b) in enumerate(zip(one, other))]
    stacked = [jnp.stack([a, b]) if i in mapped else a for i, (a, b) in enumerate(zip(one, second))]
    value = jax.value_and_grad(functools.partial(loss, convolve), mapped)
    together = jax.jit(jax.vmap(value, axes))(*stacked)
    for i, arguments in enumerate((one, second)):
        expected = value(*arguments)
        for a, b in zip(jax.tree.leaves(together), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a[i], b, rtol=2e-5, atol=2e-5)


def test_remat_in_a_scan(convolve):
    def looped(*arguments):
        def step(carry, _):
            return carry + jax.checkpoint(functools.partial(loss, convolve))(*arguments), None

        return jax.lax.scan(step, 0.0, None, length=2)[0]

    gradients = jax.jit(jax.grad(looped, (0, 1, 2, 3)))(*ARGUMENTS.values())
    expected = jax.grad(functools.partial(loss, convolve), (0, 1, 2, 3))(*ARGUMENTS.values())
    for a, b in zip(gradients, expected):
        np.testing.assert_allclose(a, 2 * b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("shape", [(0, 9, 5), (2, 0, 5), (2, 9, 0)])
def test_nothing_to_convolve(implementation, shape):
    B, _, D = shape
    state = jnp.ones((B, 3, D))
    y, last = causal_conv1d(
        jnp.ones(shape),
        jnp.ones((D, 4)),
        initial_state=state,
        return_final_state=True,
        implementation=implementation,
    )
    assert y.shape == shape
    np.testing.assert_array_equal(last, state)


def test_float64_is_xla_only():
    with jax.enable_x64(True):
        x, weight, *_ = inputs(SMALL).values()
        assert causal_conv1d(x, weight).dtype == jnp.float64
        with pytest.raises(NotImplementedError, match="does not take float64"):
            causal_conv1d(x, weight, implementation="triton")


WRONG = {
    "x": ({"x": jnp.ones((9, 5))}, ValueError, "x must have shape (B, L, D), got (9, 5)"),
    "weight": ({"weight": jnp.ones((4, 4))}, ValueError, "weight must have shape (D, W) with D=5"),
    "one tap": ({"weight": jnp.ones((5, 1))}, ValueError, "weight must have shape (D, W) with W"),
    "five taps": ({"weight": jnp.ones((5, 5))}, ValueError, "with W from 2 to 4, got (5, 5)"),
    "bias": ({"bias": jnp.ones(4)}, ValueError, "bias must have shape (D,) with D=5, got (4,)"),
    "state": (
        {"initial_state": jnp.ones((2, 2, 5))},
        ValueError,
        "initial_state must have shape (B, W - 1, D) = (2, 3, 5), got (2, 2, 5)",
    ),
    "dtype": ({"x": jnp.ones((2, 9, 5), int)}, TypeError, "x must have dtype float32 or"),
    "weight's dtype": (
        {"weight": jnp.ones((5, 4), jnp.float16)},
        TypeError,
        "weight must have dtype float32, got float16",
    ),
    "state's dtype": (
        {"initial_state": jnp.ones((2, 3, 5), jnp.bfloat16)},
        TypeError,
        "initial_state must have dtype float32, got bfloat16",
    ),
    "segments": ({"segment_ids": jnp.ones((2, 8), int)}, ValueError, "segment_ids must have shape"),
    "kind": ({"segment_ids": jnp.ones((2, 9))}, TypeError, "segment_ids must be integers"),
    "activation": ({"activation": "gelu"}, ValueError, "activation must be None or 'silu'"),
    "implementation": ({"implementation": "cuda"}, ValueError, "implementation must be None"),
}


@pytest.mark.parametrize(("change", "error", "message"), WRONG.values(), ids=WRONG)
def test_wrong_arguments(change, error, message):
    with pytest.raises(error, match=f"causal_conv1d: .*{re.escape(message)}"):
        causal_conv1d(**ARGUMENTS | change)


def test_wrong_step():
    x, weight, bias, state = ARGUMENTS.values()
    with pytest.raises(ValueError, match=r"causal_conv1d_step: x must have shape \(B, D\), got"):
        causal_conv1d_step(state, x, weight, bias)
    with pytest.raises(ValueError, match=r"state must have shape \(B, W - 1, D\) = \(2, 3, 5\)"):
        causal_conv1d_step(state[:, 1:], x[:, 0], weight, bias)
