"""Forward pass of the expert layer: each token through its TOP_K experts, weighted and added.

    gate[r] = x[t] w_gate[e],   up[r] = x[t] w_up[e],   hidden[r] = a(gate[r]) up[r]
    y[t] = sum over j of   weights[t, j] out[position[t, j]],   out[r] = hidden[r] w_down[e]

for row r of the slots sorted by expert: slot order[r], of token t = order[r] // TOP_K, at expert e.
x, y (M, D); w_gate, w_up (E, D, F); w_down (E, F, D); gate, up, hidden (M TOP_K, F);
out (M TOP_K, D); weights (M, TOP_K) float32. A slot with an expert outside [0, E) comes last in the
order and adds nothing. The product with w_down is `kernels_triton.grouped.grouped_matmul`.
Sums are float32, each array is rounded once, at its store.

Source: Shazeer, GLU variants improve transformer, https://arxiv.org/abs/2002.05202; Gale et al.,
MegaBlocks, https://arxiv.org/abs/2211.15841.
"""

import triton
import triton.language as tl

from kernels_triton.activation import activation
from kernels_triton.grouped.schedule import (
    group_bounds,
    swizzle,
    terms,
    tile_bounds,
    tile_rows,
)
from kernels_triton.grouped.tiles import gathered_row_pointers, left_tile, right_tile, store_rows


@triton.jit
def moe_gate_up(
    x_ptr, w_gate_ptr, w_up_ptr, order_ptr, group_sizes_ptr,
    M,
    hidden_ptr, gate_ptr, up_ptr,
    E: tl.constexpr, GROUPS: tl.constexpr, K: tl.constexpr, N: tl.constexpr,
    TOP_K: tl.constexpr, ACTIVATION: tl.constexpr, KEEP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program makes tiles of BLOCK_M rows and BLOCK_N hidden units of all three outputs.

    M rows, of K = D inputs and N = F outputs. gate and up are written only if KEEP: for a backward
    pass. Grid: (P,), any P.
    """
    starts, ends = group_bounds(group_sizes_ptr, M, E, GROUPS)
    tile_ends, origins, tiles_m = tile_bounds(starts, ends, BLOCK_M)
    tiles_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    for t in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        m, n = swizzle(t, tiles_m, tiles_n)
        expert, first, end = tile_rows(m, ends, tile_ends, origins, GROUPS, BLOCK_M)
        x_row = gathered_row_pointers(x_ptr, order_ptr, first, end, TOP_K, K, BLOCK_M)
        matrix = expert.to(tl.int64) * (K * N)
        gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in range(0, terms(expert, E, K), BLOCK_K):
            x = left_tile(x_row, k, K, BLOCK_K)
            w = right_tile(w_gate_ptr + matrix, k, n * BLOCK_N, K, N, False, BLOCK_K, BLOCK_N)
            gate = tl.dot(x, w, gate, input_precision=PRECISION)
            w = right_tile(w_up_ptr + matrix, k, n * BLOCK_N, K, N, False, BLOCK_K, BLOCK_N)
            up = tl.dot(x, w, up, input_precision=PRECISION)
        active, _ = activation(gate, ACTIVATION)
        store_rows(hidden_ptr, active * up, first, end, n * BLOCK_N, N, BLOCK_M, BLOCK_N)
        if KEEP:
            store_rows(gate_ptr, gate, first, end, n * BLOCK_N, N, BLOCK_M, BLOCK_N)
            store_rows(up_ptr, up, first, end, n * BLOCK_N, N, BLOCK_M, BLOCK_N)


@triton.jit
def moe_combine(
    rows_ptr, position_ptr, experts_ptr, weights_ptr,
    M,
    y_ptr,
    E: tl.constexpr, D: tl.constexpr, TOP_K: tl.constexpr, WEIGHTED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program adds up the TOP_K rows of BLOCK_M tokens, in the order of their slots.

    Without WEIGHTED every row counts once: that is the gradient of the gather.
    Grid: (cdiv(M, BLOCK_M) * cdiv(D, BLOCK_D),).
    """
    tiles_d: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    pid = tl.program_id(0)
    offs_m = (pid // tiles_d).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = (pid % tiles_d) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask_m = offs_m < M
    mask_d = (offs_d < D)[None, :]
    y = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for j in tl.static_range(TOP_K):
        slot = offs_m * TOP_K + j
        expert = tl.load(experts_ptr + slot, mask=mask_m, other=-1)
        present = (expert >= 0) & (expert < E)
        position = tl.load(position_ptr + slot, mask=present, other=0).to(tl.int64)
        row = rows_ptr + (position * D)[:, None] + offs_d[None, :]
        x = tl.load(row, mask=present[:, None] & mask_d, other=0.0).to(tl.float32)
        if WEIGHTED:
            x *= tl.load(weights_ptr + slot, mask=present, other=0.0)[:, None]
        y += x
    y_ptr += (offs_m * D)[:, None] + offs_d[None, :]
    tl.store(y_ptr, y.to(y_ptr.dtype.element_ty), mask=mask_m[:, None] & mask_d)
