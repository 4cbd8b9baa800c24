"""Attention in plain JAX, tile by tile, without an array of T x S.

    x = scale query key^T + bias                       logits = score(x), -inf where not visible
    logsumexp = log(exp(sinks) + rowsum(exp(logits)))  P = exp(logits - logsumexp)
    output = keep P value

    d_value = (keep P)^T d_output                      dP = keep (d_output value^T)
    delta = rowsum(output d_output) - d_logsumexp      dS = P (dP - delta)
    d_bias = dx = score'(x) dS                         d_query = scale dx key
                                                       d_key = scale dx^T query

where score, sinks and keep are optional: keep is 0 for dropped weights, else 1 / (1 - rate).

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
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from tjk import elementwise
from tjk.elementwise import Derivative
from tjk.ops import masks
from tjk.ops.attention.operands import Operands, Options
from tjk.precision import accumulator


def forward(operands: Operands, options: Options) -> tuple[Array, Array]:
    """Output and logsumexp (B, N, T); 0 and -inf in rows that see nothing."""
    B, T, N, _ = operands.query.shape
    K, V = operands.value.shape[2:]
    tiles = _Tiles.of(operands, options)
    query = _split_heads(_by_head(operands.query, operands.query_lengths), K)
    key, value = (_by_head(x, operands.key_lengths) for x in (operands.key, operands.value))

    def tile_row(i, results):
        query_tile = tiles.rows(query, i)

        def tile(j, state):
            maximum, total, output = state
            logits = tiles.logits(tiles.products(query_tile, tiles.columns(key, j), i, j), i, j)
            new_maximum = jnp.maximum(maximum, jnp.max(logits, axis=-1, initial=-jnp.inf))
            # Where a row has seen nothing yet, subtract 0: -inf - -inf would be NaN.
            shift = jnp.where(new_maximum == -jnp.inf, 0, new_maximum)
            weights = jnp.exp(logits - shift[..., None])
            decay = jnp.exp(maximum - shift)
            total = total * decay + jnp.sum(weights, axis=-1)
            weights = tiles.drop(weights, i, j).astype(value.dtype)
            product = tiles.dot("bkgts,bksv->bkgtv", weights, tiles.columns(value, j))
            return new_maximum, total, output * decay[..., None] + product

        zeros = jnp.zeros_like(query_tile, tiles.dtype, shape=(*query_tile.shape[:4], V))
        state = (jnp.full_like(zeros[..., 0], -jnp.inf), zeros[..., 0], zeros)
        if operands.sinks is not None:  # a key without a value, seen first
            sinks = _split_heads(operands.sinks.astype(tiles.dtype)[None, :, None], K)
            state = (zeros[..., 0] + sinks, zeros[..., 0] + 1, zeros)
        maximum, total, output = tiles.loop(i, tile, state)
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
    if operands.sinks is not None and operands.query_lengths is not None:
        inside = jnp.arange(T, dtype=jnp.int32) < operands.query_lengths[:, None, None]
        logsumexp = jnp.where(inside, logsumexp, -jnp.inf)
    return jnp.swapaxes(output.astype(query.dtype), 1, 2), logsumexp


def backward(
    operands: Operands, logsumexp: Array, delta: Array, d_output: Array, options: Options
) -> Operands:
    """The gradients of all operands but the sinks, always the same bits."""
    B, T, N, H = operands.query.shape
    _, S, K, V = operands.value.shape
    tiles = _Tiles.of(operands, options)
    query, d_output = (
        _split_heads(_by_head(x, operands.query_lengths), K) for x in (operands.query, d_output)
    )
    logsumexp, delta = _split_heads(logsumexp, K), _split_heads(delta, K)
    key, value = (_by_head(x, operands.key_lengths) for x in (operands.key, operands.value))
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
            d_query_tile, d_key, d_value, d_bias, d_arrays = gradients
            s = tiles.first_column(j)
            key_tile = tiles.columns(key, j)
            products = tiles.products(query_tile, key_tile, i, j)
            weights = jnp.exp(tiles.logits(products, i, j) - logsumexp_tile)
            d_weights = tiles.dot("bkgtv,bksv->bkgts", d_output_tile, tiles.columns(value, j))
            d_logits = weights * (tiles.drop(d_weights, i, j) - delta_tile)
            d_products, d_arrays = tiles.back_through_score(
                products, d_logits, weights > 0, d_arrays, i, j
            )
            if d_bias is not None:
                by_head = d_products.reshape(B, N, *d_products.shape[3:])
                d_bias = _add_at(d_bias, (0, 0, t, s), by_head)
            weights = tiles.drop(weights, i, j).astype(value.dtype)
            d_products = d_products.astype(query.dtype)
            # Transposed, (V, S) and (H, S), the large operand is used as it lies in memory.
            d_value_tile = tiles.dot("bkgtv,bkgts->bkvs", d_output_tile, weights)
            d_key_tile = tiles.dot("bkgth,bkgts->bkhs", query_tile, d_products)
            return (
                d_query_tile + tiles.dot("bkgts,bksh->bkgth", d_products, key_tile),
                _add_at(d_key, (0, 0, 0, s), d_key_tile),
                _add_at(d_value, (0, 0, 0, s), d_value_tile),
                d_bias,
                d_arrays,
            )

        d_query, *rest = gradients
        state = (jnp.zeros_like(query_tile, tiles.dtype), *rest)
        d_query_tile, *rest = tiles.loop(i, tile, state)
        return _add_at(d_query, (0, 0, 0, t, 0), d_query_tile), *rest

    def zeros(shape: tuple[int, ...]) -> Array:
        return jnp.zeros_like(query, tiles.dtype, shape=shape)  # varies as query in shard_map

    gradients = (
        *(zeros(shape) for shape in (query.shape, (B, K, H, S), (B, K, V, S))),
        None if operands.bias is None else zeros(operands.bias.shape),
        {i: zeros(operands.score_arrays[i].shape) for i in tiles.differentiable},
    )
    gradients = lax.fori_loop(0, tiles.row_count, tile_row, gradients)
    d_query, d_key, d_value, d_bias, d_arrays = gradients
    return Operands(
        query=(d_query * options.scale).astype(query.dtype).reshape(B, N, T, H).swapaxes(1, 2),
        key=(d_key * options.scale).astype(key.dtype).transpose(0, 3, 1, 2),
        value=d_value.astype(value.dtype).transpose(0, 3, 1, 2),
        bias=None if operands.bias is None else d_bias.astype(operands.bias.dtype),
        score_arrays=tuple(
            d_arrays[number].astype(x.dtype) if number in d_arrays else None
            for number, x in enumerate(operands.score_arrays)
        ),
        mask_arrays=(None,) * len(operands.mask_arrays),
        keep_arrays=(None,) * len(operands.keep_arrays),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tiles:
    """How T x S is cut into equal tiles, and the logits of one of them.

    A last tile that would stick out is moved back until it fits; what it then shares with the tile
    before counts there only.
    """

    operands: Operands
    options: Options
    T: int
    S: int
    K: int
    row_count: int
    column_count: int
    block_t: int
    block_s: int
    dtype: Any
    derivative: Derivative | None

    @classmethod
    def of(cls, operands: Operands, options: Options) -> "_Tiles":
        B, T, N, _ = operands.query.shape
        S, K = operands.key.shape[1:3]
        score = options.modifiers.score
        (row_count, block_t), (column_count, block_s) = _blocks(B * N, T, S)
        return cls(
            operands=operands,
            options=options,
            T=T,
            S=S,
            K=K,
            row_count=row_count,
            column_count=column_count,
            block_t=block_t,
            block_s=block_s,
            dtype=accumulator(operands.query.dtype),
            derivative=None if score is None else elementwise.derivative(score, "score"),
        )

    @property
    def differentiable(self) -> tuple[int, ...]:
        """The numbers of the arrays of the score that have gradients."""
        return () if self.derivative is None else self.derivative.arrays

    def dot(self, equation: str, lhs: Array, rhs: Array) -> Array:
        precision = self.options.precision
        return jnp.einsum(
            equation, lhs, rhs, precision=precision, preferred_element_type=self.dtype
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

    def loop(self, i: Any, step: Callable[[Any, Any], Any], state: Any) -> Any:
        """Steps through the tiles of row i that are not empty."""
        kinds = self.operands.kinds
        if kinds is None:
            return lax.fori_loop(*self._visible_columns(i), step, state)
        known = jnp.any(kinds != masks.EMPTY, (0, 1))
        # As many as a tile may touch: their first one may begin before it.
        shape = [
            min(n, b // masks.TILE + 2) for n, b in zip(known.shape, (self.block_t, self.block_s))
        ]

        def visit(j: Any, state: Any) -> Any:
            first = (self.first_row(i) // masks.TILE, self.first_column(j) // masks.TILE)
            some = jnp.any(lax.dynamic_slice(known, first, shape))
            return lax.cond(some, functools.partial(step, j), lambda state: state, state)

        return lax.fori_loop(*self._visible_columns(i), visit, state)

    def _visible_columns(self, i: Any) -> tuple[Any, Any]:
        """First tile column, and the one after the last, that tile row i sees."""
        left, right = self.options.window
        first: Any = 0
        end: Any = self.column_count
        if left is not None:
            first = jnp.clip((self.first_row(i) - left) // self.block_s, 0, self.column_count)
        if right is not None:
            last_key = self.first_row(i) + self.block_t - 1 + right
            end = jnp.clip(last_key // self.block_s + 1, 0, self.column_count)
        return first, end

    def products(self, query: Array, key: Array, i: Any, j: Any) -> Array:
        """Scaled products plus bias of a tile, (B, K, G, block_t, block_s)."""
        products = self.dot("bkgth,bksh->bkgts", query, key) * self.options.scale
        if self.operands.bias is not None:
            products += self._tile(self.operands.bias, i, j).astype(self.dtype)
        return products

    def logits(self, products: Array, i: Any, j: Any) -> Array:
        """The logits of tile i, j, -inf where a key is not visible."""
        score = self.options.modifiers.score
        logits = products
        if score is not None:
            at = (products, *self._positions(i, j))
            logits = elementwise.evaluate(score, at, self.operands.score_arrays)
        for condition in self._visible(i, j):
            logits = jnp.where(condition, logits, -jnp.inf)
        return logits

    def back_through_score(
        self,
        products: Array,
        d_logits: Array,
        used: Array,
        d_arrays: dict[int, Array],
        i: Any,
        j: Any,
    ) -> tuple[Array, dict[int, Array]]:
        """The gradient of the products of tile i, j, and d_arrays with those of what it read.

        Where a weight is 0 `used` is false: no gradient, whatever the slope of the score.
        """
        if self.derivative is None:
            return d_logits, d_arrays
        at = (products, *self._positions(i, j), d_logits)
        outputs = elementwise.evaluate(self.derivative.program, at, self.operands.score_arrays)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        d_products, reads = self.derivative.split(outputs)
        d_arrays = dict(d_arrays)
        for number, gradient, indices in reads:
            gradient = jnp.where(used, gradient, 0)
            # What reads one element is summed before it is added there.
            shape = jnp.broadcast_shapes((1,) * gradient.ndim, *map(jnp.shape, indices))
            axes = tuple(axis for axis, size in enumerate(shape) if size == 1)
            gradient = jnp.sum(gradient, axes, keepdims=True)
            if indices:
                inside = elementwise.clamped(indices, d_arrays[number].shape)
                place = d_arrays[number].at[tuple(jnp.broadcast_to(i, shape) for i in inside)]
                d_arrays[number] = place.add(gradient, mode="promise_in_bounds")
            else:
                d_arrays[number] += gradient.reshape(())
        return jnp.where(used, d_products, 0), d_arrays

    def drop(self, x: Array, i: Any, j: Any) -> Array:
        """Weights of tile i, j, or their gradients, after dropout."""
        modifiers = self.options.modifiers
        if modifiers.keep is None:
            return x
        arrays = self.operands.keep_arrays
        keep = elementwise.evaluate(modifiers.keep, self._positions(i, j), arrays)
        return jnp.where(keep, x * modifiers.keep_scale, 0)

    def _positions(self, i: Any, j: Any) -> tuple[Array, Array, Array, Array]:
        """b, h, q_idx and kv_idx of tile i, j, each along its own axes of (B, K, G, T, S)."""
        B, _, N, _ = self.operands.query.shape
        b = jnp.arange(B, dtype=jnp.int32)[:, None, None, None, None]
        h = jnp.arange(N, dtype=jnp.int32).reshape(1, self.K, N // self.K, 1, 1)
        t = self.first_row(i) + jnp.arange(self.block_t, dtype=jnp.int32)
        s = self.first_column(j) + jnp.arange(self.block_s, dtype=jnp.int32)
        return b, h, t.reshape(1, 1, 1, -1, 1), s.reshape(1, 1, 1, 1, -1)

    def _visible(self, i: Any, j: Any) -> Iterator[Array]:
        """Conditions under which a key of tile i, j is visible; as few as the arguments allow."""
        at = _, _, t, s = self._positions(i, j)
        left, right = self.options.window
        operands, mask = self.operands, self.options.modifiers.mask
        if self.column_count * self.block_s > self.S:
            yield s >= j * self.block_s
        if left is not None:
            yield s >= t - left
        if right is not None:
            yield s <= t + right
        if operands.query_lengths is not None:
            yield t < operands.query_lengths[:, None, None, None, None]
        if operands.key_lengths is not None:
            yield s < operands.key_lengths[:, None, None, None, None]
        if operands.mask is not None:
            yield self._tile(operands.mask, i, j)
        if mask is not None:
            yield elementwise.evaluate(mask, at, operands.mask_arrays)
        elif operands.kinds is not None:
            rows = jnp.take(operands.kinds, t.reshape(-1) // masks.TILE, 2)
            kinds = jnp.take(rows, s.reshape(-1) // masks.TILE, 3)
            yield _split_heads(kinds != masks.EMPTY, self.K)

    def _tile(self, array: Array, i: Any, j: Any) -> Array:
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
