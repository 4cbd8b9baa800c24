"""Backward pass of the gated delta rule, chunk by chunk, from the states that the forward kept.

With the names of `forward.py`, P = scale G (q k^T), and d_next the gradient of the state S' behind
a chunk:

    d_new = P^T d_o + exp(c_last - c) k d_next       d_right = T^T d_new,   d_v = beta d_right
    d_S = exp(c_last) d_next + (scale exp(c) q)^T d_o - (exp(c) k)^T d_v
    X = G (d_o new^T)                                Z = -beta G (d_right new^T) below the diagonal
    d_q = exp(c) d_o S^T + X k
    d_k = -exp(c) d_v S^T + exp(c_last - c) new d_next^T + X^T q + (Z + Z^T) k

with the factors of q and k. The gradient of g is the sum from the end of that of c. The passes
mirror the forward ones, from the last chunk to the first: `delta_rule_d_states` makes the map of
d_next of each part, `states.py` makes d_next between parts, and `delta_rule_d_states` goes through
the chunks of all parts once more, now with what T is needed for: d_next, new and d_right. The rest
are products, of all chunks at a time, in `delta_rule_gradients`.

Shapes as in `forward.py`; new and d_right are like v, d_states like states, but in the order of the
pass. Operands of products have k's dtype; what is summed along rows is float32.
"""

import triton
import triton.language as tl

from kernels_triton.delta_rule.tiles import (
    chunk_rows,
    inner_decays,
    inverse_norms,
    key_inverse,
    load_columns,
    load_gate,
    load_rows,
    load_sum,
    load_transposed,
    locate,
    matrix,
    mixed_columns,
    outer_decays,
    row_products,
    store_gate,
    store_rows,
)


