"""`linear_scan_step`: one position, for generation."""

from jax import Array
from jax.typing import ArrayLike

from tjk.ops.linear.operands import accumulator, check


def linear_scan_step(state: ArrayLike, a: ArrayLike, x: ArrayLike) -> tuple[Array, Array]:
    r"""The next output of `linear_scan`, and the state behind it.

    Plain JAX; usable as the body of a loop. Dtypes and rounding are the scan's. Differentiable in
    all arrays.

    Args:
        state: (B, D) float32 (x's dtype where that is complex or float64).
        a: (B, D) or (D,).
        x: (B, D), one position.

    Returns:
        y (B, D) in x's dtype, and the state.

    Raises:
        TypeError: for a dtype that the scan does not take.
        ValueError: for a shape that does not fit.

    Example:
        >>> import jax.numpy as jnp
        >>> from tjk.ops import linear_scan_step
        >>> y, state = linear_scan_step(jnp.ones((2, 8)), 0.5 * jnp.ones(8), jnp.ones((2, 8)))
        >>> float(y[0, 0])
        1.5
    """
    a, x, state, _ = check("linear_scan_step", "", a, x, ("state", state))
    exact = accumulator(x.dtype)
    h = a.astype(exact) * state + x.astype(exact)
    return h.astype(x.dtype), h
