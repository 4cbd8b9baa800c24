"""Outputs of the scan of Mamba-2, chunk by chunk from the states before the chunks.

    y_i = sum over j <= i of   exp(a_i - a_j) (C_i . B_j) dt_j x_j   +   exp(a_i) h C_i   +   D x_i

over the tokens of a chunk, h (P, R) the state before it, a the sums of dt A from its first token on
(`decays.py`); then y * silu(z). x, y, z (B, L, H, P); B, C (B, L, G, R), one group for H / G heads.
Where segments differ an exponential is 0. Operands of products are rounded to x's dtype, all else
is float32; y is rounded once.

Source: Dao, Gu: Transformers are SSMs, https://arxiv.org/abs/2405.21060.
"""

import triton
import triton.language as tl

from kernels_triton.activation import activation
from kernels_triton.grouped.tiles import left_tile, load_operand, right_tile
from kernels_triton.ssd.decays import between, extent, from_start, rows


@triton.jit
def terms(length, WIDTH: tl.constexpr):
    """WIDTH for every chunk that has tokens, and unknown to LLVM.

    It would unroll a loop of few steps, and hold the operands of all of them in registers.
    """
    return tl.minimum(length * WIDTH, WIDTH)


@triton.jit
def inner_products(
    row_ptr, column_ptr, length, N: tl.constexpr, M: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of each row that `row_ptr`, (N, 1), names with each that `column_ptr`, (1, M), does: (N, M).

    A loop, also where WIDTH is small: of two products in one block, the one an operand of the
    other, Triton 3.9 has each warp make whole rows or columns, with all of an operand in registers.
    """
    product = tl.zeros([N, M], tl.float32)
    for k in range(0, terms(length, WIDTH), BLOCK_K):
        left = left_tile(row_ptr, k, WIDTH, BLOCK_K)
        offs = k + tl.arange(0, BLOCK_K)[:, None]
        if WIDTH % BLOCK_K == 0:
            right = load_operand(column_ptr + offs)
        else:
            right = load_operand(column_ptr + offs, offs < WIDTH)
        product = tl.dot(left, right, product, input_precision=PRECISION)
    return product


@triton.jit
def with_state(
    row_ptr, state_ptr, length, WIDTH: tl.constexpr, OUT: tl.constexpr, TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_OUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows (BLOCK_M, WIDTH) times a state (WIDTH, OUT), or, TRANSPOSED, (OUT, WIDTH)."""
    product = tl.zeros([BLOCK_M, BLOCK_OUT], tl.float32)
    for k in range(0, terms(length, WIDTH), BLOCK_K):
        left = left_tile(row_ptr, k, WIDTH, BLOCK_K)
        state = right_tile(state_ptr, k, 0, WIDTH, OUT, TRANSPOSED, BLOCK_K, BLOCK_OUT)
        product = tl.dot(left, state.to(left.dtype), product, input_precision=PRECISION)
    return product


@triton.jit
def ssd_outputs(
    x_ptr, B_ptr, C_ptr, z_ptr, d_y_ptr, heads_ptr, steps_ptr, runs_ptr, states_ptr,
    L, CHUNKS,
    y_ptr, d_ungated_ptr,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, R: tl.constexpr, CHUNK: tl.constexpr,
    GATE: tl.constexpr, HAS_RUNS: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """One program makes the outputs of BLOCK_M tokens of one head.

    GATE is "none", "forward" for y * silu(z), or "backward": then y_ptr takes the gradient of z,
    and d_ungated (B, L, H, P) that of y before the gate. heads as in `steps.py`.
    Grid: (B * CHUNKS * H * (CHUNK / BLOCK_M),).
    """
    tiles: tl.constexpr = CHUNK // BLOCK_M
    pid = tl.program_id(0)
    h, chunk = pid // tiles % H, pid // tiles // H % CHUNKS
    b = (pid // tiles // H // CHUNKS).to(tl.int64)
    origin, length = extent(chunk, L, CHUNK, REVERSE)
    # Later tokens have more to add up: start the long programs first.
    start = (tiles - 1 - pid % tiles) * BLOCK_M
    if start >= length:
        return
    time = CHUNKS * CHUNK
    steps_ptr += (b * H + h) * 3 * time + chunk * CHUNK
    runs_ptr += b * L + origin
    token = ((b * L + origin) * H + h) * P
    group = ((b * L + origin) * G + h // (H // G)) * R
    states_ptr += ((b * CHUNKS + chunk) * H + h) * (P * R)

    t = start + tl.arange(0, BLOCK_M)
    C_row = C_ptr + group + rows(t, length, G * R, REVERSE)[:, None]
    y = with_state(C_row, states_ptr, length, R, P, True, BLOCK_M, BLOCK_K, BLOCK_P, PRECISION)
    y *= from_start(steps_ptr, runs_ptr, t, chunk, length, time, HAS_RUNS, REVERSE)[:, None]
    C_column = C_ptr + group + rows(t, length, G * R, REVERSE)[None, :]
    for start_j in range(0, start + BLOCK_M, BLOCK_N):
        j = start_j + tl.arange(0, BLOCK_N)
        B_row = B_ptr + group + rows(j, length, G * R, REVERSE)[:, None]
        scores = inner_products(B_row, C_column, length, BLOCK_N, BLOCK_M, R, BLOCK_K, PRECISION)
        scores *= between(steps_ptr, runs_ptr, t, j, length, time, HAS_RUNS, REVERSE)
        scores *= tl.load(steps_ptr + j)[:, None]
        x = left_tile(x_ptr + token + rows(j, length, H * P, REVERSE)[:, None], 0, P, BLOCK_P)
        y = tl.dot(tl.trans(scores.to(x.dtype)), x, y, input_precision=PRECISION)

    offs_p = tl.arange(0, BLOCK_P)[None, :]
    offsets = token + rows(t, length, H * P, REVERSE)[:, None] + offs_p
    mask = (t < length)[:, None] & (offs_p < P)
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    y += tl.load(heads_ptr + b * 3 * H + 2 * H + h) * x
    if GATE != "none":
        z = tl.load(z_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        gate, slope = activation(z, "silu")
        if GATE == "backward":
            d_y = tl.load(d_y_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
            d_ungated = (d_y * gate).to(d_ungated_ptr.dtype.element_ty)
            tl.store(d_ungated_ptr + offsets, d_ungated, mask=mask)
            gate = d_y * slope
        y *= gate
    tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)
