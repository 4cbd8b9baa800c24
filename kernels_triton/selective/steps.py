"""Step sizes and gates of the selective scan, as all of its kernels make them."""

import triton
import triton.language as tl

from kernels_triton.scan import row, softplus

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def step_sizes(delta, bias, SOFTPLUS: tl.constexpr):
    """delta + bias, through softplus if asked for, and its derivative by delta; float32."""
    delta = delta.to(tl.float32) + bias
    if SOFTPLUS:
        return softplus(delta)
    return delta, tl.full(delta.shape, 1.0, tl.float32)


@triton.jit
def kept(runs_ptr, t, L, REVERSE: tl.constexpr):
    """Whether the state passes from t - 1 to t: both are of one segment, or t is the first."""
    before = tl.maximum(t - 1, 0)
    return tl.load(runs_ptr + row(t, L, REVERSE)) == tl.load(runs_ptr + row(before, L, REVERSE))
