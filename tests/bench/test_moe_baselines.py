"""The moe suite's baselines: the expert layer, for every routing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import moe_baselines
from tests.numerics import assert_within_budget
from tests.ops.moe.oracle import NAMES, Shape, cast, random_experts
from tjk.ops.moe import reference

SHAPE = Shape(M=150, D=8, F=12, E=4, k=2)


def routing(*experts):
    """The same experts for every token."""
    return np.broadcast_to(np.int32(experts), (SHAPE.M, SHAPE.k))


ROUTINGS = {
    "random": random_experts(SHAPE),
    "all to two": routing(3, 1),  # experts 0 and 2 have no row, the others more than one block
    "all to one": routing(2, 2),
    "one block but for a row": np.sort(np.arange(300, dtype=np.int32) // 129).reshape(150, 2),
}


@functools.partial(jax.jit, static_argnums=0)
def value_and_gradients(layer, experts, *operands):
    *arguments, d_y = operands
    y, vjp = jax.vjp(lambda *arguments: layer(*arguments, experts), *arguments)
    return y, *vjp(d_y)


def in_dtype(layer, experts, dtype):
    with jax.enable_x64(dtype == "float64"):
        return value_and_gradients(layer, jnp.asarray(experts), *cast(SHAPE, dtype))


@functools.cache
def by_definition(routing, dtype):
    operands = in_dtype(reference.moe_mlp, ROUTINGS[routing], dtype)
    return [np.asarray(x).astype(np.float64) for x in operands]


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("layer", [moe_baselines.blocked, moe_baselines.ragged_dot])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_value_and_gradients_are_the_expert_layers(layer, dtype, routing):
    actual = in_dtype(layer, ROUTINGS[routing], dtype)
    for name, *values in zip(
        NAMES, actual, by_definition(routing, "float64"), by_definition(routing, dtype)
    ):
        # Sums over rows, which each way of computing adds up in an order of its own.
        inherent = float(jnp.finfo(jnp.float32).eps) * np.abs(values[1]).max()
        assert_within_budget(name, *values, inherent=inherent)


@pytest.mark.parametrize("layer", [moe_baselines.blocked, moe_baselines.ragged_dot])
@pytest.mark.parametrize("shape", [Shape(M=3, D=4, F=5, E=6, k=1), Shape(M=1, D=4, F=5, E=3, k=3)])
def test_few_slots_and_all_experts_of_a_token(layer, shape):
    experts = random_experts(shape)
    operands = cast(shape, "float32")[:5]
    expected = reference.moe_mlp(*operands, experts)
    np.testing.assert_allclose(layer(*operands, experts), expected, rtol=1e-5, atol=1e-6)