@triton.jit
def delta_rule_d_states(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, runs_ptr, d_o_ptr, states_ptr, initial_ptr,
    L, chunks, parts, per_part, scale,
    out_ptr, last_ptr, new_ptr, d_right_ptr, sums_ptr,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_P: tl.constexpr, COMPOSE: tl.constexpr,
    L2_NORMALIZE: tl.constexpr, HAS_RUNS: tl.constexpr, REVERSE: tl.constexpr,
    PRECISION: tl.constexpr, INVERSE_PRECISION: tl.constexpr,
):  # fmt: skip
    """One program passes BLOCK_W columns of d_next of one head back through the chunks of one part.

    COMPOSE: it makes their map, as `delta_rule_compose` does: out (B, parts, H, K, K + V), last
    (B, parts, H) the decay. Else `initial` (B, parts, H, K, V) is what enters each part, out
    (B, chunks, H, K, V) what enters each chunk, last (B, H, K, V) what leaves the first, and sums
    (B, L, H, blocks, 4) what these columns add to sums that `delta_rule_gradients` needs: q d_q,
    k d_k, d_c and d_beta. Parts and chunks in out and initial are in the order of this pass.
    Grid: (B * parts * H * cdiv(W, BLOCK_W),), W = K + V columns if COMPOSE, else V.
    """
    W: tl.constexpr = K + V if COMPOSE else V
    BLOCKS: tl.constexpr = (W + BLOCK_W - 1) // BLOCK_W
    b, part, h, block = locate(tl.program_id(0), parts, H, BLOCKS)
    column = block * BLOCK_W
    index = (b * parts + part) * H + h
    d_next = tl.zeros([BLOCK_K, BLOCK_W], tl.float32)
    if not COMPOSE:
        offsets, mask = matrix(index, column, K, V, BLOCK_K, BLOCK_W)
        d_next = tl.load(initial_ptr + offsets, mask=mask, other=0.0)
    total = 1.0
    begin = part * per_part
    for i in tl.range(begin, tl.minimum(begin + per_part, chunks), disable_licm=True):
        n = chunks - 1 - i
        first, steps, inside = chunk_rows(b, n, h, L, H, C, REVERSE)
        T, k_norms = key_inverse(
            k_ptr, g_ptr, beta_ptr, runs_ptr, first, steps, inside,
            H, K, C, BLOCK_P, L2_NORMALIZE, HAS_RUNS, PRECISION, INVERSE_PRECISION,
        )  # fmt: skip
        start, end, whole = outer_decays(
            g_ptr, runs_ptr, first, steps, inside, n, H, HAS_RUNS, REVERSE
        )
        beta = load_gate(beta_ptr, first, steps, inside)
        k = load_rows(k_ptr, first, steps, inside, 0, K, BLOCK_K)
        ending = tl.dot(k, d_next.to(k.dtype), input_precision=PRECISION)
        if COMPOSE:
            identity, d_o = mixed_columns(
                k_ptr, d_o_ptr, first, steps, inside, column, K, V, BLOCK_W
            )
            ending += total * identity
        else:
            d_o = load_rows(d_o_ptr, first, steps, inside, column, V, BLOCK_W)
        ending *= end[:, None]
        if not COMPOSE:
            offsets, mask = matrix((b * chunks + i) * H + h, column, K, V, BLOCK_K, BLOCK_W)
            tl.store(out_ptr + offsets, d_next, mask=mask)
        scores, squares = row_products(q_ptr, k_ptr, first, steps, inside, K, C, BLOCK_P, PRECISION)
        q_norms = inverse_norms(squares, L2_NORMALIZE) * scale
        between = inner_decays(g_ptr, runs_ptr, first, steps, inside, H, C, HAS_RUNS, False)
        scores = tl.trans((between * scores).to(k.dtype))
        d_o = q_norms[:, None] * d_o.to(tl.float32)
        d_new = tl.dot(scores, d_o.to(k.dtype), ending, input_precision=PRECISION)
        d_new = (k_norms[:, None] * d_new).to(k.dtype)
        d_right = tl.dot(tl.trans(T), d_new, input_precision=PRECISION)
        if not COMPOSE:
            store_rows(d_right_ptr, d_right, first, steps, inside, column, V, BLOCK_W)
            offsets, mask = matrix((b * chunks + n) * H + h, column, K, V, BLOCK_K, BLOCK_W)
            state = tl.load(states_ptr + offsets, mask=mask, other=0.0)
            d_last = whole * tl.sum(tl.sum(state * d_next, axis=1), axis=0)
            state = state.to(k.dtype)
            q = load_rows(q_ptr, first, steps, inside, 0, K, BLOCK_K)
            read = tl.dot(q, state, input_precision=PRECISION)
            from_start = start * tl.sum(read * d_o, axis=1)
            k = load_rows(k_ptr, first, steps, inside, 0, K, BLOCK_K)
            recalled = (start * k_norms)[:, None] * tl.dot(k, state, input_precision=PRECISION)
            v = load_rows(v_ptr, first, steps, inside, column, V, BLOCK_W).to(tl.float32)
            corrected = v - recalled
            d_beta = tl.sum(d_right * corrected, axis=1)
            recalling = beta * tl.sum(d_right * recalled, axis=1)
            corrected = (beta[:, None] * corrected).to(k.dtype)
            new = tl.dot(T, corrected, input_precision=PRECISION)
            store_rows(new_ptr, new, first, steps, inside, column, V, BLOCK_W)
            to_end = k_norms * tl.sum(ending * new, axis=1)
            # The last token's sum is in those of all.
            at_end = tl.arange(0, C) == tl.minimum(C, L - n * C) - 1
            d_sums = from_start - recalling - to_end
            d_sums += tl.where(at_end, d_last + tl.sum(to_end, axis=0), 0.0)
            at = sums_ptr + (first + steps) * (4 * BLOCKS) + 4 * block
            tl.store(at, from_start, mask=inside)
            tl.store(at + 1, to_end - recalling, mask=inside)
            tl.store(at + 2, d_sums, mask=inside)
            tl.store(at + 3, d_beta, mask=inside)
        d_v = ((-start * k_norms * beta)[:, None] * d_right).to(k.dtype)
        keys = load_columns(k_ptr, first, steps, inside, 0, K, BLOCK_K)
        d_next = tl.dot(keys, d_v, whole * d_next, input_precision=PRECISION)
        queries = load_columns(q_ptr, first, steps, inside, 0, K, BLOCK_K)
        if not COMPOSE:  # again, for it need not lie in registers so long
            d_o = load_rows(d_o_ptr, first, steps, inside, column, V, BLOCK_W).to(tl.float32)
            d_o *= q_norms[:, None]
        d_o = (start[:, None] * d_o).to(k.dtype)
        d_next = tl.dot(queries, d_o, d_next, input_precision=PRECISION)
        total *= whole
    if COMPOSE:
        offsets, mask = matrix(index, column, K, W, BLOCK_K, BLOCK_W)
        tl.store(out_ptr + offsets, d_next, mask=mask)
        if block == 0:
            tl.store(last_ptr + index, total)
    elif part == parts - 1:
        offsets, mask = matrix(b * H + h, column, K, V, BLOCK_K, BLOCK_W)
        tl.store(last_ptr + offsets, d_next, mask=mask)


