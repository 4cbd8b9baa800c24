"""Attention in plain JAX, tile by tile, without an array of T x S.

    logits = scale query key^T + bias, and -inf where a key is not visible
    logsumexp = log(rowsum(exp(logits)))           P = exp(logits - logsumexp)
    output = P value

    d_value = P^T d_output                         dP = d_output value^T
    delta = rowsum(output d_output) - d_logsumexp  dS = P (dP - delta)
    d_query = scale dS key      d_key = scale dS^T query      d_bias = dS

Shapes: query (B, T, N, H), key (B, S, K, H), value (B, S, K, V), output (B, T, N, V), logsumexp
(B, N, T); bias and mask (B, N, T, S) with each axis full or 1; lengths (B,). Inside, head n is
member g of the group of key head k, N = K G, and axes are ordered (B, K, G, T, H): a tile is one
batched matrix product, and no key is repeated.

Dtypes: P and dS are rounded to the operands' dtype before their products. Sums and statistics are
float32, or float64 where the operands are.

Sources: the running maximum and sum of the forward, Milakov and Gimelshein,
https://arxiv.org/abs/1805.02867; P computed again in the backward, Dao et al.,
https://arxiv.org/abs/2205.14135.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

Window = tuple[int | None, int | None]


def forward(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None,
    mask: Array | None,
    query_lengths: Array | None,
    key_lengths: Array | None,
    *,
    scale: float,
    window: Window,
    precision: Any,
) -> tuple[Array, Array]:
    """Output and logsumexp; 0 and -inf in rows that see nothing."""
    B, T, N, _ = query.shape
    K, V = value.shape[2:]
    lengths = (query_lengths, key_lengths)
    tiles = _Tiles.of(query, key, bias, mask, lengths, scale, window, precision)
    query = _split_heads(_by_head(query, query_lengths), K)
    key, value = _by_head(key, key_lengths), _by_head(value, key_lengths)

    def tile_row(i, results):
        query_tile = tiles.rows(query, i)

        def tile(j, state):
            maximum, total, output = state
            logits = tiles.logits(query_tile, tiles.columns(key, j), i, j)
            new_maximum = jnp.maximum(maximum, jnp.max(logits, axis=-1, initial=-jnp.inf))
            # Where a row has seen nothing yet, subtract 0: -inf - -inf would be NaN.
            shift = jnp.where(new_maximum == -jnp.inf, 0, new_maximum)
            weights = jnp.exp(logits - shift[..., None])
            decay = jnp.exp(maximum - shift)
            total = total * decay + jnp.sum(weights, axis=-1)
            weights = weights.astype(value.dtype)
            product = tiles.dot("bkgts,bksv->bkgtv", weights, tiles.columns(value, j))
            return new_maximum, total, output * decay[..., None] + product

        zeros = jnp.zeros_like(query_tile, tiles.dtype, shape=(*query_tile.shape[:4], V))
        state = (jnp.full_like(zeros[..., 0], -jnp.inf), zeros[..., 0], zeros)
        maximum, total, output = lax.fori_loop(*tiles.visible_columns(i), tile, state)
        output /= jnp.where(total == 0, 1, total)[..., None]
        outputs, logsumexps = results
        return (
            lax.dynamic_update_slice_in_dim(outputs, output, tiles.first_row(i), axis=3),
            lax.dynamic_update_slice_in_dim(
                logsumexps, maximum + jnp.log(total), tiles.first_row(i), axis=3
            ),
        )

    # In float32: XLA's CPU compiler would widen and round all of a bfloat16 array at each update.
    # Like query also in what `jax.shard_map` knows of it: over which devices it varies.
    outputs = jnp.zeros_like(query, tiles.dtype, shape=(*query.shape[:4], V))
    logsumexps = jnp.zeros_like(query, tiles.dtype, shape=query.shape[:4])
    output, logsumexp = lax.fori_loop(0, tiles.row_count, tile_row, (outputs, logsumexps))
    output, logsumexp = output.reshape(B, N, T, V), logsumexp.reshape(B, N, T)
    return jnp.swapaxes(output.astype(query.dtype), 1, 2), logsumexp


def backward(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None,
    mask: Array | None,
    query_lengths: Array | None,
    key_lengths: Array | None,
    output: Array,
    logsumexp: Array,
    d_output: Array,
    d_logsumexp: Array,
    *,
    scale: float,
    window: Window,
    precision: Any,
    deterministic: bool,
) -> tuple[Array, Array, Array, Array | None]:
    """Gradients of query, key, value and bias, always the same bits."""
    del deterministic
    B, T, N, H = query.shape
    _, S, K, V = value.shape
    lengths = (query_lengths, key_lengths)
    tiles = _Tiles.of(query, key, bias, mask, lengths, scale, window, precision)
    query, output, d_output = (
        _split_heads(_by_head(x, query_lengths), K) for x in (query, output, d_output)
    )
    logsumexp, d_logsumexp = _split_heads(logsumexp, K), _split_heads(d_logsumexp, K)
    key, value = _by_head(key, key_lengths), _by_head(value, key_lengths)
    delta = jnp.sum(output.astype(tiles.dtype) * d_output.astype(tiles.dtype), axis=-1)
    delta -= d_logsumexp.astype(tiles.dtype)
    # In a row that saw nothing P is exp(logits - inf) = 0, and so is dS as long as delta is finite.
    empty = logsumexp == -jnp.inf
    delta, logsumexp = jnp.where(empty, 0, delta), jnp.where(empty, jnp.inf, logsumexp)

    def tile_row(i, gradients):
        t = tiles.first_row(i)
        query_tile, d_output_tile = tiles.rows(query, i), tiles.rows(d_output, i)
        delta_tile = tiles.rows(delta, i)[..., None]
        # Rows that the tile before has counted are empty in this one.
        is_new = t + jnp.arange(tiles.block_t, dtype=jnp.int32) >= i * tiles.block_t
        logsumexp_tile = jnp.where(is_new, tiles.rows(logsumexp, i), jnp.inf)[..., None]

        def tile(j, gradients):
            d_query_tile, d_key, d_value, d_bias = gradients
            s = tiles.first_column(j)
            key_tile = tiles.columns(key, j)
            weights = jnp.exp(tiles.logits(query_tile, key_tile, i, j) - logsumexp_tile)
            d_weights = tiles.dot("bkgtv,bksv->bkgts", d_output_tile, tiles.columns(value, j))
            d_logits = weights * (d_weights - delta_tile)
            if d_bias is not None:
                d_bias = _add_at(d_bias, (0, 0, t, s), d_logits.reshape(B, N, *d_logits.shape[3:]))
            weights, d_logits = weights.astype(value.dtype), d_logits.astype(query.dtype)
            # Transposed, (V, S) and (H, S), the large operand is used as it lies in memory.
            d_value_tile = tiles.dot("bkgtv,bkgts->bkvs", d_output_tile, weights)
            d_key_tile = tiles.dot("bkgth,bkgts->bkhs", query_tile, d_logits)
            return (
                d_query_tile + tiles.dot("bkgts,bksh->bkgth", d_logits, key_tile),
                _add_at(d_key, (0, 0, 0, s), d_key_tile),
                _add_at(d_value, (0, 0, 0, s), d_value_tile),
                d_bias,
            )

        d_query, *rest = gradients
        state = (jnp.zeros_like(query_tile, tiles.dtype), *rest)
        d_query_tile, *rest = lax.fori_loop(*tiles.visible_columns(i), tile, state)
        return _add_at(d_query, (0, 0, 0, t, 0), d_query_tile), *rest

    shapes = (query.shape, (B, K, H, S), (B, K, V, S), None if bias is None else bias.shape)
    gradients = tuple(
        None if shape is None else jnp.zeros_like(query, tiles.dtype, shape=shape)
        for shape in shapes
    )
    d_query, d_key, d_value, d_bias = lax.fori_loop(0, tiles.row_count, tile_row, gradients)
    return (
        (d_query * scale).astype(query.dtype).reshape(B, N, T, H).swapaxes(1, 2),
        (d_key * scale).astype(key.dtype).transpose(0, 3, 1, 2),
        d_value.astype(value.dtype).transpose(0, 3, 1, 2),
        None if bias is None else d_bias.astype(bias.dtype),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tiles:
    """How T x S is cut into equal tiles, and the logits of one of them.

    A last tile that would stick out is moved back until it fits; what it then shares with the tile
    before counts there only.
    """

    T: int
    S: int
    K: int
    row_count: int
    column_count: int
    block_t: int
    block_s: int
    window: Window
    bias: Array | None
    mask: Array | None
    lengths: tuple[Array | None, Array | None]
    scale: float
    precision: Any
    dtype: Any

    @classmethod
    def of(cls, query, key, bias, mask, lengths, scale, window, precision) -> "_Tiles":
        """Tiles for the arguments of `forward`."""
        B, T, N, _ = query.shape
        S, K = key.shape[1:3]
        (row_count, block_t), (column_count, block_s) = _blocks(B * N, T, S)
        left, right = window
        # A bound that excludes no key would cost a comparison for each logit; a huge one, int32.
        window = (
            None if left is None or left >= T - 1 else max(left, -S),
            None if right is None or right >= S - 1 else max(right, -T),
        )
        return cls(
            T=T,
            S=S,
            K=K,
            row_count=row_count,
            column_count=column_count,
            block_t=block_t,
            block_s=block_s,
            window=window,
            bias=bias,
            mask=mask,
            lengths=lengths,
            scale=scale,
            precision=precision,
            dtype=jnp.float64 if query.dtype == jnp.float64 else jnp.float32,
        )

    def dot(self, equation: str, lhs: Array, rhs: Array) -> Array:
        return jnp.einsum(
            equation, lhs, rhs, precision=self.precision, preferred_element_type=self.dtype
        )

    def first_row(self, i: Any) -> Any:
        return jnp.minimum(i * self.block_t, self.T - self.block_t)

    def first_column(self, j: Any) -> Any:
        return jnp.minimum(j * self.block_s, self.S - self.block_s)

    def rows(self, array: Array, i: Any) -> Array:
        """Tile row i of an array (B, K, G, T, ...)."""
        return lax.dynamic_slice_in_dim(array, self.first_row(i), self.block_t, axis=3)

    def columns(self, array: Array, j: Any) -> Array:
        """Tile column j of an array (B, K, S, ...)."""
        return lax.dynamic_slice_in_dim(array, self.first_column(j), self.block_s, axis=2)

    def visible_columns(self, i: Any) -> tuple[Any, Any]:
        """First tile column, and the one after the last, that tile row i sees."""
        left, right = self.window
        first: Any = 0
        end: Any = self.column_count
        if left is not None:
            first = jnp.clip((self.first_row(i) - left) // self.block_s, 0, self.column_count)
        if right is not None:
            last_key = self.first_row(i) + self.block_t - 1 + right
            end = jnp.clip(last_key // self.block_s + 1, 0, self.column_count)
        return first, end

    def logits(self, query: Array, key: Array, i: Any, j: Any) -> Array:
        """Logits (B, K, G, block_t, block_s) of tile i, j from its rows and columns."""
        logits = self.dot("bkgth,bksh->bkgts", query, key) * self.scale
        if self.bias is not None:
            logits += self.tile(self.bias, i, j).astype(self.dtype)
        for condition in self.visible(i, j):
            logits = jnp.where(condition, logits, -jnp.inf)
        return logits

    def visible(self, i: Any, j: Any) -> Iterator[Array]:
        """Conditions under which a key of tile i, j is visible; as few as the arguments allow."""
        t = self.first_row(i) + jnp.arange(self.block_t, dtype=jnp.int32)[:, None]
        s = self.first_column(j) + jnp.arange(self.block_s, dtype=jnp.int32)
        left, right = self.window
        query_lengths, key_lengths = self.lengths
        if self.column_count * self.block_s > self.S:
            yield s >= j * self.block_s
        if left is not None:
            yield s >= t - left
        if right is not None:
            yield s <= t + right
        if query_lengths is not None:
            yield t < query_lengths[:, None, None, None, None]
        if key_lengths is not None:
            yield s < key_lengths[:, None, None, None, None]
        if self.mask is not None:
            yield self.tile(self.mask, i, j)

    def tile(self, array: Array, i: Any, j: Any) -> Array:
        """Tile i, j (B, K, G, T, S) of an array (B, N, T, S); an axis of 1 stays as it is."""
        *heads, t, s = array.shape
        sizes = (*heads, min(t, self.block_t), min(s, self.block_s))
        # `dynamic_slice` moves a start on an axis of 1 back to 0.
        tile = lax.dynamic_slice(array, (0, 0, self.first_row(i), self.first_column(j)), sizes)
        return _split_heads(tile, self.K)


def _blocks(heads: int, T: int, S: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Number and size of the blocks of T and of S, for a tile that covers `heads` heads at once.

    The logits of a tile are about 2^20 elements, 4 MiB in float32: they stay in a cache, and are
    enough work for one matrix product. With many heads a tile is still 128 x 128 for each; with few
    it stops at 512 x 512. Where T is short, blocks of S are longer.
    """
    exponent = min(max(20 - max(heads - 1, 0).bit_length(), 14), 18)
    rows = _cut(T, 2 ** (exponent - exponent // 2))
    return rows, _cut(S, 2**exponent // max(rows[1], 1))


def _cut(length: int, largest: int) -> tuple[int, int]:
    """How many blocks of which size cover a length, all equal and none above the largest."""
    count = -(-length // largest)
    return count, -(-length // max(count, 1))


def _by_head(array: Array, lengths: Array | None) -> Array:
    """(B, T, N, W) to (B, N, T, W), with zeros beyond the lengths.

    What lies there has weight 0 in all products, and 0 times NaN would be NaN.
    """
    if lengths is not None:
        inside = jnp.arange(array.shape[1], dtype=jnp.int32) < lengths[:, None]
        array = jnp.where(inside[:, :, None, None], array, 0)
    return jnp.swapaxes(array, 1, 2)


def _split_heads(array: Array, K: int) -> Array:
    """(B, N, ...) to (B, K, G, ...); an N of 1 that stands for all heads to K = G = 1."""
    B, N, *rest = array.shape
    heads = (1, 1) if N == 1 else (K, N // K)
    return array.reshape(B, *heads, *rest)


def _add_at(array: Array, start: tuple[Any, ...], update: Array) -> Array:
    """The array with an update added at a start, summed over axes on which the array has size 1."""
    axes = tuple(axis for axis, size in enumerate(array.shape) if size == 1)
    update = jnp.sum(update, axis=axes, keepdims=True)
    update += lax.dynamic_slice(array, start, update.shape)
    return lax.dynamic_update_slice(array, update, start)
