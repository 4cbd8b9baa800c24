"""Attention of a few queries over a long cache, in parts of the cache that are combined at the end.

    output_i = softmax(x_i) value_i,   logsumexp_i = log sum exp(x_i),   x_i = scale query key_i^T
    logsumexp = log sum_i exp(logsumexp_i)
    output = sum_i exp(logsumexp_i - logsumexp) output_i

for the parts i of the cache; x may become soft_cap tanh(x / soft_cap). Query t of T stands at
position p = length - T + t and sees the keys p - left <= s <= p. The rows of a tile are the queries
of all heads that share a key head: row r is token r // GROUP, head r % GROUP of the group.
query (B, T, N, H), key (B, S, K, H), value (B, S, K, V): float32, bfloat16 or float16; lengths (B,)
int32; output (B, splits, T, N, V), logsumexp (B, splits, T, N) float32, natural. A query that sees
nothing in a part gets 0 and -inf there.
Products accumulate in float32 and statistics are float32; the weights are rounded to value's dtype
before the second product.

Source: Dao, Haziza, Massa, Sizov: Flash-Decoding for long-context inference,
https://crfm.stanford.edu/2023/10/12/flashdecoding.html.
"""

import triton
import triton.language as tl

from kernels_triton.attention.tiles import columns, dot_parts, load, store, visible
from kernels_triton.elementwise import tanh


