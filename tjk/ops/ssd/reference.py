"""The scan by its definition, one position after the other: the oracle of the tests.

h_t = exp(dt'_t A) h_{t-1} + dt'_t x_t (outer) B_t,   y_t = (h_t C_t + D x_t) silu(z_t)
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

from tjk.segments import resets


def ssd_scan(
    x: Array,
    dt: Array,
    A: Array,
    B: Array,
    C: Array,
    D: Array | None = None,
    z: Array | None = None,
    *,
    dt_bias: Array | None = None,
    dt_softplus: bool = False,
    initial_state: Array | None = None,
    segment_ids: Array | None = None,
    reverse: bool = False,
) -> tuple[Array, Array]:
    """y (B, L, H, P) in x's dtype and the final state (B, H, P, R); arithmetic in A's dtype.

    The shapes of `tjk.ops.ssd_scan`.
    """
    batch, L, H, P = x.shape
    exact, heads = A.dtype, H // B.shape[2]
    dt = dt.astype(exact)
    dt = dt if dt_bias is None else dt + dt_bias
    dt = jax.nn.softplus(dt) if dt_softplus else dt
    starts = jnp.zeros((batch, L), bool)
    starts = starts if segment_ids is None else resets(segment_ids, reverse)

    def step(h: Array, now: tuple[Array, ...]) -> tuple[Array, Array]:
        x, dt, B, C, start = now
        x, B, C = (a.astype(exact) for a in (x, B, C))
        B, C = (jnp.repeat(a, heads, axis=1) for a in (B, C))  # (B, H, R)
        h = jnp.where(start[:, None, None, None], jnp.zeros((), exact), h)
        h = jnp.exp(dt * A)[..., None, None] * h
        h += (dt[..., None] * x)[..., None] * B[:, :, None]
        return h, jnp.einsum("bhpr,bhr->bhp", h, C, precision="highest")

    first = jnp.zeros((batch, H, P, B.shape[3]), exact)
    first = first if initial_state is None else initial_state
    over = tuple(jnp.moveaxis(a, 1, 0) for a in (x, dt, B, C, starts))
    last, y = lax.scan(step, first, over, reverse=reverse)
    y = jnp.moveaxis(y, 0, 1)
    y = y if D is None else y + D[:, None] * x.astype(exact)
    y = y if z is None else y * jax.nn.silu(z.astype(exact))
    return y.astype(x.dtype), last
