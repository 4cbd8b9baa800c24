"""One token of the selective scan, for generation."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from tjk.ops.selective.operands import Operands, check
from tjk.precision import accumulator

_OP = "selective_scan_step"


def selective_scan_step(
    state: ArrayLike,
    x: ArrayLike,
    delta: ArrayLike,
    A: ArrayLike,
    B: ArrayLike,
    C: ArrayLike,
    D: ArrayLike | None = None,
    z: ArrayLike | None = None,
    *,
    delta_bias: ArrayLike | None = None,
    delta_softplus: bool = False,
) -> tuple[Array, Array]:
    r"""One step of `selective_scan`, in plain JAX: the body of a loop that generates.

    .. math::
        h' = e^{\delta A} h + \delta x B, \qquad y = (C h' + D x) \operatorname{silu}(z)

    with delta + delta_bias, or softplus(delta + delta_bias) if asked for, in place of delta.
    Arithmetic is float32 (float64 for float64), y is rounded once. Differentiable in everything.

    Source: Gu, Dao, https://arxiv.org/abs/2312.00752.

    Args:
        state: (B, D, R) float32 (float64 with float64), h.
        x: (B, D) float32, bfloat16, float16 or float64.
        delta: (B, D), in x's dtype or float32.
        A: (D, R), in x's dtype or float32.
        B: (B, R), in x's dtype.
        C: (B, R), in x's dtype.
        D: (D,), in x's dtype or float32, or None for 0.
        z: (B, D), in x's dtype, or None for no gate.
        delta_bias: (D,), in x's dtype or float32, or None for 0.
        delta_softplus: whether delta passes through softplus.

    Returns:
        y (B, D) in x's dtype, and the next state.

    Raises:
        TypeError: for a dtype that does not fit.
        ValueError: for a shape that does not fit.

    Example:
        >>> import jax.numpy as jnp
        >>> from tjk.ops import selective_scan_step
        >>> x, A, B = jnp.ones((2, 8)), -jnp.ones((8, 4)), jnp.ones((2, 4))
        >>> y, state = selective_scan_step(jnp.zeros((2, 8, 4)), x, x, A, B, B)
        >>> y.shape, state.shape
        ((2, 8), (2, 8, 4))
    """
    operands = Operands(
        *(a if a is None else jnp.asarray(a) for a in (x, delta, A, B, C, D, z, delta_bias, state))
    )
    check(_OP, operands, "", "state")
    exact = accumulator(operands.x.dtype)
    x, delta, A, B, C, D, z, delta_bias, h = (a if a is None else a.astype(exact) for a in operands)
    if delta_bias is not None:
        delta += delta_bias
    if delta_softplus:
        delta = jax.nn.softplus(delta)
    h = jnp.exp(delta[:, :, None] * A) * h + (delta * x)[:, :, None] * B[:, None, :]
    y = jnp.einsum("bdr,br->bd", h, C, precision="highest")
    if D is not None:
        y += D * x
    if z is not None:
        y *= jax.nn.silu(z)
    return y.astype(operands.x.dtype), h
