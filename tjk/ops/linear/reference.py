"""The recurrence by its definition, one position after the other: the oracle of the tests."""

import jax.numpy as jnp
from jax import Array, lax

from tjk.ops.linear.operands import accumulator
from tjk.segments import resets


def linear_scan(
    a: Array,
    x: Array,
    *,
    initial_state: Array | None = None,
    segment_ids: Array | None = None,
    reverse: bool = False,
) -> tuple[Array, Array]:
    """h (B, L, D) in x's dtype and the last one (B, D); arithmetic in the states' dtype."""
    B, L, D = x.shape
    exact = accumulator(x.dtype)
    starts = jnp.zeros((B, L), bool) if segment_ids is None else resets(segment_ids, reverse)

    def step(h: Array, now: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        a, x, start = now
        h = jnp.where(start[:, None], jnp.zeros((), exact), h)
        h = a.astype(exact) * h + x.astype(exact)
        return h, h

    first = jnp.zeros((B, D), exact) if initial_state is None else initial_state
    over = (jnp.broadcast_to(a, x.shape), x, starts)
    last, h = lax.scan(step, first, tuple(jnp.moveaxis(o, 1, 0) for o in over), reverse=reverse)
    return jnp.moveaxis(h, 0, 1).astype(x.dtype), last
