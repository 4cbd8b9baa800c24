"""`causal_conv1d_step`: one position, for generation."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from tjk.ops.convolution.operands import accumulator, check


def causal_conv1d_step(
    state: ArrayLike,
    x: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    activation: str | None = None,
) -> tuple[Array, Array]:
    r"""The next output of `causal_conv1d`, and the state behind it.

    Plain JAX; usable as the body of a loop. Dtypes and rounding are the convolution's.
    Differentiable in all arrays.

    Args:
        state: (B, W - 1, D) float32 (float64 with float64): the last inputs, the most recent last.
        x: (B, D), one position.
        weight: (D, W), W from 2 to 4.
        bias: (D,).
        activation: None or "silu".

    Returns:
        y (B, D) in x's dtype, and the state with x at its end.

    Raises:
        TypeError: for a dtype that the convolution does not take.
        ValueError: for a shape or value that does not fit.

    Example:
        >>> import jax.numpy as jnp
        >>> from tjk.ops import causal_conv1d_step
        >>> y, state = causal_conv1d_step(jnp.zeros((2, 3, 8)), jnp.ones((2, 8)), jnp.ones((8, 4)))
        >>> y.shape, state.shape
        ((2, 8), (2, 3, 8))
    """
    operands = check("causal_conv1d_step", "", x, weight, bias, ("state", state), activation)
    x, state, exact = operands.x, operands.initial_state, accumulator(operands.x.dtype)
    window = jnp.concatenate((state, x.astype(exact)[:, None]), axis=1)  # (B, W, D)
    y = jnp.sum(window * operands.weight.astype(exact).T, axis=1)
    if operands.bias is not None:
        y += operands.bias.astype(exact)
    y = jax.nn.silu(y) if activation == "silu" else y
    return y.astype(x.dtype), window[:, 1:]
