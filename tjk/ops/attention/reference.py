"""Attention by its textbook definition: the oracle of the tests, never a default.

    logits = score(scale query key^T + bias), and -inf where a key is not visible
    output = (softmax(logits) factors) value
    logsumexp = log(sum(exp(logits)))

where the softmax and the sum go over the sinks, too, if there are any.

Source: Vaswani et al. 2017, https://arxiv.org/abs/1706.03762.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array


def attention(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None,
    mask: Array | None,
    query_lengths: Array | None,
    key_lengths: Array | None,
    *,
    scale: float,
    window: tuple[int | None, int | None],
    score: Callable[..., Array] | None = None,
    sinks: Array | None = None,
    factors: Array | None = None,
) -> tuple[Array, Array]:
    """Attention and its logsumexp in the inputs' dtype, differentiable by JAX.

    Args:
        query: (B, T, N, H).
        key: (B, S, K, H), N a multiple of K: head n of the query reads head n // (N / K).
        value: (B, S, K, V).
        bias: (B, N, T, S) with each axis full or 1, or None.
        mask: bool, shapes as for bias, or None: True where a key is visible.
        query_lengths: (B,) int32, or None: rows from there on see nothing.
        key_lengths: (B,) int32, or None: keys from there on are not visible.
        scale: factor on the products of query and key.
        window: (left, right), each may be None: key s is visible from query t where
            t - left <= s <= t + right.
        score: function of the logits and of b, n, t, s, int32 that broadcast to (B, N, T, S).
        sinks: (N,), logits of one key more for each head, which has no value.
        factors: (B, N, T, S) of the weights after the softmax: dropout.

    Returns:
        Output (B, T, N, V) and logsumexp (B, N, T); 0 and -inf in rows that see nothing.
    """
    B, T, N, _ = query.shape
    S = key.shape[1]
    key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
    logits = jnp.einsum("btnh,bsnh->bnts", query, key) * scale
    if bias is not None:
        logits += bias.astype(logits.dtype)
    if score is not None:
        logits = score(logits, *jnp.ogrid[:B, :N, :T, :S])
    logits = jnp.where(_visible(T, S, mask, query_lengths, key_lengths, window), logits, -jnp.inf)
    if sinks is not None:
        alone = jnp.broadcast_to(sinks.astype(logits.dtype)[:, None, None], (B, N, T, 1))
        if query_lengths is not None:
            inside = jnp.arange(T)[:, None] < query_lengths[:, None, None, None]
            alone = jnp.where(inside, alone, -jnp.inf)
        logits = jnp.concatenate((logits, alone), -1)
    seen = jnp.any(logits != -jnp.inf, axis=-1, keepdims=True)
    # 0 before and after the softmax: the gradient of either branch must be finite.
    finite = jnp.where(seen, logits, 0)
    weights = jnp.where(seen, jax.nn.softmax(finite, axis=-1), 0)
    logsumexp = jnp.where(seen[..., 0], jax.nn.logsumexp(finite, axis=-1), -jnp.inf)
    weights = weights[..., :S]
    if factors is not None:
        weights *= factors.astype(weights.dtype)
    return jnp.einsum("bnts,bsnv->btnv", weights, value), logsumexp


def _visible(T, S, mask, query_lengths, key_lengths, window) -> Array:
    """Which keys are visible, (B, N, T, S) with axes that may be 1."""
    t, s = jnp.arange(T, dtype=jnp.int32)[:, None], jnp.arange(S, dtype=jnp.int32)
    left, right = (None if x is None else min(max(x, -T - S), T + S) for x in window)  # int32
    visible = jnp.ones((1, 1, T, S), bool)
    if left is not None:
        visible &= s >= t - left
    if right is not None:
        visible &= s <= t + right
    if query_lengths is not None:
        visible &= t < query_lengths[:, None, None, None]
    if key_lengths is not None:
        visible &= s < key_lengths[:, None, None, None]
    return visible if mask is None else visible & mask
