"""Gradients of the causal convolution, in the names of `forward.py`.

With e_t = d_y_t a'(the sum at t), made again from x:

    d_x_t = sum over s of w_{W - 1 - s} e_{t + s}     d_w_j = sum of e_t x_{t - (W - 1) + j}
    d_bias = sum of e_t

A program goes through time and loads STEPS times before it computes with them, so that enough loads
are in flight. The last W - 1 inputs, the d_x that are not complete yet and the sums stay in
registers: each row is loaded once. Sums over times are one row a part, added up outside in fixed
order.
"""

import triton
import triton.language as tl

from kernels_triton.activation import activation
from kernels_triton.convolution.forward import load_rows, load_weight, program
from kernels_triton.scan import row


@triton.jit
def convolution_backward(
    x_ptr, weight_ptr, bias_ptr, initial_ptr, runs_ptr, d_y_ptr,
    L, PARTS, LENGTH,
    d_x_ptr, d_weight_ptr, d_bias_ptr,
    D: tl.constexpr, W: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_INITIAL: tl.constexpr, HAS_RUNS: tl.constexpr, REVERSE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """One program makes d_x of ROWS * LENGTH times and BLOCK_D channels, and their sums.

    Each of ROWS rows of registers goes through LENGTH times, and looks W - 1 times ahead. d_weight
    (B, PARTS, W, D), d_bias (B, PARTS, D) float32; d_bias has no element without bias.
    Grid: (B * PARTS * cdiv(D, BLOCK_D),).
    """
    b, part, offs_d = program(PARTS, D, BLOCK_D)
    start = (part * ROWS + tl.arange(0, ROWS)) * LENGTH
    end = tl.minimum(start + LENGTH, L)
    x_ptr += b * L * D
    d_y_ptr += b * L * D
    d_x_ptr += b * L * D
    initial_ptr += b * (W - 1) * D
    runs_ptr += b * L
    nothing = tl.zeros([ROWS, BLOCK_D], tl.float32)
    bias = tl.zeros([BLOCK_D], tl.float32)
    if HAS_BIAS:
        bias += tl.load(bias_ptr + offs_d, mask=offs_d < D, other=0.0).to(tl.float32)
    # By s: the weight of the input s times ago, and its sum; by s - 1: that input with its run, and
    # its d_x so far.
    weights = ()
    sums = ()
    past = ()
    pending = ()
    for s in tl.static_range(W):
        weights = weights + (load_weight(weight_ptr, W - 1 - s, offs_d, D, W)[None, :],)
        sums = sums + (nothing,)
        if s > 0:
            before = load_inputs(
                x_ptr, initial_ptr, runs_ptr, start - s, offs_d, L,
                D, W, HAS_INITIAL, HAS_RUNS, REVERSE,
            )  # fmt: skip
            past = past + (before,)
            pending = pending + (nothing,)
    sum_e = nothing
    for first in range(0, LENGTH + W - 1, STEPS):
        loaded = ()
        for i in tl.static_range(STEPS):
            t = start + first + i
            x, run = load_inputs(
                x_ptr, initial_ptr, runs_ptr, t, offs_d, L, D, W, False, HAS_RUNS, REVERSE
            )
            d_y = load_rows(d_y_ptr, t, t < L, offs_d, L, D, REVERSE)
            loaded = loaded + ((x, run, d_y),)
        for i in tl.static_range(STEPS):
            x, run, e = loaded[i]
            t = start + first + i
            taps = (x,)
            for s in tl.static_range(1, W):
                tap, its_run = past[s - 1]
                taps = taps + (tl.where((run == its_run)[:, None], tap, 0.0),)
            if ACTIVATION == "silu":
                total = nothing + bias[None, :]
                for s in tl.static_range(W):
                    total += weights[s] * taps[s]
                _, slope = activation(total, "silu")
                e *= slope
            inside = tl.where((t < end)[:, None], e, 0.0)
            sum_e += inside
            new_sums = ()
            new_pending = (weights[0] * e,)
            for s in tl.static_range(W):
                new_sums = new_sums + (sums[s] + inside * taps[s],)
                if s > 0:
                    reached = tl.where((run == past[s - 1][1])[:, None], weights[s] * e, 0.0)
                    new_pending = new_pending + (pending[s - 1] + reached,)
            sums = new_sums
            done = t - (W - 1)
            rows = tl.cast(row(done, L, REVERSE), tl.int64)[:, None] * D + offs_d[None, :]
            mask = ((done >= start) & (done < end))[:, None] & (offs_d < D)[None, :]
            d_x = new_pending[W - 1].to(d_x_ptr.dtype.element_ty)
            tl.store(d_x_ptr + rows, d_x, mask=mask)
            pending = new_pending[: W - 1]
            past = ((x, run),) + past[: W - 2]
    offset = (b * PARTS + part) * D
    if HAS_BIAS:
        tl.store(d_bias_ptr + offset + offs_d, tl.sum(sum_e, 0), mask=offs_d < D)
    for s in tl.static_range(W):
        pointers = d_weight_ptr + offset * W + (W - 1 - s) * D + offs_d
        tl.store(pointers, tl.sum(sums[s], 0), mask=offs_d < D)


@triton.jit
def load_inputs(
    x_ptr, initial_ptr, runs_ptr, t, offs_d, L,
    D: tl.constexpr, W: tl.constexpr,
    HAS_INITIAL: tl.constexpr, HAS_RUNS: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """The inputs of times t, (ROWS, BLOCK_D) float32, and their runs; before time 0 that is 0."""
    x = load_rows(x_ptr, t, (t >= 0) & (t < L), offs_d, L, D, REVERSE)
    if HAS_INITIAL:
        x += load_rows(initial_ptr, W - 1 + t, t < 0, offs_d, L, D, False)
    run = tl.zeros_like(t)
    if HAS_RUNS:
        run = tl.load(runs_ptr + row(t, L, REVERSE), mask=(t >= 0) & (t < L), other=0)
    return x, run
