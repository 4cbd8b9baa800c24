"""Backward pass of flash attention: the weights are computed again, tile by tile.

With P = exp(scale query key^T - logsumexp) and delta = rowsum(output d_output) - d_logsumexp:

    d_value = P^T d_output                 dP = d_output value^T          dS = P (dP - delta)
    d_query = scale dS key                 d_key = scale dS^T query

Shapes and dtypes as in `forward.py`; d_output is like output, delta (B, N, T) is float32.
P and dS are rounded to the operands' dtype before their products, which accumulate in float32. With
grouped heads d_key and d_value are summed over the group in registers.

A row that saw nothing has logsumexp = -inf. It is turned to +inf, which makes its weights 0.

Source: Dao, FlashAttention-2, https://arxiv.org/abs/2307.08691, algorithm 2.
"""

import triton
import triton.language as tl

from kernels_triton.attention.tiles import (
    block_row,
    columns,
    dot_parts,
    ends,
    load,
    load_statistics,
    store,
    visible,
)


@triton.jit
def backward(
    query_ptr, key_ptr, value_ptr, query_lengths_ptr, key_lengths_ptr,
    logsumexp_ptr, delta_ptr, d_output_ptr, counts_ptr, blocks_ptr, arrays,
    T, S, scale, scale_log2, left, right, keep_scale,
    d_key_ptr, d_value_ptr, d_query_ptr, d_arrays,
    K: tl.constexpr, GROUP: tl.constexpr,
    HAS_QUERY_LENGTHS: tl.constexpr, HAS_KEY_LENGTHS: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, ADD_QUERY: tl.constexpr,
    BLOCKS_B: tl.constexpr, BLOCKS_N: tl.constexpr,
    SCORE: tl.constexpr, D_SCORE: tl.constexpr, MASK: tl.constexpr, KEEP: tl.constexpr,
    H: tl.constexpr, H_0: tl.constexpr, H_1: tl.constexpr,
    V: tl.constexpr, V_0: tl.constexpr, V_1: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Makes BLOCK_N rows of one key head's d_key and d_value; adds to d_query if ADD_QUERY."""
    N: tl.constexpr = K * GROUP
    LOG2_E: tl.constexpr = 1.4426950408889634
    pid = tl.program_id(0)
    tiles_n = tl.cdiv(S, BLOCK_N)
    first = (pid % tiles_n) * BLOCK_N
    k = (pid // tiles_n) % K
    b = (pid // tiles_n // K).to(tl.int64)
    query_end, key_end = ends(
        query_lengths_ptr, key_lengths_ptr, b, T, S, HAS_QUERY_LENGTHS, HAS_KEY_LENGTHS
    )

    offs_n = first + tl.arange(0, BLOCK_N)
    inside = (offs_n < key_end)[:, None]
    rows = tl.arange(0, BLOCK_N)[:, None]
    row_number = b * S + first
    h0, h1 = columns(0, H_0)[None, :], columns(H_0, H_1)[None, :]
    v0, v1 = columns(0, V_0)[None, :], columns(V_0, V_1)[None, :]
    key_row = key_ptr + row_number * (K * H) + k * H + rows * (K * H)
    value_row = value_ptr + row_number * (K * V) + k * V + rows * (K * V)
    key0 = load(key_row, inside, h0, H, H_0)
    key1 = load(key_row, inside, h1, H, H_0 + H_1) if H_1 > 0 else key0
    value0 = load(value_row, inside, v0, V, V_0)
    value1 = load(value_row, inside, v1, V, V_0 + V_1) if V_1 > 0 else value0

    # Queries from begin to end see some key of the tile; a tile of queries that starts between
    # full_begin and full_end sees all of them.
    begin, full_begin = 0, 0
    end = query_end
    full_end = query_end
    if HAS_RIGHT:
        begin = tl.maximum(first - right, 0) // BLOCK_M * BLOCK_M
        full_begin = first + BLOCK_N - 1 - right
    if HAS_LEFT:
        end = tl.minimum(end, first + BLOCK_N + left)
        full_end = first + left + 2 - BLOCK_M
    if first >= key_end:
        end = 0
    if first + BLOCK_N > key_end:
        full_begin = end

    d_key0 = tl.zeros([BLOCK_N, H_0], tl.float32)
    d_key1 = tl.zeros([BLOCK_N, H_1 if H_1 > 0 else 16], tl.float32)
    d_value0 = tl.zeros([BLOCK_N, V_0], tl.float32)
    d_value1 = tl.zeros([BLOCK_N, V_1 if V_1 > 0 else 16], tl.float32)
    for g in range(GROUP):
        n = k * GROUP + g
        query_n = query_ptr + b * T * (N * H) + n * H
        d_output_n = d_output_ptr + b * T * (N * V) + n * V
        d_query_n = d_query_ptr + b * T * (N * H) + n * H
        logsumexp_n = logsumexp_ptr + (b * N + n) * T
        delta_n = delta_ptr + (b * N + n) * T
        if BLOCKS_N > 0:
            row = block_row(b, n, first // BLOCK_N, tiles_n, BLOCKS_B, BLOCKS_N)
            row_ptr = blocks_ptr + row * tl.cdiv(T, BLOCK_M)
            end = tl.where(first < key_end, tl.load(counts_ptr + row) * BLOCK_M, 0)
        for step in range(begin, end, BLOCK_M):
            start = step
            is_partial = (start < full_begin) | (start >= full_end)
            if BLOCKS_N > 0:
                entry = tl.load(row_ptr + step // BLOCK_M)
                start = (entry >> 1) * BLOCK_M
                is_partial = (entry & 1 != 0) | (first + BLOCK_N > key_end)
            elif MASK is not None:
                is_partial = True
            offs_m = start + tl.arange(0, BLOCK_M)
            seeing = (offs_m < query_end)[:, None]
            rows_m = tl.arange(0, BLOCK_M)[:, None]
            query_row = query_n + tl.cast(start, tl.int64) * (N * H) + rows_m * (N * H)
            d_output_row = d_output_n + tl.cast(start, tl.int64) * (N * V) + rows_m * (N * V)
            query0 = load(query_row, seeing, h0, H, H_0)
            query1 = load(query_row, seeing, h1, H, H_0 + H_1) if H_1 > 0 else query0
            logsumexp, delta = load_statistics(logsumexp_n, delta_n, offs_m, query_end)
            # Transposed, keys by queries: then both weights are left operands as they stand.
            logits = dot_parts(key0, key1, tl.trans(query0), tl.trans(query1), H_1, PRECISION)
            offs_t, offs_s = offs_m[None, :], offs_n[:, None]
            at = (tl.cast(b, tl.int32), n, offs_t, offs_s, arrays)
            if SCORE is not None:
                weights = tl.exp2(SCORE(logits * scale, at) * LOG2_E - logsumexp[None, :])
            else:
                weights = tl.exp2(logits * scale_log2 - logsumexp[None, :])
            if is_partial:
                mask = visible(offs_t, offs_s, key_end, left, right, HAS_LEFT, HAS_RIGHT)
                if MASK is not None:
                    mask = mask & MASK(at)
                weights = tl.where(mask, weights, 0.0)
            d_output0 = load(d_output_row, seeing, v0, V, V_0)
            d_output1 = load(d_output_row, seeing, v1, V, V_0 + V_1) if V_1 > 0 else d_output0
            kept = weights
            if KEEP is not None:
                kept = tl.where(KEEP(at), weights * keep_scale, 0.0)
            rounded = kept.to(d_output0.dtype)
            d_value0 = tl.dot(rounded, d_output0, d_value0, input_precision=PRECISION)
            if V_1 > 0:
                d_value1 = tl.dot(rounded, d_output1, d_value1, input_precision=PRECISION)
            d_weights = dot_parts(
                value0, value1, tl.trans(d_output0), tl.trans(d_output1), V_1, PRECISION
            )
            if KEEP is not None:
                d_logits = kept * d_weights - weights * delta[None, :]
            else:
                d_logits = weights * (d_weights - delta[None, :])
            if D_SCORE is not None:
                d_logits = D_SCORE(logits * scale, at, d_logits, weights > 0, d_arrays)
            d_logits = d_logits.to(query0.dtype)
            d_key0 = tl.dot(d_logits, query0, d_key0, input_precision=PRECISION)
            if H_1 > 0:
                d_key1 = tl.dot(d_logits, query1, d_key1, input_precision=PRECISION)
            if ADD_QUERY:
                # Rows and columns outside of the array have gradient 0: added to the last inside,
                # they need no mask, which would be a branch for each element.
                last = tl.minimum(rows_m, query_end - 1 - start)
                d_query_row = d_query_n + tl.cast(start, tl.int64) * (N * H) + last * (N * H)
                d_logits = tl.trans(d_logits)
                d_query0 = tl.dot(d_logits, key0, input_precision=PRECISION)
                tl.atomic_add(d_query_row + tl.minimum(h0, H - 1), d_query0, sem="relaxed")
                if H_1 > 0:
                    d_query1 = tl.dot(d_logits, key1, input_precision=PRECISION)
                    tl.atomic_add(d_query_row + tl.minimum(h1, H - 1), d_query1, sem="relaxed")

    in_array = (offs_n < S)[:, None]
    d_key_row = d_key_ptr + row_number * (K * H) + k * H + rows * (K * H)
    d_value_row = d_value_ptr + row_number * (K * V) + k * V + rows * (K * V)
    store(d_key_row, in_array, h0, d_key0 * scale, H, H_0)
    store(d_value_row, in_array, v0, d_value0, V, V_0)
    if H_1 > 0:
        store(d_key_row, in_array, h1, d_key1 * scale, H, H_0 + H_1)
    if V_1 > 0:
        store(d_value_row, in_array, v1, d_value1, V, V_0 + V_1)


@triton.jit
def attention_backward(
    query_ptr, key_ptr, value_ptr, query_lengths_ptr, key_lengths_ptr,
    logsumexp_ptr, delta_ptr, d_output_ptr,
    T, S, scale, scale_log2, left, right,
    d_key_ptr, d_value_ptr, d_query_ptr,
    K: tl.constexpr, GROUP: tl.constexpr,
    HAS_QUERY_LENGTHS: tl.constexpr, HAS_KEY_LENGTHS: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    H: tl.constexpr, H_0: tl.constexpr, H_1: tl.constexpr,
    V: tl.constexpr, V_0: tl.constexpr, V_1: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program makes BLOCK_N rows of one key head's d_key and d_value, over all queries.

    It also adds its share of d_query / scale, in float32, by atomics to a buffer of zeros: five
    products a pair of tiles. `scale_log2` is the positive scale times log2(e).
    Grid: (B * K * cdiv(S, BLOCK_N),).
    """
    backward(
        query_ptr, key_ptr, value_ptr, query_lengths_ptr, key_lengths_ptr,
        logsumexp_ptr, delta_ptr, d_output_ptr, query_ptr, query_ptr, (),
        T, S, scale, scale_log2, left, right, 1.0, d_key_ptr, d_value_ptr, d_query_ptr, (),
        K, GROUP, HAS_QUERY_LENGTHS, HAS_KEY_LENGTHS, HAS_LEFT, HAS_RIGHT, True,
        0, 0, None, None, None, None, H, H_0, H_1, V, V_0, V_1, BLOCK_M, BLOCK_N, PRECISION,
    )  # fmt: skip


@triton.jit
def attention_backward_key_value(
    query_ptr, key_ptr, value_ptr, query_lengths_ptr, key_lengths_ptr,
    logsumexp_ptr, delta_ptr, d_output_ptr,
    T, S, scale, scale_log2, left, right,
    d_key_ptr, d_value_ptr,
    K: tl.constexpr, GROUP: tl.constexpr,
    HAS_QUERY_LENGTHS: tl.constexpr, HAS_KEY_LENGTHS: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    H: tl.constexpr, H_0: tl.constexpr, H_1: tl.constexpr,
    V: tl.constexpr, V_0: tl.constexpr, V_1: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`attention_backward` without d_query: four products a pair of tiles, no atomics.

    Grid: (B * K * cdiv(S, BLOCK_N),).
    """
    backward(
        query_ptr, key_ptr, value_ptr, query_lengths_ptr, key_lengths_ptr,
        logsumexp_ptr, delta_ptr, d_output_ptr, query_ptr, query_ptr, (),
        T, S, scale, scale_log2, left, right, 1.0, d_key_ptr, d_value_ptr, d_key_ptr, (),
        K, GROUP, HAS_QUERY_LENGTHS, HAS_KEY_LENGTHS, HAS_LEFT, HAS_RIGHT, False,
        0, 0, None, None, None, None, H, H_0, H_1, V, V_0, V_1, BLOCK_M, BLOCK_N, PRECISION,
    )  # fmt: skip
