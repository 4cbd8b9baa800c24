"""Masks of attention as functions of positions, and which tiles of T x S they leave empty.

A mask is a function `mask(b, h, q_idx, kv_idx)` of scalars that returns a bool: whether query q_idx
of batch b and head h sees key kv_idx. Those of this module combine: `causal & document(ids)`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from tjk import checks, elementwise

MaskFunction = Callable[[Array, Array, Array, Array], Array]

TILE = 64  # queries and keys of a tile whose kind is known
EMPTY, PARTIAL, FULL = 0, 1, 2
_INPUTS = {"b": "int32", "h": "int32", "q_idx": "int32", "kv_idx": "int32"}


@dataclasses.dataclass(frozen=True)
class Mask:
    """A mask that combines with others by `&`, `|` and `~`; calls are calls of its function."""

    function: MaskFunction

    def __call__(self, b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        return self.function(b, h, q_idx, kv_idx)

    def __and__(self, other: MaskFunction) -> "Mask":
        return Mask(lambda *at: self(*at) & other(*at))

    def __or__(self, other: MaskFunction) -> "Mask":
        return Mask(lambda *at: self(*at) | other(*at))

    def __invert__(self) -> "Mask":
        return Mask(lambda *at: ~self(*at))

    __rand__, __ror__ = __and__, __or__


causal = Mask(lambda b, h, q_idx, kv_idx: kv_idx <= q_idx)
"""A query sees the keys up to its own position, counted from the first one."""


def sliding_window(left: int, right: int) -> Mask:
    """A query sees `left` positions before its own, its own, and `right` behind it."""
    return Mask(lambda b, h, q_idx, kv_idx: (kv_idx >= q_idx - left) & (kv_idx <= q_idx + right))


def prefix_lm(n: ArrayLike) -> Mask:
    """All queries see the first `n` keys, and beyond those what `causal` lets them.

    Args:
        n: an int, or (B,) integers, one for each batch.
    """
    if jnp.ndim(n) not in (0, 1):
        checks.fail_value("prefix_lm", "n must be a number or have shape (B,)", jnp.shape(n))

    def function(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        return (kv_idx < (n if jnp.ndim(n) == 0 else jnp.asarray(n)[b])) | (kv_idx <= q_idx)

    return Mask(function)


def document(segment_ids: ArrayLike | tuple[ArrayLike, ArrayLike]) -> Mask:
    """A query sees the keys of its own document, in sequences packed of several.

    Args:
        segment_ids: (B, L) or (L,) integers that name the document of each position; a pair of
            such where queries and keys differ.
    """
    pair = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
    queries, keys = map(jnp.asarray, pair)
    for ids in (queries, keys):
        if ids.ndim not in (1, 2) or not jnp.issubdtype(ids.dtype, jnp.integer):
            rule = "segment_ids must be integers of shape (B, L) or (L,), or a pair of such"
            checks.fail_value("document", rule, f"{ids.dtype}{ids.shape}")

    def function(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        query = queries[q_idx] if queries.ndim == 1 else queries[b, q_idx]
        return query == (keys[kv_idx] if keys.ndim == 1 else keys[b, kv_idx])

    return Mask(function)


def dilated(stride: int) -> Mask:
    """A query sees every `stride`-th key, before and behind it, counted from its own position."""
    if stride < 1:
        checks.fail_value("dilated", "stride must be positive", stride)
    return Mask(lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) % stride == 0)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["kinds"], meta_fields=["T", "S"])
@dataclasses.dataclass(frozen=True)
class BlockMask:
    """What each tile of 64 queries and 64 keys is: empty (0), partly visible (1), or full (2).

    Attributes:
        kinds: (B, N, cdiv(T, 64), cdiv(S, 64)) int8; an axis B or N of 1 stands for all.
        T: number of queries.
        S: number of keys.
    """

    kinds: Array
    T: int
    S: int

    def visited(self) -> Array:
        """The share of tiles that attention visits."""
        return jnp.mean(self.kinds != EMPTY, dtype=jnp.float32)


def block_mask(
    mask: MaskFunction, T: int, S: int, *, batch: int | None = None, heads: int | None = None
) -> BlockMask:
    """Classifies the tiles of T x S once, for many calls of `flex_attention` with this mask.

    Args:
        mask: a function of four int32 scalars, b, h, q_idx and kv_idx, that returns a bool.
        T: number of queries.
        S: number of keys.
        batch: B, where the mask depends on b.
        heads: N, where the mask depends on h.

    Raises:
        TypeError, NotImplementedError: for a function that is no mask: see `flex_attention`.
        ValueError: where batch or heads is missing.

    Example:
        >>> from tjk.ops.masks import block_mask, sliding_window
        >>> float(block_mask(sliding_window(256, 0), 4096, 4096).visited())
        0.0750732421875
    """
    program, arrays = trace("block_mask", "mask", mask)
    for name, size in (("b", batch), ("h", heads)):
        if size is None and program.depends(name):
            word = {"b": "batch", "h": "heads"}[name]
            checks.fail_value(
                "block_mask", f"{word} must be given: the mask depends on {name}", None
            )
    return BlockMask(kinds(program, arrays, batch or 1, heads or 1, T, S), T, S)


def trace(op: str, name: str, mask: MaskFunction) -> tuple[elementwise.Program, tuple[Array, ...]]:
    """A mask as a program, and the arrays that it reads."""
    return elementwise.trace(op, name, mask, _INPUTS, "bool")


def kinds(
    mask: elementwise.Program, arrays: tuple[Any, ...], B: int, N: int, T: int, S: int
) -> Array:
    """The kinds of all tiles, (B, N, cdiv(T, 64), cdiv(S, 64)) int8, one row of tiles at a time.

    Axes B and N are 1 where the mask does not depend on them. Positions beyond T and S do not
    count: a tile is full if all of its other positions are visible.
    """
    B, N = B if mask.depends("b") else 1, N if mask.depends("h") else 1
    columns = -(-S // TILE)
    if 0 in (B, N, T, S):
        return jnp.zeros((B, N, -(-T // TILE), columns), jnp.int8)
    b, h, kv_idx = (jnp.arange(size, dtype=jnp.int32) for size in (B, N, columns * TILE))

    def row(i: Array) -> Array:
        q_idx = (i * TILE + jnp.arange(TILE, dtype=jnp.int32))[:, None]
        at = (b[:, None, None, None], h[:, None, None], jnp.minimum(q_idx, T - 1))
        visible = elementwise.evaluate(mask, (*at, jnp.minimum(kv_idx, S - 1)), arrays)
        outside = (q_idx >= T) | (kv_idx >= S)
        visible = jnp.broadcast_to(visible, (B, N, TILE, columns * TILE))
        shape = (B, N, TILE, columns, TILE)
        some = jnp.any((visible & ~outside).reshape(shape), (2, 4))
        every = jnp.all((visible | outside).reshape(shape), (2, 4))
        return jnp.where(every, FULL, jnp.where(some, PARTIAL, EMPTY)).astype(jnp.int8)

    rows = jax.lax.map(row, jnp.arange(-(-T // TILE), dtype=jnp.int32))
    return jnp.moveaxis(rows, 0, 2)
