"""Decoding by its definition, attention with a mask: the oracle of the tests, never a default."""

import jax.numpy as jnp
from jax import Array

from tjk.ops.attention import reference


def decode(
    query: Array,
    key: Array,
    value: Array,
    lengths: Array,
    *,
    scale: float,
    left: int | None = None,
    soft_cap: float | None = None,
) -> tuple[Array, Array]:
    """Output (B, T, N, V) and logsumexp (B, T, N) in the inputs' dtype.

    Args:
        query: (B, T, N, H); query t stands at position p = lengths - T + t.
        key: (B, S, K, H), of which p - left to p are seen.
        value: (B, S, K, V).
        lengths: (B,) int32.
        scale: factor on the products of query and key.
        left: None is no bound.
        soft_cap: c of the logits c tanh(x / c); None is none.
    """
    T, S = query.shape[1], key.shape[1]
    s, t = jnp.arange(S, dtype=jnp.int32), jnp.arange(T, dtype=jnp.int32)
    position = jnp.clip(lengths, 0, S)[:, None, None, None] - T + t[:, None]
    visible = s <= position
    if left is not None:
        visible &= s >= position - min(left, S)  # int32

    def score(logits: Array, *_: Array) -> Array:
        return logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)

    output, logsumexp = reference.attention(
        *(query, key, value, None, visible, None, None),
        scale=scale,
        window=(None, None),
        score=score,
    )
    return output, jnp.moveaxis(logsumexp, 1, 2)
