"""The selective scan by its definition: the oracle of the tests, never a default.

h_t = exp(delta_t A) h_{t-1} + delta_t x_t B_t,   y_t = (C_t . h_t + D x_t) silu(z_t)
"""

import jax
import jax.numpy as jnp
from jax import Array

from tjk.precision import accumulator
from tjk.segments import resets


def selective_scan(
    x: Array,
    delta: Array,
    A: Array,
    B: Array,
    C: Array,
    D: Array | None = None,
    z: Array | None = None,
    *,
    delta_bias: Array | None = None,
    delta_softplus: bool = False,
    initial_state: Array | None = None,
    segment_ids: Array | None = None,
    reverse: bool = False,
) -> tuple[Array, Array]:
    """y (B, L, D), rounded to x's dtype, and the final state (B, D, R), step by step."""
    dtype, exact = x.dtype, accumulator(x.dtype)
    x, delta, A, B, C = (a.astype(exact) for a in (x, delta, A, B, C))
    if delta_bias is not None:
        delta += delta_bias.astype(exact)
    if delta_softplus:
        delta = jax.nn.softplus(delta)
    h = jnp.zeros((len(x), *A.shape), exact) if initial_state is None else initial_state
    if segment_ids is None:
        segment_ids = jnp.zeros(x.shape[:2], jnp.int32)
    reset = resets(segment_ids, reverse)

    def step(h: Array, inputs: tuple[Array, ...]) -> tuple[Array, Array]:
        x, delta, B, C, reset = inputs
        h = jnp.where(reset[:, None, None], jnp.zeros_like(h), h)
        h = jnp.exp(delta[:, :, None] * A) * h + (delta * x)[:, :, None] * B[:, None, :]
        return h, jnp.einsum("bdr,br->bd", h, C)

    by_time = tuple(jnp.moveaxis(a, 1, 0) for a in (x, delta, B, C, reset))
    h, y = jax.lax.scan(step, h, by_time, reverse=reverse)
    y = jnp.moveaxis(y, 0, 1)
    if D is not None:
        y += D.astype(exact) * x
    if z is not None:
        y *= jax.nn.silu(z.astype(exact))
    return y.astype(dtype), h
