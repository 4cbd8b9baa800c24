"""The k largest logits of each row and their softmax weights, and the gradient.

    experts[m] = the k experts of the largest logits, in descending order
    weights[m, j] = exp(logits[m, e_j]) / sum of exp(logits[m, e])

where the sum is over the chosen e, or over all of them. Of equal logits the one with the lower
number comes first; -0.0 equals 0.0, NaN is larger than all. logits (B, M, E) float32, bfloat16 or
float16; weights (B, M, TOP_K) float32, experts (B, M, TOP_K) int32.

Source: Shazeer et al., https://arxiv.org/abs/1701.06538.
"""

import triton
import triton.language as tl

LEAST = tl.constexpr(-(2**31))  # below the keys of all logits; as bits, the sign of a float


@triton.jit
def row_block(M, BLOCK_M: tl.constexpr):
    """Row numbers (BLOCK_M,) int64 of one of B * cdiv(M, BLOCK_M) programs, and which exist."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    offs_m = (tl.program_id(0) % tiles_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    b = (tl.program_id(0) // tiles_m).to(tl.int64)
    return b * M + offs_m, offs_m < M


@triton.jit
def order_keys(logits):
    """Integers in the order of the logits: 0 for both zeros, the largest for every NaN."""
    bits = logits.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    keys = tl.where(bits < 0, -size, size)
    return tl.where(size > 0x7F800000, 0x7FFFFFFF, keys)


@triton.jit
def logits_of(keys):
    """What `order_keys` was given, but for the signs of zero and NaN."""
    return tl.where(keys < 0, -keys | LEAST, keys).to(tl.float32, bitcast=True)


@triton.jit
def top_k_forward(
    logits_ptr,
    M,
    weights_ptr, experts_ptr,
    E: tl.constexpr, BLOCK_E: tl.constexpr, TOP_K: tl.constexpr, BLOCK_K: tl.constexpr,
    NORMALIZE_ALL: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """One program routes BLOCK_M rows; BLOCK_E >= E, BLOCK_K >= TOP_K.

    Grid: (B * cdiv(M, BLOCK_M),).
    """
    rows, inside = row_block(M, BLOCK_M)
    offs_e, offs_k = tl.arange(0, BLOCK_E)[None, :], tl.arange(0, BLOCK_K)[None, :]
    exists = inside[:, None] & (offs_e < E)
    logits = tl.load(logits_ptr + rows[:, None] * E + offs_e, mask=exists, other=-float("inf"))
    logits = logits.to(tl.float32)
    keys = order_keys(logits)  # padding is the last of the -inf, so never among the first E
    experts = tl.zeros([BLOCK_M, BLOCK_K], tl.int32)
    chosen = tl.full([BLOCK_M, BLOCK_K], LEAST, tl.int32)
    for j in range(TOP_K):
        key, expert = tl.max(keys, 1, return_indices=True, keep_dims=True)  # first of equals
        keys = tl.where(offs_e == expert, LEAST, keys)
        experts = tl.where(offs_k == j, expert, experts)
        chosen = tl.where(offs_k == j, key, chosen)
    peak = logits_of(tl.max(chosen, 1)[:, None])
    weights = tl.where(offs_k < TOP_K, tl.exp(logits_of(chosen) - peak), 0.0)
    if NORMALIZE_ALL:
        total = tl.sum(tl.where(offs_e < E, tl.exp(logits - peak), 0.0), 1)
    else:
        total = tl.sum(weights, 1)
    store = inside[:, None] & (offs_k < TOP_K)
    offsets = rows[:, None] * TOP_K + offs_k
    tl.store(weights_ptr + offsets, weights / total[:, None], mask=store)
    tl.store(experts_ptr + offsets, experts, mask=store)


@triton.jit
def top_k_backward(
    logits_ptr, weights_ptr, experts_ptr, d_weights_ptr,
    M,
    d_logits_ptr,
    E: tl.constexpr, BLOCK_E: tl.constexpr, TOP_K: tl.constexpr, BLOCK_K: tl.constexpr,
    NORMALIZE_ALL: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """One program makes BLOCK_M rows of d_logits.

        mean = sum over j of w_j d_w_j
        d_logits[e_j] = w_j (d_w_j - mean)        d_logits[e] = -p_e mean for e that is not chosen

    with p the softmax over all; 0 if the weights are that over the chosen. logits are read for p
    alone. Grid: (B * cdiv(M, BLOCK_M),).
    """
    rows, inside = row_block(M, BLOCK_M)
    offs_e, offs_k = tl.arange(0, BLOCK_E)[None, :], tl.arange(0, BLOCK_K)[None, :]
    offsets = rows[:, None] * TOP_K + offs_k
    mask = inside[:, None] & (offs_k < TOP_K)
    weights = tl.load(weights_ptr + offsets, mask=mask, other=0.0)
    mean = tl.sum(weights * tl.load(d_weights_ptr + offsets, mask=mask, other=0.0), 1)
    offsets = rows[:, None] * E + offs_e
    exists = inside[:, None] & (offs_e < E)
    d_logits = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    if NORMALIZE_ALL:
        logits = tl.load(logits_ptr + offsets, mask=exists, other=-float("inf")).to(tl.float32)
        shares = tl.exp(logits - tl.max(logits, 1)[:, None])
        d_logits = -shares * (mean / tl.sum(shares, 1))[:, None]
    for j in range(TOP_K):
        weight = tl.load(weights_ptr + rows * TOP_K + j, mask=inside, other=0.0)
        d_weight = tl.load(d_weights_ptr + rows * TOP_K + j, mask=inside, other=0.0)
        expert = tl.load(experts_ptr + rows * TOP_K + j, mask=inside, other=0)
        gradient = weight * (d_weight - mean)
        d_logits = tl.where(offs_e == expert[:, None], gradient[:, None], d_logits)
    tl.store(d_logits_ptr + offsets, d_logits.to(d_logits_ptr.dtype.element_ty), mask=exists)
