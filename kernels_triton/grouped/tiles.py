"""Loads that the grouped products share."""

import triton
import triton.language as tl


@triton.jit
def load_operand(pointers, mask=None):
    """Loads an operand of a product, 0 where it is masked; float32 as integers of the same bits.

    Tensor cores of sm_90 and sm_100 want TF32 operands with the sum along their rows. Where they
    lie otherwise Triton 3.9 turns them while it copies to shared memory, word by word; with a cast
    in between it copies 128 bits at a time and turns them in registers.
    """
    if pointers.dtype.element_ty == tl.float32:
        bits_ptr = pointers.to(tl.pointer_type(tl.int32))
        bits = tl.load(bits_ptr) if mask is None else tl.load(bits_ptr, mask=mask, other=0)
        return bits.to(tl.float32, bitcast=True)
    return tl.load(pointers) if mask is None else tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def row_pointers(x_ptr, first, end, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr):
    """Pointers (BLOCK_M, 1) to rows of an array WIDTH wide, from `first` on.

    Rows that would lie behind `end` repeat the one before it: a load without a mask is cheaper than
    one with, and what is made of them is not stored.
    """
    rows = tl.minimum(tl.arange(0, BLOCK_M), end - 1 - first)
    return x_ptr + tl.cast(first, tl.int64) * WIDTH + (rows * WIDTH)[:, None]


@triton.jit
def gathered_row_pointers(
    x_ptr, order_ptr, first, end,
    TOP_K: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """The same for rows sorted by `order` (slot of each row): slot s is of x's row s // TOP_K."""
    rows = tl.minimum(tl.arange(0, BLOCK_M), end - 1 - first)
    tokens = tl.load(order_ptr + first + rows) // TOP_K
    return x_ptr + (tokens.to(tl.int64) * WIDTH)[:, None]


@triton.jit
def left_tile(row_ptr, start_k, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Columns from `start_k` on of the rows that `row_ptr` points to: (BLOCK_M, BLOCK_K)."""
    offs_k = start_k + tl.arange(0, BLOCK_K)[None, :]
    if K % BLOCK_K == 0:
        return load_operand(row_ptr + offs_k)
    return load_operand(row_ptr + offs_k, offs_k < K)


@triton.jit
def right_tile(
    matrix_ptr, start_k, start_n,
    K: tl.constexpr, N: tl.constexpr, TRANSPOSED: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A tile (BLOCK_K, BLOCK_N) of a matrix (K, N), or, TRANSPOSED, of the transpose of (N, K)."""
    offs_k, offs_n = tl.arange(0, BLOCK_K)[:, None], tl.arange(0, BLOCK_N)[None, :]
    start_k, start_n = tl.cast(start_k, tl.int64), tl.cast(start_n, tl.int64)
    if TRANSPOSED:
        pointers = matrix_ptr + start_n * K + start_k + offs_n * K + offs_k
    else:
        pointers = matrix_ptr + start_k * N + start_n + offs_k * N + offs_n
    if K % BLOCK_K == 0 and N % BLOCK_N == 0:
        return load_operand(pointers)
    return load_operand(pointers, (start_k + offs_k < K) & (start_n + offs_n < N))


@triton.jit
def store_rows(
    out_ptr, x, first, end, start_n, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Stores a tile's rows before `end` and columns before N, rounding to the array's dtype."""
    offs_m, offs_n = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_N)[None, :]
    mask = first + offs_m < end
    if N % BLOCK_N != 0:
        mask = mask & (start_n + offs_n < N)
    out_ptr += tl.cast(first, tl.int64) * N + start_n
    tl.store(out_ptr + offs_m * N + offs_n, x.to(out_ptr.dtype.element_ty), mask=mask)