@triton.jit
def delta_rule_gradients(
    q_ptr, k_ptr, g_ptr, beta_ptr, runs_ptr,
    d_o_ptr, states_ptr, d_states_ptr, new_ptr, d_right_ptr, sums_ptr,
    L, chunks, scale,
    d_q_ptr, d_k_ptr, d_v_ptr, d_g_ptr, d_beta_ptr,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BLOCKS: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_P: tl.constexpr,
    L2_NORMALIZE: tl.constexpr, HAS_RUNS: tl.constexpr, REVERSE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program makes the gradients of one chunk and head.

    BLOCK_K columns of queries and keys, or BLOCK_W of values, at a time; BLOCKS parts of each sum.
    Grid: (B * chunks * H,).
    """
    b, n, h, _ = locate(tl.program_id(0), chunks, H, 1)
    first, steps, inside = chunk_rows(b, n, h, L, H, C, REVERSE)
    dtype = k_ptr.dtype.element_ty
    beta = load_gate(beta_ptr, first, steps, inside)
    d_system, _ = row_products(d_right_ptr, new_ptr, first, steps, inside, V, C, BLOCK_W, PRECISION)
    between = inner_decays(g_ptr, runs_ptr, first, steps, inside, H, C, HAS_RUNS, True)
    d_system *= -between
    products, squares = row_products(k_ptr, k_ptr, first, steps, inside, K, C, BLOCK_P, PRECISION)
    k_norms = inverse_norms(squares, L2_NORMALIZE)
    products = d_system * products * k_norms[:, None] * k_norms[None, :]
    d_beta = tl.sum(products, axis=1)
    d_beta += load_sum(sums_ptr + 3, first, steps, inside, BLOCKS)
    store_gate(d_beta_ptr, d_beta, first, steps, inside)
    products *= beta[:, None]
    ahead, back = tl.sum(products, axis=1), tl.sum(products, axis=0)
    along_k, d_sums = ahead + back, ahead - back
    d_system = (beta[:, None] * d_system).to(dtype)
    tl.debug_barrier()

    d_scores, _ = row_products(d_o_ptr, new_ptr, first, steps, inside, V, C, BLOCK_W, PRECISION)
    between = inner_decays(g_ptr, runs_ptr, first, steps, inside, H, C, HAS_RUNS, False)
    d_scores *= between
    scores, squares = row_products(q_ptr, k_ptr, first, steps, inside, K, C, BLOCK_P, PRECISION)
    q_lengths = inverse_norms(squares, L2_NORMALIZE)
    q_norms = q_lengths * scale
    scores = d_scores * scores * q_norms[:, None] * k_norms[None, :]
    ahead, back = tl.sum(scores, axis=1), tl.sum(scores, axis=0)
    along_q = ahead + load_sum(sums_ptr, first, steps, inside, BLOCKS)
    along_k += back + load_sum(sums_ptr + 1, first, steps, inside, BLOCKS)
    d_sums += ahead - back  # a token's product with itself is in both
    d_sums += load_sum(sums_ptr + 2, first, steps, inside, BLOCKS)
    d_g = tl.cumsum(d_sums, axis=0, reverse=True)
    store_gate(d_g_ptr, d_g, first, steps, inside)
    d_scores = d_scores.to(dtype)

    start, end, _ = outer_decays(g_ptr, runs_ptr, first, steps, inside, n, H, HAS_RUNS, REVERSE)
    for column in range(0, V, BLOCK_W):
        d_v = load_rows(d_right_ptr, first, steps, inside, column, V, BLOCK_W)
        d_v = beta[:, None] * d_v.to(tl.float32)
        store_rows(d_v_ptr, d_v, first, steps, inside, column, V, BLOCK_W)
    for row in range(0, K, BLOCK_K):
        d_q = tl.zeros([C, BLOCK_K], tl.float32)
        d_k = tl.zeros([C, BLOCK_K], tl.float32)
        for column in range(0, V, BLOCK_W):
            index = (b * chunks + n) * H + h
            state = load_transposed(states_ptr, index, row, column, K, V, BLOCK_K, BLOCK_W)
            state = state.to(dtype)
            d_o = load_rows(d_o_ptr, first, steps, inside, column, V, BLOCK_W)
            d_q = tl.dot(d_o, state, d_q, input_precision=PRECISION)
            d_v = load_rows(d_right_ptr, first, steps, inside, column, V, BLOCK_W)
            d_v = ((-start * beta)[:, None] * d_v.to(tl.float32)).to(dtype)
            d_k = tl.dot(d_v, state, d_k, input_precision=PRECISION)
            index = (b * chunks + chunks - 1 - n) * H + h
            d_next = load_transposed(d_states_ptr, index, row, column, K, V, BLOCK_K, BLOCK_W)
            new = load_rows(new_ptr, first, steps, inside, column, V, BLOCK_W)
            new = (end[:, None] * new.to(tl.float32)).to(dtype)
            d_k = tl.dot(new, d_next.to(dtype), d_k, input_precision=PRECISION)
        k = load_rows(k_ptr, first, steps, inside, row, K, BLOCK_K).to(tl.float32)
        k *= k_norms[:, None]
        right = k.to(dtype)
        d_q = tl.dot(d_scores, right, start[:, None] * d_q, input_precision=PRECISION)
        d_k = tl.dot(d_system, right, d_k, input_precision=PRECISION)
        d_k = tl.dot(tl.trans(d_system), right, d_k, input_precision=PRECISION)
        q = load_rows(q_ptr, first, steps, inside, row, K, BLOCK_K).to(tl.float32)
        right = (q_norms[:, None] * q).to(dtype)
        d_k = tl.dot(tl.trans(d_scores), right, d_k, input_precision=PRECISION)
        d_q *= q_norms[:, None]
        if L2_NORMALIZE:  # what only makes a row longer has no effect
            d_q -= (q_lengths * q_lengths * along_q)[:, None] * q
            d_k -= along_k[:, None] * k
        store_rows(d_q_ptr, d_q, first, steps, inside, row, K, BLOCK_K)
        store_rows(d_k_ptr, k_norms[:, None] * d_k, first, steps, inside, row, K, BLOCK_K)
