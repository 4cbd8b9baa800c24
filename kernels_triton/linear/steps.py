"""Single steps of the linear recurrence h_t = a_t h_{t-1} + x_t: what its kernels share.

a (B, L, D) if VARYING, else (D,); x, h (B, L, D); runs (B, L) int32. Where the run changes a_t
counts as 0. Numbers are pairs of a real and an imaginary part in arrays of their own, float32 in
registers; the imaginary parts are absent unless COMPLEX.

Time is cut into parts of `length` steps, a multiple of STEPS, that run in parallel. A program goes
through its part STEPS at a time: it loads all of these before it computes, so that enough loads are
in flight. Channels lie across lanes, so a step needs no exchange. Times behind the end, of the last
part, have a = 1 and x = 0: they leave a state as it is.
"""

import triton
import triton.language as tl

from kernels_triton.scan import row


@triton.jit
def program(D: tl.constexpr, BLOCK_D: tl.constexpr, PARTS):
    """Batch (int64), part and channels of a program, one of B * PARTS * cdiv(D, BLOCK_D)."""
    pid = tl.program_id(0)
    columns: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    offs = pid % columns * BLOCK_D + tl.arange(0, BLOCK_D)
    return tl.cast(pid // columns // PARTS, tl.int64), pid // columns % PARTS, offs


@triton.jit
def load_pair(re_ptr, im_ptr, offset, offs, width, other, COMPLEX: tl.constexpr):
    """A row of channels; from the channel `width` on the number `other`."""
    mask = offs < width
    re = tl.load(re_ptr + offset + offs, mask=mask, other=other).to(tl.float32)
    im = tl.zeros_like(re)
    if COMPLEX:
        im = tl.load(im_ptr + offset + offs, mask=mask, other=0.0)
    return re, im


@triton.jit
def store_pair(re_ptr, im_ptr, offset, offs, re, im, width, COMPLEX: tl.constexpr):
    """A row's channels before `width`, rounded to the array's dtype."""
    mask = offs < width
    tl.store(re_ptr + offset + offs, re.to(re_ptr.dtype.element_ty), mask=mask)
    if COMPLEX:
        tl.store(im_ptr + offset + offs, im, mask=mask)


@triton.jit
def row_at(t, L, D: tl.constexpr, REVERSE: tl.constexpr):
    """Where the row of time t starts (int64), and its channels: none outside of the sequence."""
    return tl.cast(row(t, L, REVERSE), tl.int64) * D, tl.where((t >= 0) & (t < L), D, 0)


@triton.jit
def state_of_part(
    states_re_ptr, states_im_ptr, edge_re_ptr, edge_im_ptr, b, part, at_edge, offs,
    PARTS, D: tl.constexpr, HAS_EDGE: tl.constexpr, COMPLEX: tl.constexpr,
):  # fmt: skip
    """The state that a part (B, PARTS, D) passes on, or at the edge (B, D) what enters there."""
    width = tl.where(at_edge, 0, D)
    offset = (b * PARTS + part) * D
    re, im = load_pair(states_re_ptr, states_im_ptr, offset, offs, width, 0.0, COMPLEX)
    if HAS_EDGE:
        edge = load_pair(edge_re_ptr, edge_im_ptr, b * D, offs, D - width, 0.0, COMPLEX)
        re += edge[0]
        im += edge[1]
    return re, im


@triton.jit
def multiply(a_re, a_im, b_re, b_im, COMPLEX: tl.constexpr):
    """The product of two numbers."""
    if COMPLEX:
        return a_re * b_re - a_im * b_im, a_re * b_im + a_im * b_re
    return a_re * b_re, a_im


@triton.jit
def fixed_decay(
    a_re_ptr, a_im_ptr, offs, D: tl.constexpr, VARYING: tl.constexpr, COMPLEX: tl.constexpr
):
    """a of all times, unless it varies."""
    if VARYING:
        nothing = tl.zeros([offs.shape[0]], tl.float32)
        return nothing, nothing
    return load_pair(a_re_ptr, a_im_ptr, 0, offs, D, 1.0, COMPLEX)


@triton.jit
def passes(runs_ptr, t, L, HAS_RUNS: tl.constexpr, REVERSE: tl.constexpr):
    """Whether the state before time t reaches it."""
    if HAS_RUNS:
        run = tl.load(runs_ptr + row(t, L, REVERSE), mask=t < L, other=0)
        before = tl.load(runs_ptr + row(t - 1, L, REVERSE), mask=(t < L) & (t > 0), other=0)
        return run == before
    return True


@triton.jit
def decay(
    a_re_ptr, a_im_ptr, fixed_re, fixed_im, runs_ptr, t, offs, L,
    D: tl.constexpr, VARYING: tl.constexpr, HAS_RUNS: tl.constexpr, REVERSE: tl.constexpr,
    COMPLEX: tl.constexpr,
):  # fmt: skip
    """a at time t, 0 where a segment starts."""
    if VARYING:
        offset, width = row_at(t, L, D, REVERSE)
        re, im = load_pair(a_re_ptr, a_im_ptr, offset, offs, width, 1.0, COMPLEX)
    else:
        re = tl.where(t < L, fixed_re, 1.0)
        im = tl.where(t < L, fixed_im, 0.0)
    if HAS_RUNS:
        reached = passes(runs_ptr, t, L, HAS_RUNS, REVERSE)
        re = tl.where(reached, re, 0.0)
        im = tl.where(reached, im, 0.0)
    return re, im
