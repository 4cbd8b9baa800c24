"""Forward pass of flash attention: an online softmax over tiles of keys.

    output = softmax(scale query key^T) value,   logsumexp = log sum exp(scale query key^T)

over the keys that a query sees: t - left <= s <= t + right, s < key_lengths[b], if the query
itself counts: t < query_lengths[b].
query (B, T, N, H), key (B, S, K, H), value (B, S, K, V), output (B, T, N, V): float32, bfloat16 or
float16; logsumexp (B, N, T) float32, natural. A query that sees nothing gets 0 and -inf.
Products accumulate in float32 and statistics are float32; the weights are rounded to value's dtype
before the second product, and the output once, at its store.

`forward` has hooks besides, functions that are compiled in, or None. They are called with
at = (batch, head, query positions, key positions, arrays), where positions are broadcast:

    SCORE(x, at)   the logits, of x = scale query key^T
    MASK(at)       where a key may be seen
    KEEP(at)       which weights meet their values: dropout; the others are multiplied by keep_scale

With sinks (N,) the sum behind logsumexp has a term exp(sinks[n]) more. With a table of tiles,
blocks (BLOCKS_B, BLOCKS_N, tiles of queries, tiles of keys), only counts (BLOCKS_B, BLOCKS_N,
tiles of queries) of each row are visited: 2 j for tile j, 2 j + 1 if MASK must be asked in it.

Source: Dao, FlashAttention-2, https://arxiv.org/abs/2307.08691, algorithm 1.
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
    query_program,
    store,
    visible,
)


@triton.jit
def forward(
    query_ptr, key_ptr, value_ptr, query_lengths_ptr, key_lengths_ptr,
    sinks_ptr, counts_ptr, blocks_ptr, arrays,
    T, S, scale, left, right, keep_scale,
    output_ptr, logsumexp_ptr,
    K: tl.constexpr, GROUP: tl.constexpr,
    HAS_QUERY_LENGTHS: tl.constexpr, HAS_KEY_LENGTHS: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_SINKS: tl.constexpr,
    BLOCKS_B: tl.constexpr, BLOCKS_N: tl.constexpr,
    SCORE: tl.constexpr, MASK: tl.constexpr, KEEP: tl.constexpr,
    H: tl.constexpr, H_0: tl.constexpr, H_1: tl.constexpr,
    V: tl.constexpr, V_0: tl.constexpr, V_1: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Makes BLOCK_M rows of one head's output and logsumexp: see `attention_forward`."""
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
    query_row = query_ptr + row_number * (N * H) + n * H + rows * (N * H)
    h0, h1 = columns(0, H_0)[None, :], columns(H_0, H_1)[None, :]
    query0 = load(query_row, inside, h0, H, H_0)
    query1 = load(query_row, inside, h1, H, H_0 + H_1) if H_1 > 0 else query0
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
    v0, v1 = columns(0, V_0)[None, :], columns(V_0, V_1)[None, :]
    acc0 = tl.zeros([BLOCK_M, V_0], tl.float32)
    acc1 = tl.zeros([BLOCK_M, V_1 if V_1 > 0 else 16], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    peak = tl.full([BLOCK_M], -float("inf"), tl.float32)
    if HAS_SINKS:
        total += 1.0
        peak = tl.zeros([BLOCK_M], tl.float32) + tl.load(sinks_ptr + n) * LOG2_E
    for step in range(begin, end, BLOCK_N):
        start = step
        is_partial = (start < full_begin) | (start >= full_end)
        if BLOCKS_N > 0:
            entry = tl.load(blocks_ptr + step // BLOCK_N)
            start = (entry >> 1) * BLOCK_N
            is_partial = (entry & 1 != 0) | (start >= full_end)
        elif MASK is not None:
            is_partial = True
        in_range = start + offs_n < key_end
        key_row = key_ptr + tl.cast(start, tl.int64) * (K * H) + offs_n[None, :] * (K * H)
        key0 = load(key_row, in_range[None, :], h0.trans(), H, H_0)
        key1 = load(key_row, in_range[None, :], h1.trans(), H, H_0 + H_1) if H_1 > 0 else key0
        logits = dot_parts(query0, query1, key0, key1, H_1, PRECISION)
        at = (tl.cast(b, tl.int32), n, offs_m[:, None], (start + offs_n)[None, :], arrays)
        factor = scale
        if SCORE is not None:
            logits = SCORE(logits * scale, at)
            factor = LOG2_E
        if is_partial:
            offs_s = (start + offs_n)[None, :]
            mask = visible(offs_m[:, None], offs_s, key_end, left, right, HAS_LEFT, HAS_RIGHT)
            if MASK is not None:
                mask = mask & MASK(at)
            logits = tl.where(mask, logits, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(logits, 1) * factor)
        # While a row has seen nothing its peak is -inf, and -inf - -inf would be NaN.
        shift = tl.where(new_peak == -float("inf"), 0.0, new_peak)
        weights = tl.exp2(logits * factor - shift[:, None])
        decay = tl.exp2(peak - shift)
        total = total * decay + tl.sum(weights, 1)
        peak = new_peak
        if KEEP is not None:
            weights = tl.where(KEEP(at), weights, 0.0)
        value_row = value_ptr + tl.cast(start, tl.int64) * (K * V) + offs_n[:, None] * (K * V)
        value0 = load(value_row, in_range[:, None], v0, V, V_0)
        weights = weights.to(value0.dtype)
        acc0 = tl.dot(weights, value0, acc0 * decay[:, None], input_precision=PRECISION)
        if V_1 > 0:
            value1 = load(value_row, in_range[:, None], v1, V, V_0 + V_1)
            acc1 = tl.dot(weights, value1, acc1 * decay[:, None], input_precision=PRECISION)

    seen = inside & (total > 0)[:, None]
    share = tl.where(total > 0, 1 / total, 0.0)[:, None]
    if KEEP is not None:
        share *= keep_scale
    in_array = (offs_m < T)[:, None]
    output_row = output_ptr + row_number * (N * V) + n * V + rows * (N * V)
    store(output_row, in_array, v0, tl.where(seen, acc0 * share, 0.0), V, V_0)
    if V_1 > 0:
        store(output_row, in_array, v1, tl.where(seen, acc1 * share, 0.0), V, V_0 + V_1)
    LN_2: tl.constexpr = 0.6931471805599453
    logsumexp = tl.where(offs_m < query_end, (peak + tl.log2(total)) * LN_2, -float("inf"))
    logsumexp_ptr += (b * N + n) * T + first
    tl.store(logsumexp_ptr + tl.arange(0, BLOCK_M), logsumexp, mask=offs_m < T)


@triton.jit
def attention_forward(
    query_ptr, key_ptr, value_ptr, query_lengths_ptr, key_lengths_ptr,
    T, S, scale, left, right,
    output_ptr, logsumexp_ptr,
    K: tl.constexpr, GROUP: tl.constexpr,
    HAS_QUERY_LENGTHS: tl.constexpr, HAS_KEY_LENGTHS: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    H: tl.constexpr, H_0: tl.constexpr, H_1: tl.constexpr,
    V: tl.constexpr, V_0: tl.constexpr, V_1: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program makes BLOCK_M rows of one head's output and logsumexp.

    Logits are kept in units of log2, for exp2 is one instruction: `scale`, positive, has log2(e) in
    it (but not with SCORE). Grid: (B * N * cdiv(T, BLOCK_M),).
    """
    forward(
        query_ptr, key_ptr, value_ptr, query_lengths_ptr, key_lengths_ptr,
        query_ptr, query_ptr, query_ptr, (), T, S, scale, left, right, 1.0,
        output_ptr, logsumexp_ptr, K, GROUP, HAS_QUERY_LENGTHS, HAS_KEY_LENGTHS,
        HAS_LEFT, HAS_RIGHT, False, 0, 0, None, None, None,
        H, H_0, H_1, V, V_0, V_1, BLOCK_M, BLOCK_N, PRECISION,
    )  # fmt: skip
