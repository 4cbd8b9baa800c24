"""Programs for what `flash_attention` names: soft cap, bias, mask, segments, dropout."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from tjk import elementwise
from tjk.elementwise import Program
from tjk.ops import masks

_OP = "flash_attention"
_POSITIONS = {"b": "int32", "h": "int32", "q_idx": "int32", "kv_idx": "int32"}

# A program, and the arrays that it reads.
Traced = tuple[Program, tuple[Array, ...]]


def trace_score(op: str, score: Any, dtype: jnp.dtype) -> Traced:
    """A function of (score, b, h, q_idx, kv_idx) as a program."""
    inputs = {"score": str(dtype)} | _POSITIONS
    return elementwise.trace(op, "score_mod", score, inputs, str(dtype))


def soft_cap(cap: float, dtype: jnp.dtype) -> Program:
    """cap tanh(x / cap)."""

    def capped(x: Array, *at: Array) -> Array:
        return cap * jnp.tanh(x / cap)

    return trace_score(_OP, capped, dtype)[0]


def with_bias(score: Program | None, bias: Array) -> Traced:
    """A score, which reads no array, of what a bias (B, N, T, S), axes full or 1, is added to."""

    def biased(x: Array, *at: Array) -> Array:
        x = x + _element(bias, at).astype(x.dtype)
        return x if score is None else elementwise.evaluate(score, (x, *at), ())

    return trace_score(_OP, biased, jnp.dtype(jnp.float32))


def with_mask(mask: Program | None, arrays: tuple[Array, ...], array: Array) -> Traced:
    """A mask that also asks a mask (B, N, T, S), axes full or 1."""

    def masked(*at: Array) -> Array:
        visible = _element(array, at)
        return visible if mask is None else visible & elementwise.evaluate(mask, at, arrays)

    return masks.trace(_OP, "mask", masked)


def _element(x: Array, at: tuple[Array, ...]) -> Array:
    return x[tuple(0 if size == 1 else i for size, i in zip(x.shape, at))]


def segments(
    ids: tuple[Array, Array], window: tuple[int | None, int | None] = (None, None)
) -> Traced:
    """Whether query and key belong to one segment, and the key is inside of the window."""
    left, right = window
    mask = masks.document(ids)
    if left is not None:
        mask &= lambda b, h, q_idx, kv_idx: kv_idx >= q_idx - left
    if right is not None:
        mask &= lambda b, h, q_idx, kv_idx: kv_idx <= q_idx + right
    return masks.trace(_OP, "segment_ids", mask)


def dropout(rate: float, key: Array) -> Traced:
    """Whether a weight is kept: a hash of its place and of the key, so that nothing is stored.

    Batch, head and query position are mixed one after the other into the first word of the key,
    which is work for a row only, and the key position into that: 32 bits, of which the smallest
    2^32 rate are dropped.
    """
    words = jax.random.bits(key, (2,), jnp.uint32)
    least = jnp.uint32(min(round(rate * 2**32), 2**32 - 1))

    def keep(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        row = words[0]
        for index in (b, h, q_idx):
            row = _mix(row ^ (index.astype(jnp.uint32) * jnp.uint32(0x9E3779B9)))
        column = kv_idx.astype(jnp.uint32) * jnp.uint32(0x85EBCA77) + words[1]
        return _mix(row ^ column) >= least

    return elementwise.trace(_OP, "dropout", keep, _POSITIONS, "bool")


def _mix(x: Array) -> Array:
    """A bijection of 32 bits, each of which depends on all: two multiplications, three shifts.

    Source of the constants: Wellons, https://nullprogram.com/blog/2018/07/31/.
    """
    x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> jnp.uint32(15))) * jnp.uint32(0x846CA68B)
    return x ^ (x >> jnp.uint32(16))
