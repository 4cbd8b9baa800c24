"""What the passes over chunks share: addresses, decays, the system of a chunk and its inverse."""

import triton
import triton.language as tl

from kernels_triton.delta_rule.inverse import unit_lower_inverse
from kernels_triton.grouped.tiles import load_operand
from kernels_triton.scan import row


@triton.jit
def locate(pid, parts, H: tl.constexpr, BLOCKS: tl.constexpr):
    """Batch, part of time, head and block of columns of a program; the last vary fastest."""
    block = pid % BLOCKS
    h = (pid // BLOCKS) % H
    part = (pid // BLOCKS // H) % parts
    return tl.cast(pid // BLOCKS // H // parts, tl.int64), part, h, block


@triton.jit
def chunk_rows(b, n, h, L, H: tl.constexpr, C: tl.constexpr, REVERSE: tl.constexpr):
    """Where chunk n of the scan lies in (B, L, H): offset of its first token, those of all from
    there, (C,) int32, and which exist."""
    offs = tl.arange(0, C)
    first = n * C
    return (b * L + row(first, L, REVERSE)) * H + h, offs * (-H if REVERSE else H), first + offs < L


@triton.jit
def load_gate(x_ptr, first, steps, inside):
    """A number for each token, 0 outside: (C,), float32."""
    return tl.load(x_ptr + first + steps, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_gate(x_ptr, x, first, steps, inside):
    """Stores a number for each token, rounding to the array's dtype."""
    tl.store(x_ptr + first + steps, x.to(x_ptr.dtype.element_ty), mask=inside)


@triton.jit
def load_sum(x_ptr, first, steps, inside, BLOCKS: tl.constexpr):
    """One of four sums of each token, of all BLOCKS parts, each made by another program: (C,)."""
    x_ptr += (first + steps) * (4 * BLOCKS)
    total = tl.load(x_ptr, mask=inside, other=0.0)
    for block in range(1, BLOCKS):
        total += tl.load(x_ptr + 4 * block, mask=inside, other=0.0)
    return total


@triton.jit
def load_rows(x_ptr, first, steps, inside, start, W: tl.constexpr, BLOCK: tl.constexpr):
    """Columns from `start` on of a chunk's rows: (C, BLOCK), 0 outside."""
    offs = start + tl.arange(0, BLOCK)[None, :]
    mask = inside[:, None]
    if W % BLOCK != 0:
        mask = mask & (offs < W)
    return load_operand(x_ptr + first * W + (steps[:, None] * W + offs), mask)


@triton.jit
def load_columns(x_ptr, first, steps, inside, start, W: tl.constexpr, BLOCK: tl.constexpr):
    """The transpose of columns from `start` on of a chunk's rows: (BLOCK, C), 0 outside."""
    offs = start + tl.arange(0, BLOCK)[:, None]
    mask = inside[None, :]
    if W % BLOCK != 0:
        mask = mask & (offs < W)
    return load_operand(x_ptr + first * W + (steps[None, :] * W + offs), mask)


@triton.jit
def store_rows(x_ptr, x, first, steps, inside, start, W: tl.constexpr, BLOCK: tl.constexpr):
    """Stores columns from `start` on of a chunk's rows, rounding to the array's dtype."""
    offs = start + tl.arange(0, BLOCK)[None, :]
    mask = inside[:, None]
    if W % BLOCK != 0:
        mask = mask & (offs < W)
    x_ptr += first * W + (steps[:, None] * W + offs)
    tl.store(x_ptr, x.to(x_ptr.dtype.element_ty), mask=mask)


@triton.jit
def matrix(
    index, start, K: tl.constexpr, W: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_W: tl.constexpr
):
    """Columns from `start` on of matrix `index` of (K, W): offsets (BLOCK_K, BLOCK_W), and mask."""
    offs_k = tl.arange(0, BLOCK_K)[:, None]
    offs_w = start + tl.arange(0, BLOCK_W)[None, :]
    offsets = tl.cast(index, tl.int64) * (K * W) + (offs_k * W + offs_w)
    return offsets, (offs_k < K) & (offs_w < W)


@triton.jit
def load_transposed(
    x_ptr, index, row, column,
    K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The transpose of a tile of matrix `index` of (K, V): (BLOCK_V, BLOCK_K), 0 outside."""
    offs_k = row + tl.arange(0, BLOCK_K)[None, :]
    offs_v = column + tl.arange(0, BLOCK_V)[:, None]
    x_ptr += tl.cast(index, tl.int64) * (K * V)
    return load_operand(x_ptr + (offs_k * V + offs_v), (offs_k < K) & (offs_v < V))


@triton.jit
def row_products(
    x_ptr, y_ptr, first, steps, inside,
    W: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """x y^T of a chunk's rows, (C, C), and the squares of x's lengths; BLOCK columns at a time."""
    products = tl.zeros([C, C], tl.float32)
    squares = tl.zeros([C], tl.float32)
    for start in range(0, W, BLOCK):
        x = load_rows(x_ptr, first, steps, inside, start, W, BLOCK)
        y = load_columns(y_ptr, first, steps, inside, start, W, BLOCK)
        products = tl.dot(x, y, products, input_precision=PRECISION)
        squares += tl.sum(x.to(tl.float32) * x.to(tl.float32), axis=1)
    return products, squares


@triton.jit
def inverse_norms(squares, L2_NORMALIZE: tl.constexpr):
    """What normalises rows, from the squares of their lengths."""
    return tl.rsqrt(squares + 1e-6) if L2_NORMALIZE else tl.zeros_like(squares) + 1.0


@triton.jit
def running_sums(g_ptr, first, steps, inside):
    """Of a chunk's g: (C,), float32, and its sum.

    Where g is below -104 its exponential is 0 in float32: it stops there, lest the sums after it
    lose their digits.
    """
    g = tl.maximum(load_gate(g_ptr, first, steps, inside), -104.0)
    return tl.cumsum(g, axis=0), tl.sum(g, axis=0)


@triton.jit
def load_runs(runs_ptr, first, steps, inside, H: tl.constexpr):
    """The run of each token, (C,), -1 outside."""
    return tl.load(runs_ptr + first // H + steps // H, mask=inside, other=-1)


@triton.jit
def outer_decays(
    g_ptr, runs_ptr, first, steps, inside, n,
    H: tl.constexpr, HAS_RUNS: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Decays from a chunk's start to each token (C,), from each to its end (C,), and of all of it.

    0 between runs: the state that enters is that of the run of the token before.
    """
    sums, total = running_sums(g_ptr, first, steps, inside)
    start, end, whole = tl.exp(sums), tl.exp(total - sums), tl.exp(total)
    if HAS_RUNS:
        runs = load_runs(runs_ptr, first, steps, inside, H)
        last = tl.max(runs, axis=0)
        before = 0
        if n > 0:
            before = tl.load(runs_ptr + first // H + (1 if REVERSE else -1))
        start = tl.where(runs == before, start, 0.0)
        end = tl.where(runs == last, end, 0.0)
        whole = tl.where(last == before, whole, 0.0)
    return start, end, whole


@triton.jit
def inner_decays(
    g_ptr, runs_ptr, first, steps, inside,
    H: tl.constexpr, C: tl.constexpr, HAS_RUNS: tl.constexpr, STRICT: tl.constexpr,
):  # fmt: skip
    """Decays to each token from each one up to it: (C, C), 0 between runs and from later ones.

    STRICT: only from those before it. A kernel that needs both asks for both: comparisons of all
    pairs of tokens would else lie in registers from the first use to the last.
    """
    sums, _ = running_sums(g_ptr, first, steps, inside)
    offs = tl.arange(0, C)
    connected = offs[:, None] > offs[None, :] if STRICT else offs[:, None] >= offs[None, :]
    if HAS_RUNS:
        runs = load_runs(runs_ptr, first, steps, inside, H)
        connected = connected & (runs[:, None] == runs[None, :])
    return tl.exp(tl.where(connected, sums[:, None] - sums[None, :], float("-inf")))


@triton.jit
def key_inverse(
    k_ptr, g_ptr, beta_ptr, runs_ptr, first, steps, inside,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BLOCK_P: tl.constexpr,
    L2_NORMALIZE: tl.constexpr, HAS_RUNS: tl.constexpr,
    PRECISION: tl.constexpr, INVERSE_PRECISION: tl.constexpr,
):  # fmt: skip
    """(I + A)^-1 in the keys' dtype, with A = beta G (k k^T) below the diagonal; and what
    normalises the keys.

    Whatever follows loads its operands again: behind a barrier the compiler cannot keep those of
    here in registers, which the inverse needs.
    """
    products, squares = row_products(k_ptr, k_ptr, first, steps, inside, K, C, BLOCK_P, PRECISION)
    norms = inverse_norms(squares, L2_NORMALIZE)
    beta = load_gate(beta_ptr, first, steps, inside)
    between = inner_decays(g_ptr, runs_ptr, first, steps, inside, H, C, HAS_RUNS, True)
    system = between * (beta * norms)[:, None] * norms[None, :] * products
    T = unit_lower_inverse(system.reshape(1, C, C), 1, C, INVERSE_PRECISION).reshape(C, C)
    T = T.to(k_ptr.dtype.element_ty)
    tl.debug_barrier()
    return T, norms


@triton.jit
def mixed_columns(
    x_ptr, y_ptr, first, steps, inside, start, K: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr
):
    """Columns from `start` on of rows of K columns of x and then V of y: (C, BLOCK), float32.

    Two tiles, each 0 where the other's columns are.
    """
    offs = start + tl.arange(0, BLOCK)[None, :]
    mask = inside[:, None]
    x = tl.load(x_ptr + first * K + (steps[:, None] * K + offs), mask=mask & (offs < K), other=0.0)
    mask = mask & (offs >= K) & (offs < K + V)
    y = tl.load(y_ptr + first * V + (steps[:, None] * V + offs - K), mask=mask, other=0.0)
    return x.to(tl.float32), y.to(tl.float32)
