"""Backward pass of the expert layer, in the names of `forward.py`.

For row r, of slot s = order[r], token t, expert e:

    h[r] = d_y[t] w_down[e]^T                       (the hidden units' gradient, unweighted)
    d_weights[s] = hidden[r] . h[r]                 (= out[r] . d_y[t], but out is not kept)
    d_gate[r] = weights[s] h[r] up[r] a'(gate[r])
    d_up[r] = weights[s] h[r] a(gate[r])
    d_rows[r] = d_gate[r] w_gate[e]^T + d_up[r] w_up[e]^T,   d_x[t] = sum of d_rows over t's slots
    d_w_gate[e] = sum over r of x[t]^T d_gate[r],   d_w_up[e] alike
    d_w_down[e] = sum over r of (weights[s] hidden[r])^T d_y[t]

The sums over rows are `kernels_triton.grouped.grouped_outer`, d_x is `moe_combine`. Nothing is
added up by atomics: two runs give the same bits.
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
from kernels_triton.grouped.tiles import (
    gathered_row_pointers,
    left_tile,
    right_tile,
    row_pointers,
    store_rows,
)


@triton.jit
def through_activation(
    h, weights, gate_ptr, up_ptr, d_gate_ptr, d_up_ptr, weighted_ptr, first, end, start_n,
    N: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Stores a tile of d_gate, d_up and weighted; returns its share of d_weights, (BLOCK_M,)."""
    gate = left_tile(row_pointers(gate_ptr, first, end, N, BLOCK_M), start_n, N, WIDTH)
    up = left_tile(row_pointers(up_ptr, first, end, N, BLOCK_M), start_n, N, WIDTH)
    gate, up = gate.to(tl.float32), up.to(tl.float32)
    active, slope = activation(gate, ACTIVATION)
    hidden = active * up
    store_rows(weighted_ptr, hidden * weights, first, end, start_n, N, BLOCK_M, WIDTH)
    share = tl.sum(hidden * h, 1)
    h *= weights
    store_rows(d_gate_ptr, h * up * slope, first, end, start_n, N, BLOCK_M, WIDTH)
    store_rows(d_up_ptr, h * active, first, end, start_n, N, BLOCK_M, WIDTH)
    return share


@triton.jit
def moe_d_hidden(
    d_y_ptr, w_down_ptr, gate_ptr, up_ptr, weights_ptr, order_ptr, group_sizes_ptr,
    M,
    d_gate_ptr, d_up_ptr, weighted_ptr, d_weights_ptr,
    E: tl.constexpr, GROUPS: tl.constexpr, K: tl.constexpr, N: tl.constexpr,
    TOP_K: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program makes tiles of BLOCK_M rows and BLOCK_N hidden units.

    M rows, of K = D inputs and N = F outputs. weighted (M, F) is weights[s] hidden[r]; d_weights
    (cdiv(F, BLOCK_N), M) float32 has one row for each tile's share of the sum over F.
    Grid: (P,), any P.
    """
    starts, ends = group_bounds(group_sizes_ptr, M, E, GROUPS)
    tile_ends, origins, tiles_m = tile_bounds(starts, ends, BLOCK_M)
    tiles_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    for t in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        m, n = swizzle(t, tiles_m, tiles_n)
        expert, first, end = tile_rows(m, ends, tile_ends, origins, GROUPS, BLOCK_M)
        d_y_row = gathered_row_pointers(d_y_ptr, order_ptr, first, end, TOP_K, K, BLOCK_M)
        matrix_ptr = w_down_ptr + expert.to(tl.int64) * (K * N)
        h = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in range(0, terms(expert, E, K), BLOCK_K):
            d_y = left_tile(d_y_row, k, K, BLOCK_K)
            w = right_tile(matrix_ptr, k, n * BLOCK_N, K, N, True, BLOCK_K, BLOCK_N)
            h = tl.dot(d_y, w, h, input_precision=PRECISION)

        rows = tl.arange(0, BLOCK_M)
        slots = tl.load(order_ptr + first + rows, mask=first + rows < end, other=0)
        weights = tl.load(weights_ptr + slots, mask=first + rows < end, other=0.0)[:, None]
        # Two halves, one after the other: fewer values live at a time.
        HALF: tl.constexpr = BLOCK_N // 2
        left, right = tl.reshape(h, [BLOCK_M, 2, HALF]).permute(0, 2, 1).split()
        start_n = n * BLOCK_N
        share = through_activation(
            left, weights, gate_ptr, up_ptr, d_gate_ptr, d_up_ptr, weighted_ptr,
            first, end, start_n, N, ACTIVATION, BLOCK_M, HALF,
        )  # fmt: skip
        share += through_activation(
            right, weights, gate_ptr, up_ptr, d_gate_ptr, d_up_ptr, weighted_ptr,
            first, end, start_n + HALF, N, ACTIVATION, BLOCK_M, HALF,
        )  # fmt: skip
        d_weights_row = d_weights_ptr + n.to(tl.int64) * M + first
        tl.store(d_weights_row + rows, share, mask=first + rows < end)


@triton.jit
def moe_d_input(
    d_gate_ptr, d_up_ptr, w_gate_ptr, w_up_ptr, group_sizes_ptr,
    M,
    d_rows_ptr,
    E: tl.constexpr, GROUPS: tl.constexpr, K: tl.constexpr, N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program makes tiles of BLOCK_M rows and BLOCK_N columns of d_rows.

    M rows, of K = F inputs and N = D outputs. Grid: (P,), any P.
    """
    starts, ends = group_bounds(group_sizes_ptr, M, E, GROUPS)
    tile_ends, origins, tiles_m = tile_bounds(starts, ends, BLOCK_M)
    tiles_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    for t in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        m, n = swizzle(t, tiles_m, tiles_n)
        expert, first, end = tile_rows(m, ends, tile_ends, origins, GROUPS, BLOCK_M)
        d_gate_row = row_pointers(d_gate_ptr, first, end, K, BLOCK_M)
        d_up_row = row_pointers(d_up_ptr, first, end, K, BLOCK_M)
        matrix = expert.to(tl.int64) * (K * N)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in range(0, terms(expert, E, K), BLOCK_K):
            d = left_tile(d_gate_row, k, K, BLOCK_K)
            w = right_tile(w_gate_ptr + matrix, k, n * BLOCK_N, K, N, True, BLOCK_K, BLOCK_N)
            acc = tl.dot(d, w, acc, input_precision=PRECISION)
            d = left_tile(d_up_row, k, K, BLOCK_K)
            w = right_tile(w_up_ptr + matrix, k, n * BLOCK_N, K, N, True, BLOCK_K, BLOCK_N)
            acc = tl.dot(d, w, acc, input_precision=PRECISION)
        store_rows(d_rows_ptr, acc, first, end, n * BLOCK_N, N, BLOCK_M, BLOCK_N)
