"""The gradient of the query by itself, without atomics: for a deterministic backward pass.

Three products a pair of tiles; formulas, shapes and dtypes as in `backward.py`.
"""

import triton
import triton.language as tl

from kernels_triton.attention.tiles import (
    block_row,
    columns,
    dot_parts,
    ends,
    key_range,
    load,
    load_statistics,
    query_program,
    store,
    visible,
)


@triton.jit
def backward_query(
    query_ptr, key_ptr, value_ptr, query_lengths_ptr, key_lengths_ptr,
    logsumexp_ptr, delta_ptr, d_output_ptr, counts_ptr, blocks_ptr, arrays,
    T, S, scale, scale_log2, left, right, keep_scale,
    d_query_ptr,
    K: tl.constexpr, GROUP: tl.constexpr,
    HAS_QUERY_LENGTHS: tl.constexpr, HAS_KEY_LENGTHS: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    BLOCKS_B: tl.constexpr, BLOCKS_N: tl.constexpr,
    SCORE: tl.constexpr, D_SCORE: tl.constexpr, MASK: tl.constexpr, KEEP: tl.constexpr,
    H: tl.constexpr, H_0: tl.constexpr, H_1: tl.constexpr,
    V: tl.constexpr, V_0: tl.constexpr, V_1: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Makes BLOCK_M rows of one head's d_query."""
    N: tl.constexpr = K * GROUP
    LOG2_E: tl.constexpr = 1.4426950408889634
    b, n, first = query_program(T, K, GROUP, HAS_RIGHT, BLOCK_M)
    k = n // GROUP
    query_end, key_end = ends(
        query_lengths_ptr, key_lengths_ptr, b, T, S, HAS_QUERY_LENGTHS, HAS_KEY_LENGTHS
    )

    offs_m = first + tl.arange(0, BLOCK_M)
    inside = (offs_m < query_end)[:, None]
    rows = tl.arange(0, BLOCK_M)[:, None]
    row_number = b * T + first
    h0, h1 = columns(0, H_0)[None, :], columns(H_0, H_1)[None, :]
    v0, v1 = columns(0, V_0)[None, :], columns(V_0, V_1)[None, :]
    query_row = query_ptr + row_number * (N * H) + n * H + rows * (N * H)
    d_output_row = d_output_ptr + row_number * (N * V) + n * V + rows * (N * V)
    query0 = load(query_row, inside, h0, H, H_0)
    query1 = load(query_row, inside, h1, H, H_0 + H_1) if H_1 > 0 else query0
    d_output0 = load(d_output_row, inside, v0, V, V_0)
    d_output1 = load(d_output_row, inside, v1, V, V_0 + V_1) if V_1 > 0 else d_output0
    logsumexp, delta = load_statistics(
        logsumexp_ptr + (b * N + n) * T, delta_ptr + (b * N + n) * T, offs_m, query_end
    )
    key_ptr += b * S * (K * H) + k * H
    value_ptr += b * S * (K * V) + k * V

    begin, full_begin, full_end, end = key_range(
        first, query_end, key_end, left, right, HAS_LEFT, HAS_RIGHT, BLOCK_M, BLOCK_N
    )
    if BLOCKS_N > 0:
        row = block_row(b, n, first // BLOCK_M, tl.cdiv(T, BLOCK_M), BLOCKS_B, BLOCKS_N)
        blocks_ptr += row * tl.cdiv(S, BLOCK_N)
        end = tl.where(end > begin, tl.load(counts_ptr + row) * BLOCK_N, 0)
    offs_n = tl.arange(0, BLOCK_N)
    d_query0 = tl.zeros([BLOCK_M, H_0], tl.float32)
    d_query1 = tl.zeros([BLOCK_M, H_1 if H_1 > 0 else 16], tl.float32)
    for step in range(begin, end, BLOCK_N):
        start = step
        is_partial = (start < full_begin) | (start >= full_end)
        if BLOCKS_N > 0:
            entry = tl.load(blocks_ptr + step // BLOCK_N)
            start = (entry >> 1) * BLOCK_N
            is_partial = (entry & 1 != 0) | (start >= full_end)
        elif MASK is not None:
            is_partial = True
        in_range = (start + offs_n < key_end)[:, None]
        key_row = key_ptr + tl.cast(start, tl.int64) * (K * H) + offs_n[:, None] * (K * H)
        value_row = value_ptr + tl.cast(start, tl.int64) * (K * V) + offs_n[:, None] * (K * V)
        key0 = load(key_row, in_range, h0, H, H_0)
        key1 = load(key_row, in_range, h1, H, H_0 + H_1) if H_1 > 0 else key0
        value0 = load(value_row, in_range, v0, V, V_0)
        value1 = load(value_row, in_range, v1, V, V_0 + V_1) if V_1 > 0 else value0
        logits = dot_parts(query0, query1, tl.trans(key0), tl.trans(key1), H_1, PRECISION)
        offs_t, offs_s = offs_m[:, None], (start + offs_n)[None, :]
        at = (tl.cast(b, tl.int32), n, offs_t, offs_s, arrays)
        if SCORE is not None:
            weights = tl.exp2(SCORE(logits * scale, at) * LOG2_E - logsumexp[:, None])
        else:
            weights = tl.exp2(logits * scale_log2 - logsumexp[:, None])
        if is_partial:
            mask = visible(offs_t, offs_s, key_end, left, right, HAS_LEFT, HAS_RIGHT)
            if MASK is not None:
                mask = mask & MASK(at)
            weights = tl.where(mask, weights, 0.0)
        d_weights = dot_parts(
            d_output0, d_output1, tl.trans(value0), tl.trans(value1), V_1, PRECISION
        )
        if KEEP is not None:
            d_weights = tl.where(KEEP(at), d_weights * keep_scale, 0.0)
        d_logits = weights * (d_weights - delta[:, None])
        if D_SCORE is not None:
            d_logits = D_SCORE(logits * scale, at, d_logits, weights > 0, ())
        d_logits = d_logits.to(key0.dtype)
        d_query0 = tl.dot(d_logits, key0, d_query0, input_precision=PRECISION)
        if H_1 > 0:
            d_query1 = tl.dot(d_logits, key1, d_query1, input_precision=PRECISION)

    d_query_row = d_query_ptr + row_number * (N * H) + n * H + rows * (N * H)
    in_array = (offs_m < T)[:, None]
    store(d_query_row, in_array, h0, d_query0 * scale, H, H_0)
    if H_1 > 0:
        store(d_query_row, in_array, h1, d_query1 * scale, H, H_0 + H_1)


@triton.jit
def attention_backward_query(
    query_ptr, key_ptr, value_ptr, query_lengths_ptr, key_lengths_ptr,
    logsumexp_ptr, delta_ptr, d_output_ptr,
    T, S, scale, scale_log2, left, right,
    d_query_ptr,
    K: tl.constexpr, GROUP: tl.constexpr,
    HAS_QUERY_LENGTHS: tl.constexpr, HAS_KEY_LENGTHS: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    H: tl.constexpr, H_0: tl.constexpr, H_1: tl.constexpr,
    V: tl.constexpr, V_0: tl.constexpr, V_1: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program makes BLOCK_M rows of one head's d_query. Grid: (B * N * cdiv(T, BLOCK_M),)."""
    backward_query(
        query_ptr, key_ptr, value_ptr, query_lengths_ptr, key_lengths_ptr,
        logsumexp_ptr, delta_ptr, d_output_ptr, query_ptr, query_ptr, (),
        T, S, scale, scale_log2, left, right, 1.0, d_query_ptr,
        K, GROUP, HAS_QUERY_LENGTHS, HAS_KEY_LENGTHS, HAS_LEFT, HAS_RIGHT,
        0, 0, None, None, None, None, H, H_0, H_1, V, V_0, V_1, BLOCK_M, BLOCK_N, PRECISION,
    )  # fmt: skip
