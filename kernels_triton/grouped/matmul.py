"""Product of each group of rows with a matrix of its own.

    out[r] = lhs[r] rhs[g]      for the rows r of group g; 0 for rows behind the last group

lhs (M, K), the groups' rows one behind the other; rhs (G, K, N), or (G, N, K) and used as its
transpose; group_sizes (G,) int32; out (M, N). Operands float32, bfloat16 or float16; sums float32,
rounded once, at the store.

Source: Gale, Narayanan, Young, Zaharia, MegaBlocks, https://arxiv.org/abs/2211.15841, for products
without padded or dropped rows; the schedule is in schedule.py.
"""

import triton
import triton.language as tl

from kernels_triton.grouped.schedule import (
    group_bounds,
    swizzle,
    terms,
    tile_bounds,
    tile_rows,
)
from kernels_triton.grouped.tiles import left_tile, right_tile, row_pointers, store_rows


@triton.jit
def grouped_matmul(
    lhs_ptr, rhs_ptr, group_sizes_ptr,
    M,
    out_ptr,
    G: tl.constexpr, GROUPS: tl.constexpr, K: tl.constexpr, N: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program makes tiles of BLOCK_M rows and BLOCK_N columns, every num_programs-th of them.

    Grid: (P,), any P.
    """
    starts, ends = group_bounds(group_sizes_ptr, M, G, GROUPS)
    tile_ends, origins, tiles_m = tile_bounds(starts, ends, BLOCK_M)
    tiles_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    for t in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        m, n = swizzle(t, tiles_m, tiles_n)
        group, first, end = tile_rows(m, ends, tile_ends, origins, GROUPS, BLOCK_M)
        lhs_row = row_pointers(lhs_ptr, first, end, K, BLOCK_M)
        matrix_ptr = rhs_ptr + group.to(tl.int64) * (K * N)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in range(0, terms(group, G, K), BLOCK_K):
            lhs = left_tile(lhs_row, k, K, BLOCK_K)
            rhs = right_tile(matrix_ptr, k, n * BLOCK_N, K, N, TRANSPOSED, BLOCK_K, BLOCK_N)
            acc = tl.dot(lhs, rhs, acc, input_precision=PRECISION)
        store_rows(out_ptr, acc, first, end, n * BLOCK_N, N, BLOCK_M, BLOCK_N)
