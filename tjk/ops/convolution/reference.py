"""The convolution by its definition, one position after the other: the oracle of the tests."""

import jax
import jax.numpy as jnp
from jax import Array, lax

from tjk.ops.convolution.operands import accumulator
from tjk.segments import resets


def causal_conv1d(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    *,
    activation: str | None = None,
    initial_state: Array | None = None,
    segment_ids: Array | None = None,
    reverse: bool = False,
) -> tuple[Array, Array]:
    """y (B, L, D) in x's dtype and the last inputs (B, W - 1, D), the most recent one last."""
    B, L, D = x.shape
    exact = accumulator(x.dtype)
    weight, bias = (a if a is None else a.astype(exact) for a in (weight, bias))
    starts = jnp.zeros((B, L), bool) if segment_ids is None else resets(segment_ids, reverse)

    def step(window: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
        x, start = now
        window = jnp.where(start[:, None, None], jnp.zeros((), exact), window)
        window = jnp.concatenate((window, x.astype(exact)[:, None]), axis=1)  # (B, W, D)
        y = jnp.sum(window * weight.T, axis=1)
        y = y if bias is None else y + bias
        return window[:, 1:], y if activation is None else jax.nn.silu(y)

    first = jnp.zeros((B, weight.shape[1] - 1, D), exact)
    first = first if initial_state is None else initial_state
    over = (jnp.moveaxis(x, 1, 0), starts.T)
    last, y = lax.scan(step, first, over, reverse=reverse)
    return jnp.moveaxis(y, 0, 1).astype(x.dtype), last
