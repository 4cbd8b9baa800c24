"""Values and gradients of flash_attention against float64, for every implementation."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from tests.ops.attention.oracle import NAMES, Shape, check, gradients, inputs
from tjk.ops import flash_attention

# Plain JAX has one backward pass for both.
BACKWARD = [("xla", False), ("triton", False), ("triton", True)]


def lengths(*values):
    return jnp.array(values, jnp.int32)


SHAPES = [
    Shape(B=1, T=1, S=1, N=1, K=1, H=1, V=1),
    Shape(B=1, T=127, S=129, N=1, K=1, H=64, V=64),
    Shape(B=2, T=64, S=64, N=4, K=2, H=64, V=64),
    Shape(B=1, T=67, S=31, N=3, K=1, H=80, V=80),
    Shape(B=1, T=5, S=130, N=2, K=2, H=96, V=40),
    Shape(B=1, T=33, S=65, N=2, K=1, H=7, V=72),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(implementation, shape, dtype):
    check(shape, dtype, implementation)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_full_precision(implementation, shape):
    check(shape, "float32", implementation, precision="highest")


WIDE = [Shape(B=1, T=33, S=40, N=1, K=1, H=h, V=v) for h, v in ((160, 160), (256, 256), (256, 16))]


@pytest.mark.parametrize(("implementation", "deterministic"), BACKWARD)
@pytest.mark.parametrize("shape", WIDE, ids=str)
def test_wide_heads(implementation, shape, deterministic):
    options = {"deterministic": deterministic, "is_causal": True}
    check(shape, "float32", implementation, precision="highest", **options)


FLAGS = {
    "causal": {"is_causal": True},
    "window": {"local_window_size": (11, 4)},
    "symmetric window": {"local_window_size": 20},
    "window on the left": {"local_window_size": (-3, 30)},
    "window on the right": {"local_window_size": (30, -3)},
    "window of nothing": {"local_window_size": (-40, 20)},
    "causal window": {"is_causal": True, "local_window_size": (17, 9)},
    "lengths": {"query_seq_lengths": lengths(0, 50), "key_value_seq_lengths": lengths(70, 33)},
    "no keys": {"key_value_seq_lengths": lengths(0, 64)},
    "causal lengths": {"is_causal": True, "key_value_seq_lengths": lengths(40, 70)},
    "window lengths": {"local_window_size": (9, 3), "query_seq_lengths": lengths(64, 10)},
    "scale": {"scale": 0.7},
    "negative scale": {"scale": -0.4, "is_causal": True},
    "no scale": {"scale": 0.0, "is_causal": True},
}


@pytest.mark.parametrize(("implementation", "deterministic"), BACKWARD)
@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_flags(implementation, flags, deterministic):
    options = {"deterministic": deterministic} | flags
    check(Shape(T=65, S=70, N=2, K=1), "float32", implementation, precision="highest", **options)


@pytest.mark.parametrize(("T", "S"), [(130, 40), (40, 130), (1, 70), (70, 1)])
def test_causal_counts_from_the_first_position(implementation, T, S):
    shape = Shape(B=1, T=T, S=S)
    check(shape, "float32", implementation, precision="highest", is_causal=True)


@pytest.mark.parametrize(("B", "T", "S"), [(1, 9, 0), (1, 0, 9), (0, 9, 9)])
def test_empty(implementation, B, T, S):
    check(Shape(B=B, T=T, S=S), "float32", implementation)


def test_large_logits(implementation):
    """Weights underflow and sums stay finite."""
    check(Shape(B=1), "float32", implementation, precision="highest", scale=60.0)


@pytest.mark.parametrize(("implementation", "deterministic"), BACKWARD)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_masks_in_every_dtype(implementation, dtype, deterministic):
    shape = Shape(B=2, T=100, S=90, N=2, K=1, H=24, V=24)
    options = {"local_window_size": (50, 10), "key_value_seq_lengths": lengths(80, 0)}
    check(shape, dtype, implementation, deterministic=deterministic, **options)


def test_garbage_behind_the_lengths(implementation):
    """What lies behind the lengths is never used, be it NaN."""
    attend = functools.partial(
        flash_attention,
        query_seq_lengths=lengths(21),
        key_value_seq_lengths=lengths(21),
        return_residual=True,
        implementation=implementation,
    )
    operands = [jnp.float32(x) for x in inputs(Shape(B=1, T=40, S=40))]
    clean = gradients(attend, operands[:3], *operands[3:])
    garbage = [x.at[:, 21:].set(jnp.nan) for x in operands]
    dirty = gradients(attend, garbage[:3], *garbage[3:])
    for name, a, b in zip(NAMES, clean, dirty):
        np.testing.assert_array_equal(a, b, name)
