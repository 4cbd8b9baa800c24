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


@triton.jit
def row_block(M, BLOCK_M: tl.constexpr):
    """Row numbers (BLOCK_M,) int64 of one of B * cdiv(M, BLOCK_M) programs, and which exist."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    offs_m = (tl.program_id(0) % tiles_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    b = (tl.program_id(0) // tiles_m).to(tl.int64)
    return b * M + offs_m, offs_m < M


@triton.jit
def order_keys(logits):
    """Integers in the order of the logits, all above the least int32."""
    bits = (logits + 0.0).to(tl.int32, bitcast=True)  # -0.0 + 0.0 is 0.0
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(logits == logits, keys, 0x7FFFFFFF)


@triton.jit
def top_k_forward(
    logits_ptr,
    M,
    weights_ptr, experts_ptr,
    E: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, CHOSEN: tl.constexpr,
    NORMALIZE_ALL: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """One program routes BLOCK_M rows. Grid: (B * cdiv(M, BLOCK_M),)."""
    LEAST: tl.constexpr = -2147483648
    rows, inside = row_block(M, BLOCK_M)
    offs_e, offs_k = tl.arange(0, EXPERTS)[None, :], tl.arange(0, CHOSEN)[None, :]
    exists = inside[:, None] & (offs_e < E)
    logits = tl.load(logits_ptr + rows[:, None] * E + offs_e, mask=exists, other=-float("inf"))
    logits = logits.to(tl.float32)
    keys = tl.where(offs_e < E, order_keys(logits), LEAST)
    experts = tl.zeros([BLOCK_M, CHOSEN], tl.int32)
    chosen = tl.full([BLOCK_M, CHOSEN], -float("inf"), tl.float32)
    for j in range(TOP_K):
        largest = tl.max(keys, 1)[:, None]
        expert = tl.min(tl.where(keys == largest, offs_e, EXPERTS), 1)[:, None]
        logit = tl.sum(tl.where(offs_e == expert, logits, 0.0), 1)[:, None]
        keys = tl.where(offs_e == expert, LEAST, keys)
        experts = tl.where(offs_k == j, expert, experts)
        chosen = tl.where(offs_k == j, logit, chosen)
    peak = tl.max(chosen, 1)[:, None]
    if NORMALIZE_ALL:
        total = tl.sum(tl.where(offs_e < E, tl.exp(logits - peak), 0.0), 1)
    else:
        total = tl.sum(tl.where(offs_k < TOP_K, tl.exp(chosen - peak), 0.0), 1)
    weights = tl.exp(chosen - peak) / total[:, None]
    store = inside[:, None] & (offs_k < TOP_K)
    offsets = rows[:, None] * TOP_K + offs_k
    tl.store(weights_ptr + offsets, weights, mask=store)
    tl.store(experts_ptr + offsets, experts, mask=store)


@triton.jit
def top_k_backward(
    logits_ptr, weights_ptr, experts_ptr, d_weights_ptr,
    M,
    d_logits_ptr,
    E: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr,
    NORMALIZE_ALL: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """One program makes BLOCK_M rows of

        d_logits[m, e] = sum over j with e_j = e of w_j d_w_j  -  p_e sum over j of w_j d_w_j

    with p_e the softmax whose part the weights are. Grid: (B * cdiv(M, BLOCK_M),).
    """
    rows, inside = row_block(M, BLOCK_M)
    offs_e = tl.arange(0, EXPERTS)[None, :]
    mean = tl.zeros([BLOCK_M], tl.float32)
    gained = tl.zeros([BLOCK_M, EXPERTS], tl.float32)
    share = tl.zeros([BLOCK_M, EXPERTS], tl.float32)
    for j in range(TOP_K):
        weight = tl.load(weights_ptr + rows * TOP_K + j, mask=inside, other=0.0)
        product = weight * tl.load(d_weights_ptr + rows * TOP_K + j, mask=inside, other=0.0)
        expert = tl.load(experts_ptr + rows * TOP_K + j, mask=inside, other=0)
        mean += product
        mine = offs_e == expert[:, None]
        gained = tl.where(mine, product[:, None], gained)
        share = tl.where(mine, weight[:, None], share)
    exists = inside[:, None] & (offs_e < E)
    offsets = rows[:, None] * E + offs_e
    if NORMALIZE_ALL:
        logits = tl.load(logits_ptr + offsets, mask=exists, other=-float("inf")).to(tl.float32)
        weights = tl.exp(logits - tl.max(logits, 1)[:, None])
        share = weights / tl.sum(weights, 1)[:, None]
    d_logits = gained - share * mean[:, None]
    tl.store(d_logits_ptr + offsets, d_logits.to(d_logits_ptr.dtype.element_ty), mask=exists)
