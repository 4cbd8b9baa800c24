"""Forward pass of the gated delta rule, chunk by chunk.

In a chunk of C tokens, with c the running sum of g, S the transposed state (K, V) that enters, and
G[i, j] = exp(c_i - c_j) for j <= i, else 0:

    A = beta G (k k^T) below the diagonal            T = (I + A)^-1
    new = T beta (v - exp(c) k S)                    S' = exp(c_last) S + (exp(c_last - c) k)^T new
    o = scale (exp(c) q S + G (q k^T) new)

Chunks follow one another in a program. Where batch and heads do not fill the card, time is cut in
parts, and the part is an affine map of the state: `delta_rule_compose` makes these maps, side by
side, `states.py` the states between parts, and `delta_rule_outputs` goes through the chunks of all
parts side by side once more. Both make T: it is larger than what it is made of.

q, k (B, L, H, K), v, o (B, L, H, V), g, beta (B, L, H); states (B, n, H, K, V) float32 for n =
cdiv(L, C) chunks in the order of the scan. With L2_NORMALIZE queries and keys stand for themselves
divided by their norms. Operands of products have k's dtype, sums are float32, and T is made in full
float32. Rows of k and q are not scaled where the other operand or the result can be.

Source: Yang, Kautz, Hatamizadeh, Gated Delta Networks, https://arxiv.org/abs/2412.06464; Yang et
al., https://arxiv.org/abs/2406.06484 (chunks).
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
    locate,
    matrix,
    mixed_columns,
    outer_decays,
    row_products,
    store_rows,
)


@triton.jit
def delta_rule_compose(
    k_ptr, v_ptr, g_ptr, beta_ptr, runs_ptr,
    L, chunks, parts, per_part,
    maps_ptr, decay_ptr,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_P: tl.constexpr,
    L2_NORMALIZE: tl.constexpr, HAS_RUNS: tl.constexpr, REVERSE: tl.constexpr,
    PRECISION: tl.constexpr, INVERSE_PRECISION: tl.constexpr,
):  # fmt: skip
    """One program makes BLOCK_W columns of the map of one part of one head: update and addend.

    The addend is the state behind the part if it was zero before. The update is that without values
    if it was the identity, less the product of all decays: what is then carried is the difference.
    maps (B, parts, H, K, K + V), decay (B, parts, H).
    Grid: (B * parts * H * cdiv(K + V, BLOCK_W),).
    """
    b, part, h, block = locate(tl.program_id(0), parts, H, (K + V + BLOCK_W - 1) // BLOCK_W)
    column = block * BLOCK_W
    state = tl.zeros([BLOCK_K, BLOCK_W], tl.float32)
    total = 1.0
    begin = part * per_part
    for n in tl.range(begin, tl.minimum(begin + per_part, chunks), disable_licm=True):
        first, steps, inside = chunk_rows(b, n, h, L, H, C, REVERSE)
        T, norms = key_inverse(
            k_ptr, g_ptr, beta_ptr, runs_ptr, first, steps, inside,
            H, K, C, BLOCK_P, L2_NORMALIZE, HAS_RUNS, PRECISION, INVERSE_PRECISION,
        )  # fmt: skip
        start, end, whole = outer_decays(
            g_ptr, runs_ptr, first, steps, inside, n, H, HAS_RUNS, REVERSE
        )
        beta = load_gate(beta_ptr, first, steps, inside)
        k = load_rows(k_ptr, first, steps, inside, 0, K, BLOCK_K)
        start *= norms
        recalled = start[:, None] * tl.dot(k, state.to(k.dtype), input_precision=PRECISION)
        identity, v = mixed_columns(k_ptr, v_ptr, first, steps, inside, column, K, V, BLOCK_W)
        right = beta[:, None] * (v - (total * start)[:, None] * identity - recalled)
        new = tl.dot(T, right.to(k.dtype), input_precision=PRECISION)
        new = ((end * norms)[:, None] * new).to(k.dtype)
        keys = load_columns(k_ptr, first, steps, inside, 0, K, BLOCK_K)
        state = tl.dot(keys, new, whole * state, input_precision=PRECISION)
        total *= whole
    index = (b * parts + part) * H + h
    offsets, mask = matrix(index, column, K, K + V, BLOCK_K, BLOCK_W)
    tl.store(maps_ptr + offsets, state, mask=mask)
    if block == 0:
        tl.store(decay_ptr + index, total)


@triton.jit
def delta_rule_outputs(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, runs_ptr, initial_ptr,
    L, chunks, parts, per_part, scale,
    o_ptr, states_ptr, final_ptr,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_P: tl.constexpr,
    HAS_INITIAL: tl.constexpr, KEEP: tl.constexpr,
    L2_NORMALIZE: tl.constexpr, HAS_RUNS: tl.constexpr, REVERSE: tl.constexpr,
    PRECISION: tl.constexpr, INVERSE_PRECISION: tl.constexpr,
):  # fmt: skip
    """One program makes BLOCK_W columns of the outputs of one part of one head.

    initial (B, parts, H, K, V) is the state before each part, states the state before each chunk,
    written only if KEEP: for a backward pass; final (B, H, K, V) the last one.
    Grid: (B * parts * H * cdiv(V, BLOCK_W),).
    """
    b, part, h, block = locate(tl.program_id(0), parts, H, (V + BLOCK_W - 1) // BLOCK_W)
    column = block * BLOCK_W
    state = tl.zeros([BLOCK_K, BLOCK_W], tl.float32)
    if HAS_INITIAL:
        offsets, mask = matrix((b * parts + part) * H + h, column, K, V, BLOCK_K, BLOCK_W)
        state = tl.load(initial_ptr + offsets, mask=mask, other=0.0)
    begin = part * per_part
    for n in tl.range(begin, tl.minimum(begin + per_part, chunks), disable_licm=True):
        first, steps, inside = chunk_rows(b, n, h, L, H, C, REVERSE)
        T, k_norms = key_inverse(
            k_ptr, g_ptr, beta_ptr, runs_ptr, first, steps, inside,
            H, K, C, BLOCK_P, L2_NORMALIZE, HAS_RUNS, PRECISION, INVERSE_PRECISION,
        )  # fmt: skip
        start, end, whole = outer_decays(
            g_ptr, runs_ptr, first, steps, inside, n, H, HAS_RUNS, REVERSE
        )
        beta = load_gate(beta_ptr, first, steps, inside)
        before = state.to(k_ptr.dtype.element_ty)
        k = load_rows(k_ptr, first, steps, inside, 0, K, BLOCK_K)
        recalled = (start * k_norms)[:, None] * tl.dot(k, before, input_precision=PRECISION)
        q = load_rows(q_ptr, first, steps, inside, 0, K, BLOCK_K)
        o = start[:, None] * tl.dot(q, before, input_precision=PRECISION)
        v = load_rows(v_ptr, first, steps, inside, column, V, BLOCK_W).to(tl.float32)
        right = (beta[:, None] * (v - recalled)).to(k.dtype)
        new = tl.dot(T, right, input_precision=PRECISION)
        scores, squares = row_products(q_ptr, k_ptr, first, steps, inside, K, C, BLOCK_P, PRECISION)
        between = inner_decays(g_ptr, runs_ptr, first, steps, inside, H, C, HAS_RUNS, False)
        new *= k_norms[:, None]
        scores = (between * scores).to(k.dtype)
        o = tl.dot(scores, new.to(k.dtype), o, input_precision=PRECISION)
        o *= (inverse_norms(squares, L2_NORMALIZE) * scale)[:, None]
        store_rows(o_ptr, o, first, steps, inside, column, V, BLOCK_W)
        if KEEP:
            offsets, mask = matrix((b * chunks + n) * H + h, column, K, V, BLOCK_K, BLOCK_W)
            tl.store(states_ptr + offsets, state, mask=mask)
        new = (end[:, None] * new).to(k.dtype)
        keys = load_columns(k_ptr, first, steps, inside, 0, K, BLOCK_K)
        state = tl.dot(keys, new, whole * state, input_precision=PRECISION)
    if part == parts - 1:
        offsets, mask = matrix(b * H + h, column, K, V, BLOCK_K, BLOCK_W)
        tl.store(final_ptr + offsets, state, mask=mask)
