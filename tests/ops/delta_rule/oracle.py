"""The gated delta rule three ways: as asked for, in float64, and token by token in plain JAX."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.numerics import assert_within_budget
from tjk.ops.delta_rule import gated_delta_rule, reference

NAMES = ("o", "state", "d_q", "d_k", "d_v", "d_g", "d_beta", "d_initial_state")


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of one problem."""

    B: int = 2
    L: int = 37
    H: int = 2
    K: int = 16
    V: int = 16


@functools.cache
def inputs(shape: Shape, seed: int = 0) -> tuple[np.ndarray, ...]:
    """q, k, v, g, beta, initial state, and cotangents of o and the final state, in float64.

    Keys are shorter than 1, and every other one points in the direction of the first: with beta up
    to 2 that is as hard as a triangular system of a chunk gets.
    """
    B, L, H, K, V = dataclasses.astuple(shape)
    random = np.random.default_rng(seed)
    draw = random.standard_normal
    k = draw((B, L, H, K))
    k[:, ::2] = k[:, :1] + 0.1 * k[:, ::2]
    k /= np.linalg.norm(k, axis=-1, keepdims=True) + 0.01
    g = -np.exp(draw((B, L, H)) - 2)
    beta = 2 * random.random((B, L, H))
    state = draw((B, H, K, V))
    o = draw((B, L, H, V))
    return draw((B, L, H, K)), k, draw((B, L, H, V)), g, beta, state, o, draw((B, H, K, V))


def cast(shape: Shape, dtype: str, gates: str | None = None, seed: int = 0) -> list[Any]:
    """The inputs in a dtype, gates in another one or float32, states in float32."""
    exact = "float64" if dtype == "float64" else "float32"
    gates = gates or exact
    dtypes = (dtype, dtype, dtype, gates, gates, exact, dtype, exact)
    return [jnp.asarray(x, d) for x, d in zip(inputs(shape, seed), dtypes)]


def segments(shape: Shape, changes: tuple[int, ...]) -> np.ndarray:
    """(B, L) ids that change at these positions, in the first sequence of a batch alone."""
    ids = np.zeros((shape.B, shape.L), np.int32)
    for position in changes:
        ids[0, position:] += 1
    return ids


@functools.cache
def compiled(implementation: str | None, **options: Any) -> Any:
    """o, the final state and all gradients: of the op, or of the reference in what it is given.

    One jitted function for all tests, so that equal shapes are compiled once.
    """

    def run(*operands: Any) -> Any:
        *arguments, d_o, d_state, ids = operands
        outputs, vjp = jax.vjp(functools.partial(rule, ids), *arguments)
        return *outputs, *vjp((d_o, d_state))

    def rule(ids: Any, *arguments: Any) -> Any:
        *five, initial_state = arguments
        if implementation == "rounded":
            return _rounded(*five, initial_state, ids, **options)
        if implementation is None:
            return reference.gated_delta_rule(*five, initial_state, ids, **options)
        return gated_delta_rule(
            *five,
            initial_state=initial_state,
            segment_ids=ids,
            return_final_state=True,
            implementation=implementation,
            **options,
        )

    return jax.jit(run)


def _rounded(
    q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any, ids: Any, *, tf32: bool, **options: Any
) -> Any:
    """The reference in float32, with operands of its products rounded to q's dtype, or to TF32.

    That is what a loop over tokens on tensor cores gives. Derivatives round no more.
    """
    dtype = q.dtype

    @jax.custom_jvp
    def low(x: Any) -> Any:
        if not tf32:
            return x.astype(dtype).astype(jnp.float32)
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFFE000)
        return jax.lax.bitcast_convert_type(bits, jnp.float32)

    low.defjvp(lambda primals, tangents: (low(*primals), *tangents))
    wide = tuple(x.astype(jnp.float32) for x in (q, k, v, g, beta))
    o, state = reference.gated_delta_rule(*wide, state, ids, operand=low, **options)
    return o.astype(dtype), state


def check(
    shape: Shape,
    dtype: str,
    implementation: str,
    *,
    ids: np.ndarray | None = None,
    gates: str | None = None,
    initial: bool = True,
    seed: int = 0,
    **options: Any,
) -> None:
    """Fails unless the op and its gradients are within the budget."""
    operands = cast(shape, dtype, gates, seed)
    if not initial:
        operands[5] = jnp.zeros_like(operands[5])
    same = {k: v for k, v in options.items() if k in ("scale", "l2_normalize", "reverse")}
    given = [*operands[:5], operands[5] if initial else None, *operands[6:], ids]
    actual = compiled(implementation, **options)(*given)
    if not initial:
        actual = *actual[:7], None
    tf32 = dtype == "float32" and implementation == "triton" and "precision" not in options
    if tf32 or dtype in ("bfloat16", "float16"):
        plain = compiled("rounded", tf32=tf32, **same)(*operands, ids)
    else:
        plain = compiled(None, **same)(*operands, ids)
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x), "float64") for x in operands]
        exact = compiled(None, **same)(*wide, ids)
        exact = [np.asarray(x) for x in exact]
    # Sums over a chunk stand where the loop over tokens subtracts one by one, of terms that are
    # larger than their sum where keys are alike. And with fewer bits cotangents are rounded, too,
    # where they are operands of products: the derivative of `_rounded` does not do that.
    epsilon = 32 * 2.0**-23
    if tf32 or dtype in ("bfloat16", "float16"):
        epsilon = 2.0**-10 if tf32 else float(jnp.finfo(dtype).eps)
    for name, a, e, p in zip(NAMES, actual, exact, plain):
        if a is not None:
            assert_within_budget(name, a, e, p, inherent=epsilon * np.abs(e).max())
