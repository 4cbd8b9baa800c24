"""GroupNorm by its definition: the oracle of the tests."""

import jax
import jax.numpy as jnp
from jax import Array

from tjk.precision import accumulator


def group_norm(
    x: Array, scale: Array, bias: Array, *, groups: int, epsilon: float, activation: str | None
) -> Array:
    """y (B, *spatial, C) in x's dtype."""
    exact = accumulator(x.dtype)
    values = x.astype(exact).reshape(len(x), -1, groups, x.shape[-1] // groups)
    deviation = values - values.mean((1, 3), keepdims=True)
    variance = jnp.square(deviation).mean((1, 3), keepdims=True)
    y = (deviation / jnp.sqrt(variance + epsilon)).reshape(x.shape)
    y = y * scale.astype(exact) + bias.astype(exact)
    return (jax.nn.silu(y) if activation == "silu" else y).astype(x.dtype)