@triton.jit
def decode_parts(
    query_ptr, key_ptr, value_ptr, lengths_ptr,
    T, S, splits, scale, left, soft_cap,
    output_ptr, logsumexp_ptr,
    K: tl.constexpr, GROUP: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_SOFT_CAP: tl.constexpr,
    H: tl.constexpr, H_0: tl.constexpr, H_1: tl.constexpr,
    V: tl.constexpr, V_0: tl.constexpr, V_1: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program makes BLOCK_M rows of one key head over one of the equal parts of what they see.

    How long the parts are is found here, so that the programs share the work at any length.
    Programs that run side by side read neighbouring heads of the same positions.
    Grid: (B * splits * K * cdiv(T * GROUP, BLOCK_M),).
    """
    LOG2_E: tl.constexpr = 1.4426950408889634
    LN_2: tl.constexpr = 0.6931471805599453
    pid = tl.program_id(0)
    tiles_m = tl.cdiv(T * GROUP, BLOCK_M)
    first = pid % tiles_m * BLOCK_M
    k = pid // tiles_m % K
    split = pid // tiles_m // K % splits
    b = (pid // tiles_m // K // splits).to(tl.int64)

    rows = first + tl.arange(0, BLOCK_M)
    offs_t = rows // GROUP
    inside = (offs_t < T)[:, None]
    end = tl.minimum(tl.maximum(tl.load(lengths_ptr + b), 0), S)
    position = (end - T + offs_t)[:, None]
    begin = 0
    if HAS_LEFT:
        begin = tl.maximum(end - T - left, 0)
    tiles_n = tl.cdiv(tl.cdiv(end, BLOCK_N) - begin // BLOCK_N, splits)
    start = (begin // BLOCK_N + split * tiles_n) * BLOCK_N
    stop = tl.minimum(end, start + tiles_n * BLOCK_N)

    head = (k * GROUP + rows % GROUP)[:, None]
    query_row = query_ptr + ((b * T + offs_t)[:, None] * (K * GROUP) + head) * H
    h0, h1 = columns(0, H_0)[None, :], columns(H_0, H_1)[None, :]
    query0 = load(query_row, inside, h0, H, H_0)
    query1 = load(query_row, inside, h1, H, H_0 + H_1) if H_1 > 0 else query0
    key_ptr += b * S * (K * H) + k * H
    value_ptr += b * S * (K * V) + k * V

    offs_n = tl.arange(0, BLOCK_N)
    v0, v1 = columns(0, V_0)[None, :], columns(V_0, V_1)[None, :]
    acc0 = tl.zeros([BLOCK_M, V_0], tl.float32)
    acc1 = tl.zeros([BLOCK_M, V_1 if V_1 > 0 else 16], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    peak = tl.full([BLOCK_M], -float("inf"), tl.float32)
    for tile in range(start, stop, BLOCK_N):
        offs_s = tile + offs_n
        in_range = (offs_s >= begin) & (offs_s < end)
        key_row = key_ptr + tl.cast(tile, tl.int64) * (K * H) + offs_n[None, :] * (K * H)
        key0 = load(key_row, in_range[None, :], h0.trans(), H, H_0)
        key1 = load(key_row, in_range[None, :], h1.trans(), H, H_0 + H_1) if H_1 > 0 else key0
        logits = dot_parts(query0, query1, key0, key1, H_1, PRECISION) * scale
        if HAS_SOFT_CAP:
            logits = soft_cap * tanh(logits / soft_cap)
        mask = visible(position, offs_s[None, :], end, left, 0, HAS_LEFT, True)
        logits = tl.where(mask, logits * LOG2_E, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(logits, 1))
        # While a row has seen nothing its peak is -inf, and -inf - -inf would be NaN.
        shift = tl.where(new_peak == -float("inf"), 0.0, new_peak)
        weights = tl.exp2(logits - shift[:, None])
        decay = tl.exp2(peak - shift)
        total = total * decay + tl.sum(weights, 1)
        peak = new_peak
        value_row = value_ptr + tl.cast(tile, tl.int64) * (K * V) + offs_n[:, None] * (K * V)
        value0 = load(value_row, in_range[:, None], v0, V, V_0)
        weights = weights.to(value0.dtype)
        acc0 = tl.dot(weights, value0, acc0 * decay[:, None], input_precision=PRECISION)
        if V_1 > 0:
            value1 = load(value_row, in_range[:, None], v1, V, V_0 + V_1)
            acc1 = tl.dot(weights, value1, acc1 * decay[:, None], input_precision=PRECISION)

    share = tl.where(total > 0, 1 / total, 0.0)[:, None]
    row_number = ((b * splits + split) * T + offs_t)[:, None] * (K * GROUP) + head
    output_row = output_ptr + row_number * V
    store(output_row, inside, v0, acc0 * share, V, V_0)
    if V_1 > 0:
        store(output_row, inside, v1, acc1 * share, V, V_0 + V_1)
    logsumexp = (peak + tl.log2(total)) * LN_2
    tl.store(logsumexp_ptr + row_number, logsumexp[:, None], mask=inside)


@triton.jit
def decode_combine(
    part_ptr, part_logsumexp_ptr,
    splits, rows,
    output_ptr, logsumexp_ptr,
    V: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One program combines the parts of one row: `rows` is T * N. Grid: (B * rows,)."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    LN_2: tl.constexpr = 0.6931471805599453
    pid = tl.program_id(0)
    row_number = (pid // rows).to(tl.int64) * splits * rows + pid % rows
    offs_v = tl.arange(0, BLOCK_V)
    acc = tl.zeros([BLOCK_V], tl.float32)
    total = 0.0
    peak = -float("inf")
    for start in range(0, splits, BLOCK_S):
        offs_s = start + tl.arange(0, BLOCK_S)
        inside = offs_s < splits
        part_rows = row_number + tl.cast(offs_s, tl.int64) * rows
        logsumexp = tl.load(part_logsumexp_ptr + part_rows, mask=inside, other=-float("inf"))
        logsumexp *= LOG2_E
        new_peak = tl.maximum(peak, tl.max(logsumexp, 0))
        shift = tl.where(new_peak == -float("inf"), 0.0, new_peak)
        weights = tl.exp2(logsumexp - shift)
        decay = tl.exp2(peak - shift)
        total = total * decay + tl.sum(weights, 0)
        peak = new_peak
        part_row = part_ptr + (part_rows * V)[:, None]
        parts = load(part_row, inside[:, None], offs_v[None, :], V, BLOCK_V)
        acc = acc * decay + tl.sum(weights[:, None] * parts, 0)
    share = tl.where(total > 0, 1 / total, 0.0)
    store(output_ptr + tl.cast(pid, tl.int64) * V, True, offs_v, acc * share, V, BLOCK_V)
    tl.store(logsumexp_ptr + pid, (peak + tl.log2(total)) * LN_2)
