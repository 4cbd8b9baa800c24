"""Values of decode_attention against float64, for every implementation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ops.attention.oracle import Shape, inputs
from tests.ops.decode.oracle import check, lengths
from tjk.ops import flash_attention
from tjk.ops.decode import decode_attention

# Of each, the caches' lengths.
SHAPES = {
    Shape(B=1, T=1, S=1, N=1, K=1, H=1, V=1): (1,),
    Shape(B=2, T=1, S=63, N=4, K=2, H=24, V=24): (63, 5),
    Shape(B=2, T=5, S=63, N=2, K=1, H=72, V=80): (3, 62),  # fewer than T
    Shape(B=1, T=2, S=1000, N=8, K=1, H=64, V=64): (1000,),
    Shape(B=3, T=1, S=130, N=2, K=2, H=80, V=72): (-(2**31), 200, 129),  # clamped
    Shape(B=1, T=5, S=40, N=16, K=1, H=16, V=7): (40,),  # 80 rows
}


CASES = [
    (shape, used, dtype)
    for (shape, used), half in zip(SHAPES.items(), ("bfloat16", "float16") * 3)
    for dtype in ("float32", half)
]


@pytest.mark.parametrize(("shape", "used", "dtype"), CASES, ids=str)
def test_shapes(implementation, shape, used, dtype):
    check(shape, lengths(*used), dtype, implementation)


FLAGS = {
    "window": {"local_window_size": 70},
    "small window": {"local_window_size": 3},
    "window of itself": {"local_window_size": 0},
    "window of all": {"local_window_size": 2**40},
    "soft cap": {"logits_soft_cap": 1.5},
    "scale": {"scale": -0.7},
    "no scale": {"scale": 0.0, "local_window_size": 9},
    "large logits": {"scale": 30.0},
    "all": {"scale": 0.4, "logits_soft_cap": 2.0, "local_window_size": 66},
}


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_flags(implementation, flags):
    shape = Shape(B=2, T=5, S=150, N=4, K=2, H=16, V=16)
    check(shape, lengths(150, 71), "float32", implementation, precision="highest", **flags)


@pytest.mark.parametrize(
    ("splits", "dtype"),
    [(1, "bfloat16"), (2, "float32"), (7, "bfloat16"), (100, "float32"), (None, "float16")],
)
def test_splits(splits, dtype):
    """More than tiles of keys, too; and parts that see nothing."""
    shape = Shape(B=3, T=2, S=300, N=4, K=2, H=96, V=160)
    options = {"precision": "highest", "splits": splits, "logits_soft_cap": 3.0}
    check(shape, lengths(300, 1, 37), dtype, "triton", **options)


def test_a_wide_head(implementation):
    shape = Shape(B=1, T=1, S=70, N=1, K=1, H=160, V=256)
    check(shape, lengths(70), "float32", implementation, precision="highest")


def test_float64():
    shape = Shape(B=2, T=2, S=70, N=2, K=1, H=8, V=8)
    with jax.enable_x64(True):
        check(shape, lengths(70, 3), "float64", None)


def test_xla_over_several_blocks():
    """Of 1024 keys, of which the last does not fit."""
    shape = Shape(B=3, T=2, S=2500, N=2, K=1, H=8, V=8)
    for left in (None, 1100):
        used = lengths(2500, 1024, 2049)
        check(shape, used, "float32", "xla", precision="highest", local_window_size=left)


@pytest.mark.parametrize(("B", "T", "S"), [(0, 1, 9), (2, 0, 9), (2, 1, 0)])
def test_empty(implementation, B, T, S):
    shape = Shape(B=B, T=T, S=S, N=2, K=1, H=8, V=8)
    check(shape, lengths(*[4] * B), "float32", implementation)


def test_garbage_that_nobody_sees(implementation):
    """Neither behind the lengths nor before the window is anything used, be it NaN."""
    query, key, value = (jnp.float32(x) for x in inputs(Shape(B=3, T=2, S=200))[:3])
    used = lengths(21, 0, 170)
    decode = functools.partial(
        decode_attention,
        lengths=used,
        local_window_size=30,
        splits=3,
        return_residual=True,
        implementation=implementation,
    )
    query = query.at[1].set(jnp.nan)  # nor what has nothing to see
    s = jnp.arange(200)
    seen = (s < used[:, None]) & (s >= used[:, None] - 2 - 30)
    key_garbage, value_garbage = (
        jnp.where(seen[:, :, None, None], x, jnp.nan) for x in (key, value)
    )
    for clean, dirty in zip(decode(query, key, value), decode(query, key_garbage, value_garbage)):
        assert not np.isnan(clean).any()
        np.testing.assert_array_equal(clean, dirty)


@pytest.mark.parametrize("options", [{}, {"local_window_size": 7, "logits_soft_cap": 0.8}], ids=str)
def test_is_a_row_of_flash_attention(implementation, options):
    """Sequences of all lengths at a time; then the last three rows together."""
    query, key, value = (jnp.float32(x) for x in inputs(Shape(B=1, T=20, S=20, N=4, K=2))[:3])
    options = options | {"precision": "highest", "return_residual": True}
    window = options.get("local_window_size")
    flash = {"local_window_size": (window, 0)} if window is not None else {}
    rows = flash_attention(
        query, key, value, is_causal=True, implementation="xla", **(options | flash)
    )
    decode = functools.partial(decode_attention, implementation=implementation, **options)
    caches = [jnp.repeat(x, 20, 0) for x in (key, value)]
    one = decode(query[0], *caches, lengths=jnp.arange(1, 21, dtype=jnp.int32))
    three = decode(query[:, 15:18], key, value, lengths=lengths(18))
    for row, a, b in zip(rows, one, three):
        np.testing.assert_allclose(a, row[0], rtol=2e-6, atol=2e-6)
        np.testing.assert_allclose(b, row[:, 15:18], rtol=2e-6, atol=2e-6)
