"""Pieces that the attention kernels share: loads, stores, visibility, two-part products."""

import triton
import triton.language as tl


@triton.jit
def query_program(
    T, K: tl.constexpr, GROUP: tl.constexpr, HAS_RIGHT: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Batch (int64), head and first query of one of B * K * GROUP * cdiv(T, BLOCK_M) programs."""
    pid = tl.program_id(0)
    tiles_m = tl.cdiv(T, BLOCK_M)
    m = pid % tiles_m
    if HAS_RIGHT:
        m = tiles_m - 1 - m  # later rows see more keys: start the long programs first
    n = (pid // tiles_m) % (K * GROUP)
    b = (pid // tiles_m // (K * GROUP)).to(tl.int64)
    return b, n, m * BLOCK_M


@triton.jit
def ends(
    query_lengths_ptr, key_lengths_ptr, b, T, S,
    HAS_QUERY_LENGTHS: tl.constexpr, HAS_KEY_LENGTHS: tl.constexpr,
):  # fmt: skip
    """Where the queries end that see something, and the keys that may be seen."""
    query_end, key_end = T, S
    if HAS_QUERY_LENGTHS:
        query_end = tl.minimum(T, tl.load(query_lengths_ptr + b))
    if HAS_KEY_LENGTHS:
        key_end = tl.minimum(S, tl.load(key_lengths_ptr + b))
    return query_end, key_end


@triton.jit
def visible(offs_t, offs_s, key_end, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """Where the key s < key_end is visible from the query t: t - left <= s <= t + right."""
    mask = offs_s < key_end
    if HAS_LEFT:
        mask = mask & (offs_s >= offs_t - left)
    if HAS_RIGHT:
        mask = mask & (offs_s <= offs_t + right)
    return mask


@triton.jit
def columns(START: tl.constexpr, WIDTH: tl.constexpr):
    """Column numbers of one part of a row; a part of width 0 is never used."""
    return START + tl.arange(0, WIDTH if WIDTH > 0 else 16)


@triton.jit
def load(row_ptr, row_mask, offs_h, SIZE: tl.constexpr, END: tl.constexpr):
    """Loads a tile: `row_ptr` and `row_mask` lie along one axis, `offs_h` along the other.

    SIZE is the true width of a row, END where the tile's columns end. What is masked reads as 0.
    """
    mask = row_mask & (offs_h < SIZE) if END > SIZE else row_mask
    return tl.load(row_ptr + offs_h, mask=mask, other=0.0)


@triton.jit
def store(row_ptr, row_mask, offs_h, x, SIZE: tl.constexpr, END: tl.constexpr):
    """Stores the part of a tile that lies inside the array, rounding to the array's dtype."""
    mask = row_mask & (offs_h < SIZE) if END > SIZE else row_mask
    tl.store(row_ptr + offs_h, x.to(row_ptr.dtype.element_ty), mask=mask)


@triton.jit
def dot_parts(a0, a1, b0, b1, PART_1: tl.constexpr, PRECISION: tl.constexpr):
    """a0 b0 + a1 b1 in float32; the second term only where its width PART_1 is not 0."""
    product = tl.dot(a0, b0, input_precision=PRECISION)
    if PART_1 > 0:
        product = tl.dot(a1, b1, product, input_precision=PRECISION)
    return product


@triton.jit
def load_statistics(logsumexp_ptr, delta_ptr, offs_m, query_end):
    """Loads a tile's logsumexp, in units of log2, and delta; rows without weights get +inf."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    inside = offs_m < query_end
    logsumexp = tl.load(logsumexp_ptr + offs_m, mask=inside, other=-float("inf")) * LOG2_E
    logsumexp = tl.where(logsumexp == -float("inf"), float("inf"), logsumexp)
    return logsumexp, tl.load(delta_ptr + offs_m, mask=inside, other=0.0)


@triton.jit
def key_range(
    first, query_end, key_end, left, right,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The keys that BLOCK_M queries from `first` on see: (begin, full_begin, full_end, end).

    Those from begin to end are visible from some row. A tile of keys that starts between full_begin
    and full_end is visible from all rows. `begin` is a multiple of BLOCK_N.
    """
    begin, full_begin = 0, 0
    end = key_end
    full_end = key_end - BLOCK_N + 1
    if HAS_LEFT:
        begin = tl.maximum(first - left, 0) // BLOCK_N * BLOCK_N
        full_begin = first + BLOCK_M - 1 - left
    if HAS_RIGHT:
        end = tl.minimum(end, first + BLOCK_M + right)
        full_end = tl.minimum(full_end, first + right + 2 - BLOCK_N)
    if first >= query_end:
        end = 0
    return begin, full_begin, full_end, end


@triton.jit
def block_row(b, n, i, count, BLOCKS_B: tl.constexpr, BLOCKS_N: tl.constexpr):
    """The row of tile i in a table (BLOCKS_B, BLOCKS_N, count, ...); an axis of 1 is for all."""
    row = tl.cast(i, tl.int64)
    if BLOCKS_N > 1:
        row += n * count
    if BLOCKS_B > 1:
        row += b * BLOCKS_N * count
    return row
