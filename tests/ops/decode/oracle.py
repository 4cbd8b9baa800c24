"""Decoding three ways: as asked for, in float64, and in plain JAX."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.numerics import assert_within_budget
from tests.ops.attention.oracle import TF32_EPSILON, Shape, inputs
from tjk.executors.interpreter import truncate_to_tf32
from tjk.ops.decode import decode_attention, reference


def lengths(*values: int) -> jax.Array:
    return jnp.array(values, jnp.int32)


@functools.cache
def _reference(scale: float, left: int | None, soft_cap: float | None) -> Any:
    options = {"scale": scale, "left": left, "soft_cap": soft_cap}
    return jax.jit(functools.partial(reference.decode, **options))


def in_dtype(
    operands: Any,
    lengths: Any,
    dtype: str,
    local_window_size: int | None = None,
    logits_soft_cap: float | None = None,
    scale: float | None = None,
) -> tuple[jax.Array, ...]:
    """The reference, all in one dtype."""
    scale = operands[0].shape[-1] ** -0.5 if scale is None else scale
    with jax.enable_x64(True):
        cast = [jnp.asarray(np.asarray(x), dtype) for x in operands]
        return _reference(scale, local_window_size, logits_soft_cap)(*cast, lengths)


def check(
    shape: Shape,
    used: jax.Array,
    dtype: str,
    implementation: str | None,
    *,
    splits: int | None = 2,
    precision: str | None = None,
    **options: Any,
) -> None:
    """Fails unless output and logsumexp are within the budget.

    Where float32 products are TF32, as by default in Triton, the plain computation is of operands
    with TF32's bits.
    """
    operands = [jnp.asarray(x, dtype) for x in inputs(shape)[:3]]
    tf32 = dtype == "float32" and implementation == "triton" and precision != "highest"

    @jax.jit
    def run(query: Any, key: Any, value: Any, used: Any) -> Any:
        return decode_attention(
            *(query, key, value),
            lengths=used,
            splits=splits,
            precision=precision,
            implementation=implementation,
            return_residual=True,
            **options,
        )

    actual = run(*operands, used)
    exact = in_dtype(operands, used, "float64", **options)
    if tf32:
        operands = [truncate_to_tf32(x) for x in operands]
    plain = in_dtype(operands, used, dtype, **options)
    assert actual[1].dtype == (jnp.float64 if dtype == "float64" else jnp.float32)
    for name, *values in zip(("output", "logsumexp"), actual, exact, plain):
        largest = np.abs(values[1][np.isfinite(values[1])]).max(initial=0)
        assert_within_budget(name, *values, inherent=TF32_EPSILON * largest * tf32)
