"""The causal convolution: y_t = a(bias + sum over j of w_j x_{t - (W - 1) + j}), by channel.

x, y (B, L, D); weight (D, W), W from 2 to 4; bias (D,); initial (B, W - 1, D) float32, what stands
before time 0; runs (B, L) int32. a is the identity or silu. Inputs of another run count as 0, and
only run 0 sees the initial state. The sum is float32, y is rounded once.

Memory-bound: x is read once from memory, W times from the cache.
"""

import triton
import triton.language as tl

from kernels_triton.activation import activation
from kernels_triton.scan import row


@triton.jit
def program(PARTS, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Batch (int64), part of time, and channels of a program; channels vary fastest.

    One of B * PARTS * cdiv(D, BLOCK_D).
    """
    pid = tl.program_id(0)
    columns: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    offs_d = pid % columns * BLOCK_D + tl.arange(0, BLOCK_D)
    return tl.cast(pid // columns // PARTS, tl.int64), pid // columns % PARTS, offs_d


@triton.jit
def load_rows(x_ptr, t, seen, offs_d, L, D: tl.constexpr, REVERSE: tl.constexpr):
    """Rows of times t of a sequence, 0 where they are not `seen`: (BLOCK_T, BLOCK_D) float32."""
    rows = tl.cast(row(t, L, REVERSE), tl.int64)[:, None] * D
    mask = seen[:, None] & (offs_d < D)[None, :]
    return tl.load(x_ptr + rows + offs_d[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def same_run(runs_ptr, t, earlier, L, HAS_RUNS: tl.constexpr, REVERSE: tl.constexpr):
    """Whether times t and `earlier` both lie in the sequence, and in one segment."""
    same = (earlier >= 0) & (t < L)
    if HAS_RUNS:
        run = tl.load(runs_ptr + row(t, L, REVERSE), mask=same, other=0)
        same &= run == tl.load(runs_ptr + row(earlier, L, REVERSE), mask=same, other=0)
    return same


@triton.jit
def tap(
    x_ptr, initial_ptr, runs_ptr, t, BACK: tl.constexpr, offs_d, L,
    D: tl.constexpr, W: tl.constexpr,
    HAS_INITIAL: tl.constexpr, HAS_RUNS: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """What times t see BACK steps ago: (BLOCK_T, BLOCK_D) float32."""
    earlier = t - BACK
    seen = same_run(runs_ptr, t, earlier, L, HAS_RUNS, REVERSE)
    x = load_rows(x_ptr, earlier, seen, offs_d, L, D, REVERSE)
    if HAS_INITIAL and BACK > 0:
        seen = (earlier < 0) & (t < L)
        if HAS_RUNS:
            seen &= tl.load(runs_ptr + row(t, L, REVERSE), mask=seen, other=1) == 0
        x += load_rows(initial_ptr, W - 1 + earlier, seen, offs_d, L, D, False)
    return x


@triton.jit
def before_activation(
    x_ptr, weight_ptr, bias_ptr, initial_ptr, runs_ptr, t, offs_d, L,
    D: tl.constexpr, W: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_INITIAL: tl.constexpr, HAS_RUNS: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """The sum at times t: (BLOCK_T, BLOCK_D) float32."""
    total = tl.zeros([t.shape[0], offs_d.shape[0]], tl.float32)
    if HAS_BIAS:
        total += tl.load(bias_ptr + offs_d, mask=offs_d < D, other=0.0).to(tl.float32)[None, :]
    for j in tl.static_range(W):
        x = tap(
            x_ptr, initial_ptr, runs_ptr, t, W - 1 - j, offs_d, L,
            D, W, HAS_INITIAL, HAS_RUNS, REVERSE,
        )  # fmt: skip
        total += load_weight(weight_ptr, j, offs_d, D, W)[None, :] * x
    return total


@triton.jit
def load_weight(weight_ptr, j, offs_d, D: tl.constexpr, W: tl.constexpr):
    """w_j of the channels: (BLOCK_D,) float32."""
    return tl.load(weight_ptr + offs_d * W + j, mask=offs_d < D, other=0.0).to(tl.float32)


@triton.jit
def convolution_forward(
    x_ptr, weight_ptr, bias_ptr, initial_ptr, runs_ptr,
    L,
    y_ptr,
    D: tl.constexpr, W: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_INITIAL: tl.constexpr, HAS_RUNS: tl.constexpr, REVERSE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program makes y of BLOCK_T times and BLOCK_D channels.

    Grid: (B * cdiv(L, BLOCK_T) * cdiv(D, BLOCK_D),).
    """
    b, part, offs_d = program(tl.cdiv(L, BLOCK_T), D, BLOCK_D)
    t = part * BLOCK_T + tl.arange(0, BLOCK_T)
    y = before_activation(
        x_ptr + b * L * D, weight_ptr, bias_ptr, initial_ptr + b * (W - 1) * D, runs_ptr + b * L,
        t, offs_d, L, D, W, HAS_BIAS, HAS_INITIAL, HAS_RUNS, REVERSE,
    )  # fmt: skip
    if ACTIVATION == "silu":
        y, _ = activation(y, "silu")
    rows = tl.cast(row(t, L, REVERSE), tl.int64)[:, None] * D
    mask = (t < L)[:, None] & (offs_d < D)[None, :]
    tl.store(y_ptr + b * L * D + rows + offs_d[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)
