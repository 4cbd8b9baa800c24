"""Values and gradients of moe_mlp against float64, for every implementation."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.ops.moe.oracle import NAMES, Shape, cast, check, gradients, random_experts
from tjk.ops import moe_mlp

SHAPE = Shape()
ROUTINGS = {
    "random": random_experts(SHAPE),
    "all to one": np.full((40, 2), 1, np.int32),
    "an expert without tokens": random_experts(Shape(E=3)) + 1,
    "out of range": random_experts(Shape(E=6)) - 1,
    "none in range": np.full((40, 2), 4, np.int32),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("experts", ROUTINGS.values(), ids=ROUTINGS)
def test_routings(implementation, experts, dtype):
    check(SHAPE, experts, dtype, implementation)


@pytest.mark.parametrize("experts", ROUTINGS.values(), ids=ROUTINGS)
def test_full_precision(implementation, experts):
    check(SHAPE, experts, "float32", implementation, precision="highest")


@pytest.mark.parametrize(
    "shape",
    [
        Shape(k=1),
        Shape(k=4),
        Shape(M=1, k=3),
        Shape(M=7, D=1, F=1, E=1, k=1),
        Shape(M=130, D=64, F=128, E=2),
        Shape(M=65, D=130, F=65, E=3),
        Shape(M=300, D=16, F=16, E=2, k=1),
    ],
    ids=str,
)
def test_shapes(implementation, shape):
    check(shape, random_experts(shape), "float32", implementation, precision="highest")


@pytest.mark.parametrize("activation", ["silu", "gelu", "relu"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activations(implementation, activation, dtype):
    check(SHAPE, random_experts(SHAPE), dtype, implementation, activation)


def test_many_experts(implementation):
    shape = Shape(M=20, D=16, F=16, E=40, k=8)
    check(shape, random_experts(shape), "float32", implementation, precision="highest")


def test_an_expert_twice_counts_twice(implementation):
    experts = np.repeat(random_experts(Shape(k=1)), 2, axis=1)
    check(SHAPE, experts, "float32", implementation, precision="highest")


def test_dropped_slots_have_no_influence(implementation):
    """Whatever their weights are."""
    experts = jnp.asarray(ROUTINGS["out of range"])
    dropped = (experts < 0) | (experts >= SHAPE.E)
    operands = cast(SHAPE, "float32")
    layer = functools.partial(moe_mlp, experts=experts, implementation=implementation)
    clean = gradients(layer, *operands)
    operands[4] = jnp.where(dropped, jnp.nan, operands[4])
    for name, a, b in zip(NAMES, clean, gradients(layer, *operands)):
        np.testing.assert_array_equal(a, b, name)
    assert (clean[5][dropped] == 0).all()


def test_tokens_do_not_mix(implementation):
    """NaN in one token reaches its own results and its experts' gradients, nothing else."""
    experts = jnp.asarray(np.stack([np.arange(40) % 2, 2 + np.arange(40) % 2], axis=1), jnp.int32)
    layer = functools.partial(moe_mlp, experts=experts, implementation=implementation)
    operands = cast(SHAPE, "float32")
    clean = gradients(layer, *operands)
    operands[0] = operands[0].at[6].set(jnp.nan)  # experts 0 and 2
    for name, a, b in zip(NAMES, clean, gradients(layer, *operands)):
        touched = [0, 2] if name.startswith("d_w_") else 6
        np.testing.assert_array_equal(np.delete(a, touched, 0), np.delete(b, touched, 0), name)
        assert np.isnan(b[jnp.array(touched)]).any(), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_runs_give_the_same_bits(implementation, dtype):
    layer = functools.partial(
        moe_mlp, experts=jnp.asarray(random_experts(SHAPE)), implementation=implementation
    )
    operands = cast(SHAPE, dtype)
    for a, b in zip(gradients(layer, *operands), gradients(layer, *operands)):
        np.testing.assert_array_equal(np.float32(a), np.float32(b))


@settings(max_examples=4, deadline=None, derandomize=True, phases=[Phase.generate])
@given(st.data())
def test_random_problems(implementation, data):
    widths = st.sampled_from([1, 5, 16, 33, 64])
    E = data.draw(st.integers(1, 6))
    shape = Shape(
        M=data.draw(st.sampled_from([1, 2, 17, 64, 65])),
        D=data.draw(widths),
        F=data.draw(widths),
        E=E,
        k=data.draw(st.integers(1, E)),
    )
    experts = random_experts(shape, data.draw(st.integers(0, 9)))
    activation = data.draw(st.sampled_from(["silu", "gelu", "relu"]))
    check(shape, experts, "float32", implementation, activation, precision="highest")
