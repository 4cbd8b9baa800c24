"""Layers that the suites share, as pure functions of (params, x).

`init_*` makes the parameters (float32); the layer itself computes in the dtype of `x`: operands of
matrix products are rounded to it, statistics stay in float32 (float64 for float64 input).
"""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

from tjk.checks import check_dtype
from tjk.ops import flash_attention

Params = dict[str, Array]
Attention = Callable[[Array, Array, Array], Array]
Implementation = Literal["triton", "xla", "jax_xla", "jax_cudnn"] | Attention | None


def at_least_float32(x: Array) -> Array:
    """x in float32, or as it is in float64: the dtype of statistics and sums."""
    return x if x.dtype == jnp.float64 else x.astype(jnp.float32)


def init_linear(key: Array, features_in: int, features_out: int, *, bias: bool = True) -> Params:
    """Weight (I, O) ~ N(0, 1/I), truncated at two standard deviations; bias (O,) zero."""
    weight = jax.nn.initializers.lecun_normal()(key, (features_in, features_out), jnp.float32)
    return {"weight": weight} | ({"bias": jnp.zeros((features_out,), jnp.float32)} if bias else {})


def linear(params: Params, x: Array) -> Array:
    """x W + b, or x W, over the last axis: (..., I) -> (..., O)."""
    if "bias" not in params:
        return x @ params["weight"].astype(x.dtype)
    # The sum is float32 so that its transpose, which adds up the bias's gradient over all tokens,
    # is too: in bfloat16 that sum loses every digit (12 % off after 2048 tokens on a CPU).
    product = at_least_float32(x @ params["weight"].astype(x.dtype))
    return (product + params["bias"].astype(product.dtype)).astype(x.dtype)


def init_layer_norm(width: int) -> Params:
    """Scale (D,) one, bias (D,) zero."""
    return {"scale": jnp.ones((width,), jnp.float32), "bias": jnp.zeros((width,), jnp.float32)}


def layer_norm(params: Params, x: Array, *, epsilon: float) -> Array:
    """(x - mean) / sqrt(variance + epsilon) * scale + bias over the last axis of (..., D).

    Ba, Kiros, Hinton: Layer Normalization, https://arxiv.org/abs/1607.06450
    """
    y = at_least_float32(x)
    y = y - y.mean(axis=-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.square(y).mean(axis=-1, keepdims=True) + epsilon)
    return (y * params["scale"].astype(y.dtype) + params["bias"].astype(y.dtype)).astype(x.dtype)


def rms_norm(params: Params, x: Array, *, epsilon: float) -> Array:
    """x / sqrt(mean of x^2 + epsilon) * scale over the last axis of (..., D).

    Zhang, Sennrich: Root Mean Square Layer Normalization, https://arxiv.org/abs/1910.07467
    """
    y = at_least_float32(x)
    y = y * jax.lax.rsqrt(jnp.square(y).mean(axis=-1, keepdims=True) + epsilon)
    return (y * params["scale"].astype(y.dtype)).astype(x.dtype)


def attention(query: Array, key: Array, value: Array, *, implementation: Implementation) -> Array:
    """softmax(query key^T / sqrt(H)) value per head: three times (B, T, N, H) -> (B, T, N, H).

    None, "triton" and "xla" are `tjk.ops.flash_attention`; "jax_xla" and "jax_cudnn" are the
    baselines of `jax.nn.dot_product_attention`; a function of (query, key, value) is called as is.

    Raises:
        TypeError: "jax_cudnn" with inputs that are neither bfloat16 nor float16.
        ValueError: an unknown implementation.
    """
    if callable(implementation):
        return implementation(query, key, value)
    if implementation == "jax_xla":
        return jax.nn.dot_product_attention(query, key, value, implementation="xla")
    if implementation == "jax_cudnn":
        # Checked here because jax looks for cuDNN first, and where there is none hides the cause.
        check_dtype("attention with 'jax_cudnn'", "query", query, ("bfloat16", "float16"))
        return jax.nn.dot_product_attention(query, key, value, implementation="cudnn")
    return flash_attention(query, key, value, implementation=implementation)
