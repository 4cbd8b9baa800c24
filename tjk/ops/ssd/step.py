"""`ssd_scan_step`: the scan's recurrence for one token."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from tjk.ops.ssd.operands import check


def ssd_scan_step(
    state: ArrayLike,
    x: ArrayLike,
    dt: ArrayLike,
    A: ArrayLike,
    B: ArrayLike,
    C: ArrayLike,
    D: ArrayLike | None = None,
    z: ArrayLike | None = None,
    *,
    dt_bias: ArrayLike | None = None,
    dt_softplus: bool = False,
) -> tuple[Array, Array]:
    r"""One token of `tjk.ops.ssd_scan`: the next output and state, for generation.

    .. math::
        h' = e^{\Delta A} h + \Delta\, x B^\top, \qquad
        y = (h' C + D x) \odot \operatorname{silu}(z), \qquad \Delta = dt + dt_\mathrm{bias}

    through softplus if asked. A loop of steps gives what the scan gives, but for roundings: the
    arithmetic is float32 (float64 for float64), y is rounded once. Plain JAX, differentiable,
    the body of a `jax.lax.scan`.

    Args:
        state: h, (B, H, P, R) float32; where a sequence starts, zeros.
        x: (B, H, P).
        dt: (B, H), in x's dtype or float32.
        A: (H,) float32.
        B: (B, G, R) in x's dtype; head h takes group h // (H / G).
        C: (B, G, R) in x's dtype.
        D: (H,) float32.
        z: (B, H, P) in x's dtype.
        dt_bias: (H,) float32.
        dt_softplus: whether softplus is applied to the step, after the bias.

    Returns:
        y (B, H, P) in x's dtype, and the next state.

    Raises:
        TypeError: for a dtype other than these (or float64 for all).
        ValueError: for a shape that does not fit.

    Example:
        >>> import jax.numpy as jnp
        >>> from tjk.ops import ssd_scan_step
        >>> state, x, dt = jnp.zeros((2, 4, 8, 16)), jnp.ones((2, 4, 8)), jnp.ones((2, 4))
        >>> y, state = ssd_scan_step(state, x, dt, -jnp.ones(4), *jnp.ones((2, 2, 1, 16)))
        >>> y.shape
        (2, 4, 8)
    """
    x, dt, A, B, C, D, z, dt_bias, h, _ = check(
        "ssd_scan_step", "", x, dt, A, B, C, D, z, dt_bias, state
    )
    heads = x.shape[1] // B.shape[1]
    wide = x.astype(A.dtype)
    B, C = (jnp.repeat(a.astype(A.dtype), heads, axis=1) for a in (B, C))  # (B, H, R)
    dt = dt.astype(A.dtype)
    dt = dt if dt_bias is None else dt + dt_bias
    dt = jax.nn.softplus(dt) if dt_softplus else dt
    h = jnp.exp(dt * A)[..., None, None] * h + (dt[..., None] * wide)[..., None] * B[:, :, None]
    y = jnp.einsum("bhpr,bhr->bhp", h, C, precision="highest")
    y = y if D is None else y + D[:, None] * wide
    y = y if z is None else y * jax.nn.silu(z.astype(A.dtype))
    return y.astype(x.dtype), h
