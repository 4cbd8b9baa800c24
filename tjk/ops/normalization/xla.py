"""GroupNorm in plain JAX, with the Triton kernels' residuals."""

import jax
import jax.numpy as jnp
from jax import Array

from tjk.precision import accumulator


def forward(
    x: Array, scale: Array, bias: Array, *, groups: int, epsilon: float, activation: str | None
) -> tuple[Array, Array, Array]:
    """y (B, S, C); mean and 1 / sqrt(variance + epsilon), (B, groups)."""
    exact = x.astype(accumulator(x.dtype))
    mean = _group_mean(exact, groups)
    deviation = exact - _by_channel(mean, x.shape)
    variance = _group_mean(jnp.square(deviation), groups)
    rstd = jax.lax.rsqrt(variance + epsilon)
    y = deviation * (_by_channel(rstd, x.shape) * scale) + bias
    y = jax.nn.silu(y) if activation == "silu" else y
    return y.astype(x.dtype), mean, rstd


def backward(
    x: Array,
    scale: Array,
    bias: Array,
    mean: Array,
    rstd: Array,
    d_y: Array,
    *,
    groups: int,
    activation: str | None,
) -> tuple[Array, Array, Array]:
    """The gradients of x, scale and bias."""
    S = x.shape[1]
    xhat = (x.astype(mean.dtype) - _by_channel(mean, x.shape)) * _by_channel(rstd, x.shape)
    d_y = d_y.astype(mean.dtype)
    if activation == "silu":
        (d_y,) = jax.vjp(jax.nn.silu, xhat * scale + bias)[1](d_y)
    d_scale, d_bias = jnp.sum(d_y * xhat, 1), jnp.sum(d_y, 1)  # (B, C)
    total, moment = (_channel_mean(scale * a / S, groups) for a in (d_bias, d_scale))
    total, moment = (_by_channel(a, x.shape) for a in (total, moment))
    d_x = _by_channel(rstd, x.shape) * (scale * d_y - total - xhat * moment)
    return d_x.astype(x.dtype), jnp.sum(d_scale, 0), jnp.sum(d_bias, 0)


def _group_mean(x: Array, groups: int) -> Array:
    """(B, S, C) -> (B, groups); over positions first, which is a sum of rows."""
    return _channel_mean(jnp.mean(x, 1), groups)


def _channel_mean(x: Array, groups: int) -> Array:
    """(B, C) -> (B, groups)."""
    return jnp.mean(x.reshape(len(x), groups, -1), 2)


def _by_channel(x: Array, shape: tuple[int, ...]) -> Array:
    """(B, groups) -> (B, 1, C)."""
    return jnp.repeat(x, shape[-1] // x.shape[1], 1)[:, None]
