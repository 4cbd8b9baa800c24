"""Grouped products three ways: as asked for, in float64, and in plain JAX."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.numerics import assert_within_budget
from tjk.ops import grouped_matmul
from tjk.ops.grouped import reference

TF32_EPSILON = 2.0**-10  # truncation, not rounding
NAMES = ("output", "d_lhs", "d_rhs")


@functools.cache
def inputs(M: int, K: int, N: int, G: int, seed: int = 0) -> tuple[np.ndarray, ...]:
    """lhs, rhs and the output's cotangent in float64."""
    draw = np.random.default_rng(seed).standard_normal
    return draw((M, K)), draw((G, K, N)), draw((M, N))


def gradients(multiply: Any, *operands: Any) -> tuple[Any, ...]:
    """Output and gradients of lhs and rhs for a cotangent, the last operand: see NAMES."""
    return jax.jit(functools.partial(_gradients, lambda *x: multiply(*x[:2])))(*operands, None)


def _gradients(multiply: Any, lhs: Any, rhs: Any, d_out: Any, sizes: Any) -> tuple[Any, ...]:
    out, vjp = jax.vjp(lambda lhs, rhs: multiply(lhs, rhs, sizes), lhs, rhs)
    return out, *vjp(d_out.astype(out.dtype))


@functools.cache
def _compiled(implementation: str | None, **options: Any) -> Any:
    """The gradients of grouped_matmul, of the reference if there is no implementation.

    One jitted function for all tests, so that equal shapes are compiled once.
    """
    multiply = reference.grouped_matmul
    if implementation is not None:
        multiply = functools.partial(grouped_matmul, implementation=implementation, **options)
    return jax.jit(functools.partial(_gradients, multiply))


def check(
    sizes: Any, dtype: str, implementation: str, *, M: int, K: int, N: int, **options: Any
) -> None:
    """Fails unless output and gradients are within the budget.

    Where float32 products are TF32, as by default in Triton, the plain computation is of operands
    with TF32's bits.
    """
    sizes = jnp.asarray(sizes, jnp.int32)
    operands = [jnp.asarray(x, dtype) for x in inputs(M, K, N, len(sizes))]
    tf32 = dtype == "float32" and implementation == "triton" and "precision" not in options
    actual = _compiled(implementation, **options)(*operands, sizes)
    exact = in_dtype(operands, sizes, "float64")
    rounded = [truncate(x) for x in operands] if tf32 else operands
    plain = in_dtype(rounded, sizes, dtype)
    for name, *values in zip(NAMES, actual, exact, plain):
        inherent = TF32_EPSILON * np.abs(values[1]).max(initial=0) * tf32
        assert_within_budget(name, *values, inherent=inherent)


def truncate(x: Any) -> np.ndarray:
    """x with the bits that TF32 has."""
    return (np.asarray(x, np.float32).view(np.uint32) & 0xFFFFE000).view(np.float32)


def in_dtype(operands: Any, sizes: Any, dtype: str) -> tuple[np.ndarray, ...]:
    """The reference and its derivative by JAX, all in one dtype."""
    with jax.enable_x64(True):
        cast = [jnp.asarray(np.asarray(x), dtype) for x in operands]
        return jax.tree.map(np.asarray, _compiled(None)(*cast, sizes))
