"""The expert layer three ways: as asked for, in float64, and in plain JAX."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.numerics import assert_within_budget
from tjk.ops import moe_mlp
from tjk.ops.moe import reference

TF32_EPSILON = 2.0**-10  # truncation, not rounding
NAMES = ("y", "d_x", "d_w_gate", "d_w_up", "d_w_down", "d_weights")


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of one problem: tokens, width, hidden width, experts, experts a token."""

    M: int = 40
    D: int = 24
    F: int = 33
    E: int = 4
    k: int = 2


@functools.cache
def inputs(shape: Shape, seed: int = 0) -> tuple[np.ndarray, ...]:
    """x, w_gate, w_up, w_down, weights, and y's cotangent in float64."""
    s = shape
    draw = np.random.default_rng(seed).standard_normal
    return (
        draw((s.M, s.D)),
        draw((s.E, s.D, s.F)) / s.D**0.5,
        draw((s.E, s.D, s.F)) / s.D**0.5,
        draw((s.E, s.F, s.D)) / s.F**0.5,
        np.abs(draw((s.M, s.k))) / s.k,
        draw((s.M, s.D)),
    )


def random_experts(shape: Shape, seed: int = 0) -> np.ndarray:
    """(M, k) int32, different experts for a token."""
    order = np.random.default_rng(seed).random((shape.M, shape.E)).argsort(axis=1)
    return order[:, : shape.k].astype(np.int32)


def gradients(layer: Any, *operands: Any) -> tuple[Any, ...]:
    """y and the gradients of all but the last operand, y's cotangent: see NAMES."""
    return jax.jit(functools.partial(_gradients, lambda *x: layer(*x[:-1])))(*operands, None)


def _gradients(layer: Any, *operands: Any) -> tuple[Any, ...]:
    *arguments, d_y, experts = operands
    y, vjp = jax.vjp(lambda *arguments: layer(*arguments, experts), *arguments)
    return y, *vjp(d_y)


@functools.cache
def _compiled(implementation: str | None, activation: str, **options: Any) -> Any:
    """The gradients of moe_mlp, of the reference if there is no implementation.

    One jitted function for all tests, so that equal shapes are compiled once.
    """
    layer = functools.partial(reference.moe_mlp, activation=activation)
    if implementation is not None:
        layer = functools.partial(
            moe_mlp, activation=activation, implementation=implementation, **options
        )
    return jax.jit(functools.partial(_gradients, layer))


def cast(shape: Shape, dtype: str) -> list[Any]:
    """The inputs in a dtype, the routing weights in float32."""
    weights = "float64" if dtype == "float64" else "float32"
    dtypes = (dtype, dtype, dtype, dtype, weights, dtype)
    return [jnp.asarray(x, d) for x, d in zip(inputs(shape), dtypes)]


def check(
    shape: Shape,
    experts: np.ndarray,
    dtype: str,
    implementation: str,
    activation: str = "silu",
    **options: Any,
) -> None:
    """Fails unless the layer and its gradients are within the budget.

    Where float32 products are TF32, as by default in Triton, the plain computation is of operands
    with TF32's bits, and hidden units that are operands themselves lose theirs once more.
    """
    tf32 = dtype == "float32" and implementation == "triton" and "precision" not in options
    operands = cast(shape, dtype)
    experts = jnp.asarray(experts)
    actual = _compiled(implementation, activation, **options)(*operands, experts)
    exact = in_dtype(operands, experts, "float64", activation)
    rounded = [truncate(x) for x in operands] if tf32 else operands
    plain = in_dtype(rounded, experts, dtype, activation)
    for name, *values in zip(NAMES, actual, exact, plain):
        inherent = 2 * TF32_EPSILON * np.abs(values[1]).max(initial=0) * tf32
        if name == "d_weights":
            # A sum over F of products with sums over D, where the definition has a sum over D of
            # sums over F: each has roundings of its own, in proportion to what is added up.
            lengths = [np.linalg.norm(inputs(shape)[i], axis=1).max(initial=0) for i in (0, -1)]
            inherent += float(jnp.finfo(jnp.float32).eps) * lengths[0] * lengths[1]
        assert_within_budget(name, *values, inherent=inherent)


def truncate(x: Any) -> np.ndarray:
    """x with the bits that TF32 has."""
    return (np.asarray(x, np.float32).view(np.uint32) & 0xFFFFE000).view(np.float32)


def in_dtype(operands: Any, experts: Any, dtype: str, activation: str) -> tuple[np.ndarray, ...]:
    """The reference and its derivative by JAX, in one dtype but for routing weights in float32."""
    weights = "float64" if dtype == "float64" else "float32"
    with jax.enable_x64(True):
        dtypes = (dtype, dtype, dtype, dtype, weights, dtype)
        operands = [jnp.asarray(np.asarray(x), d) for x, d in zip(operands, dtypes)]
        return jax.tree.map(np.asarray, _compiled(None, activation)(*operands, experts))
