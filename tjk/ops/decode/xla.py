"""Decoding in plain JAX: blocks of the cache, those alone that a length or window leaves.

A few queries have few logits, so one product over the whole cache would be as good for memory; but
it would read all of a cache that is seldom full, and copy it to put zeros in place of what is not
in use. The loop below copies a block and stops at the longest sequence.

Shapes: query (B, T, N, H), key (B, S, K, H), value (B, S, K, V), lengths (B,); inside, head n is
member g of the group of key head k.

Source: Milakov and Gimelshein, https://arxiv.org/abs/1805.02867.
"""

import jax.numpy as jnp
from jax import Array, lax

from tjk.precision import accumulator

_BLOCK = 1024  # keys: a product large enough to hide the cost of a loop's step


def forward(
    query: Array,
    key: Array,
    value: Array,
    lengths: Array,
    *,
    scale: float,
    left: int | None,
    soft_cap: float | None,
    precision: str,
) -> tuple[Array, Array]:
    """Output (B, T, N, V) and logsumexp (B, T, N); 0 and -inf in rows that see nothing."""
    B, T, N, H = query.shape
    _, S, K, V = value.shape
    dtype = accumulator(query.dtype)
    query = query.reshape(B, T, K, N // K, H)
    block = min(S, _BLOCK)
    lengths = jnp.clip(lengths, 0, S)
    positions = lengths[:, None] - T + jnp.arange(T, dtype=jnp.int32)  # (B, T)

    def dot(equation: str, lhs: Array, rhs: Array) -> Array:
        return jnp.einsum(equation, lhs, rhs, precision=precision, preferred_element_type=dtype)

    def step(i: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        maximum, total, output = state
        start = jnp.minimum(i * block, S - block)
        key_tile, value_tile = (
            lax.dynamic_slice_in_dim(x, start, block, axis=1) for x in (key, value)
        )
        s = start + jnp.arange(block, dtype=jnp.int32)
        visible = s <= positions[..., None]  # (B, T, block)
        if left is not None:
            visible &= s >= positions[..., None] - left
        if S % block:  # the last block was moved back until it fits
            visible &= s >= i * block
        seen = jnp.any(visible, 1)[:, :, None, None]
        logits = dot("btkgh,bskh->btkgs", query, key_tile) * scale
        if soft_cap is not None:
            logits = soft_cap * jnp.tanh(logits / soft_cap)
        logits = jnp.where(visible[:, :, None, None], logits, -jnp.inf)
        new_maximum = jnp.maximum(maximum, jnp.max(logits, axis=-1))
        # Where a row has seen nothing yet, subtract 0: -inf - -inf would be NaN.
        shift = jnp.where(new_maximum == -jnp.inf, 0, new_maximum)
        weights = jnp.exp(logits - shift[..., None])
        decay = jnp.exp(maximum - shift)
        total = total * decay + jnp.sum(weights, axis=-1)
        # What nobody sees has weight 0, and 0 times NaN would be NaN.
        values = jnp.where(seen, value_tile, 0)
        product = dot("btkgs,bskv->btkgv", weights.astype(value.dtype), values)
        return new_maximum, total, output * decay[..., None] + product

    # Like query also in what `jax.shard_map` knows of it: over which devices it varies.
    zeros = jnp.zeros_like(query, dtype, shape=(*query.shape[:4], V))
    state = (jnp.full_like(zeros[..., 0], -jnp.inf), zeros[..., 0], zeros)
    if B and T and S:
        first = 0 if left is None else jnp.maximum(jnp.min(positions) - left, 0) // block
        state = lax.fori_loop(first, -(-jnp.max(lengths) // block), step, state)
    maximum, total, output = state
    output /= jnp.where(total == 0, 1, total)[..., None]
    logsumexp = maximum + jnp.log(total)
    return output.reshape(B, T, N, V).astype(query.dtype), logsumexp.reshape(B, T, N)
