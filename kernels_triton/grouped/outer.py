"""Contraction of two arrays over the rows of each group: the gradient of a grouped product.

    out[g] = sum over the rows r of group g of   left[r]^T right[r]

left (M, K), right (M, N), the groups' rows one behind the other; out (G, K, N), 0 for an empty
group. Either may instead be given by token, (tokens, ...), with the slot of each row in `order`:
row r is then that of token order[r] // TOP_K.
Operands float32, bfloat16 or float16; sums float32.
"""

import triton
import triton.language as tl

from kernels_triton.grouped.schedule import group_bounds
from kernels_triton.grouped.tiles import load_operand


@triton.jit
def grouped_outer(
    left_ptr, right_ptr, order_ptr, group_sizes_ptr,
    M,
    out_ptr,
    G: tl.constexpr, GROUPS: tl.constexpr, K: tl.constexpr, N: tl.constexpr,
    GATHER_LEFT: tl.constexpr, GATHER_RIGHT: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program makes a tile of one group's matrix, from one of SPLITS parts of its rows.

    out (SPLITS, G, K, N). Grid: (SPLITS * G * cdiv(K, BLOCK_K) * cdiv(N, BLOCK_N),).
    """
    tiles_k: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    tiles_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    pid = tl.program_id(0)
    n = pid % tiles_n
    k = (pid // tiles_n) % tiles_k
    group = (pid // (tiles_n * tiles_k)) % G
    split = pid // (tiles_n * tiles_k * G)

    starts, ends = group_bounds(group_sizes_ptr, M, G, GROUPS)
    mine = tl.arange(0, GROUPS) == group
    start = tl.sum(tl.where(mine, starts, 0), 0)
    end = tl.sum(tl.where(mine, ends, 0), 0)
    part = tl.cdiv(tl.cdiv(tl.maximum(end - start, 0), BLOCK_M), SPLITS) * BLOCK_M
    start += split * part
    end = tl.minimum(end, start + part)

    offs_m = tl.arange(0, BLOCK_M)
    offs_k = k * BLOCK_K + tl.arange(0, BLOCK_K)
    offs_n = n * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_K, BLOCK_N], tl.float32)
    for first in range(start, end, BLOCK_M):
        inside = first + offs_m < end
        rows = tl.cast(first, tl.int64) + offs_m
        left_rows, right_rows = rows, rows
        if GATHER_LEFT or GATHER_RIGHT:
            tokens = tl.load(order_ptr + rows, mask=inside, other=0) // TOP_K
            if GATHER_LEFT:
                left_rows = tokens.to(tl.int64)
            if GATHER_RIGHT:
                right_rows = tokens.to(tl.int64)
        # The left tile is read as its transpose: with a transposition after the load the compiler
        # would copy TF32 operands word by word.
        left_mask, right_mask = inside[None, :], inside[:, None]
        if K % BLOCK_K != 0:
            left_mask = left_mask & (offs_k < K)[:, None]
        if N % BLOCK_N != 0:
            right_mask = right_mask & (offs_n < N)[None, :]
        left = load_operand(left_ptr + (left_rows * K)[None, :] + offs_k[:, None], left_mask)
        right = load_operand(right_ptr + (right_rows * N)[:, None] + offs_n[None, :], right_mask)
        acc = tl.dot(left, right, acc, input_precision=PRECISION)

    mask = (offs_k < K)[:, None] & (offs_n < N)[None, :]
    out_ptr += (split * G + group).to(tl.int64) * (K * N)
    offsets = offs_k.to(tl.int64)[:, None] * N + offs_n[None, :]
    tl.store(out_ptr + offsets, acc.to(out_ptr.dtype.element_ty), mask=mask)
