"""moe_mlp under JAX's transformations, and its errors."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ops.moe.oracle import Shape, cast, gradients, random_experts
from tjk import executors
from tjk.launch import recording
from tjk.ops import moe_mlp

SHAPE = Shape(M=20, D=16, F=24, E=3, k=2)
EXPERTS = jnp.asarray(random_experts(SHAPE))


@pytest.fixture
def layer(implementation):
    return functools.partial(moe_mlp, implementation=implementation, precision="highest")


def arguments():
    return (*cast(SHAPE, "float32")[:5], EXPERTS)


@pytest.mark.parametrize("mapped", [(0,), (1, 2, 3), (0, 4, 5), (0, 1, 2, 3, 4, 5)])
def test_vmap(layer, mapped):
    operands = list(arguments())
    other = [*(-x for x in operands[:5]), (EXPERTS + 1) % SHAPE.E]
    axes = [0 if i in mapped else None for i in range(6)]
    stacked = [
        jnp.stack([a, b]) if i in mapped else a for i, (a, b) in enumerate(zip(operands, other))
    ]
    y = jax.jit(jax.vmap(layer, axes))(*stacked)
    second = [b if i in mapped else a for i, (a, b) in enumerate(zip(operands, other))]
    np.testing.assert_allclose(y[0], layer(*operands), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(y[1], layer(*second), rtol=1e-5, atol=1e-5)


def test_gradient_of_vmap(layer):
    x, *rest = arguments()

    def loss(layer, x):
        return jnp.sum(jnp.sin(layer(x, *rest)))

    ours = jax.jit(jax.grad(lambda x: jax.vmap(lambda x: loss(layer, x))(x).sum()))(
        jnp.stack([x, 2 * x])
    )
    for i in range(2):
        expected = jax.grad(functools.partial(loss, layer))((i + 1) * x)
        np.testing.assert_allclose(ours[i], expected, rtol=1e-5, atol=1e-5)


def test_remat_and_scan(layer):
    *operands, d_y = cast(SHAPE, "float32")

    def plain(*operands):
        return layer(*operands, EXPERTS)

    def wrapped(*operands):
        def step(carry, _):
            return carry, jax.checkpoint(plain)(*operands)

        return jax.lax.scan(step, None, jnp.arange(1))[1][0]

    for a, b in zip(gradients(plain, *operands, d_y), gradients(wrapped, *operands, d_y)):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def _lowered_launches(policy: str) -> int:
    """Launches in the gradient's program for a GPU, from a process where Triton compiles."""
    names = jax.checkpoint_policies.save_only_these_names(
        "moe_mlp_gate", "moe_mlp_up", "moe_mlp_order"
    )

    def loss(*operands):
        return jnp.sum(moe_mlp(*operands, EXPERTS).astype(jnp.float32))

    loss = {
        "no remat": loss,
        "nothing": jax.checkpoint(loss),
        "names": jax.checkpoint(loss, policy=names),
    }[policy]
    with executors.target(86):
        traced = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3, 4))).trace(*arguments()[:5])
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    return len(re.findall(r"custom_call @triton_kernel_call", text))


@pytest.mark.parametrize(("policy", "count"), [("no remat", 12), ("names", 12), ("nothing", 16)])
def test_remat_by_name_runs_the_forward_pass_once(native, policy, count):
    """Six launches forward, six backward; again the sort (three) and gate and up, no more."""
    assert native.submit(_lowered_launches, policy).result() == count


def test_inference_keeps_nothing():
    with recording() as launches:
        jax.eval_shape(functools.partial(moe_mlp, implementation="triton"), *arguments())
    (gate_up,) = (launch for launch in launches if launch.name == "moe_gate_up")
    assert [out.shape for out in gate_up.outputs] == [(40, 24), (0,), (0,)]


def test_no_tokens(layer):
    empty = Shape(M=0, D=16, F=24, E=3, k=2)
    *operands, d_y = cast(empty, "float32")
    experts = jnp.zeros((0, 2), jnp.int32)
    results = gradients(functools.partial(layer, experts=experts), *operands, d_y)
    assert results[0].shape == (0, 16)
    assert all(not x.any() for x in results)


def test_float64_is_xla_only():
    with jax.enable_x64(True):
        operands = cast(SHAPE, "float64")[:5]
        assert moe_mlp(*operands, EXPERTS).dtype == jnp.float64
        with pytest.raises(NotImplementedError, match="does not take float64"):
            moe_mlp(*operands, EXPERTS, implementation="triton")


WRONG = {
    "x": ({"x": jnp.ones((20, 16, 1))}, ValueError, "x must have shape (M, D)"),
    "width": ({"x": jnp.ones((20, 15))}, ValueError, "w_gate must have shape (E, D, F) with D=15"),
    "up": ({"w_up": jnp.ones((3, 16, 23))}, ValueError, "w_up must have shape (E, D, F) with E=3"),
    "down": ({"w_down": jnp.ones((3, 16, 24))}, ValueError, "w_down must have shape (E, F, D)"),
    "tokens": ({"weights": jnp.ones((19, 2))}, ValueError, "weights must have shape (M, k) with"),
    "experts": ({"experts": EXPERTS[:, :1]}, ValueError, "experts must have shape (M, k) with"),
    "dtype": ({"x": jnp.ones((20, 16), int)}, TypeError, "x must have dtype float32 or"),
    "dtypes": (
        {"w_up": jnp.ones((3, 16, 24), jnp.bfloat16)},
        TypeError,
        "w_up must have the dtype of x (float32), got bfloat16",
    ),
    "weights": (
        {"weights": jnp.ones((20, 2), jnp.bfloat16)},
        TypeError,
        "weights must have dtype float32, got bfloat16",
    ),
    "kind": ({"experts": jnp.ones((20, 2))}, TypeError, "experts must have dtype int32"),
    "activation": ({"activation": "tanh"}, ValueError, "activation must be one of 'silu', 'gelu'"),
    "precision": ({"precision": "fast"}, ValueError, "precision must be None, 'default'"),
    "implementation": ({"implementation": "cuda"}, ValueError, "implementation must be None"),
}


@pytest.mark.parametrize(("change", "error", "message"), WRONG.values(), ids=WRONG)
def test_wrong_arguments(change, error, message):
    names = ("x", "w_gate", "w_up", "w_down", "weights", "experts")
    with pytest.raises(error, match=re.escape(f"moe_mlp: {message}")):
        moe_mlp(**dict(zip(names, arguments())) | change)
