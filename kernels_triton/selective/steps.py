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
    """Whether the state passes from t - 1 to t: both are of one segment.

    True for t = 0, which the initial state enters, and behind the last step.
    """
    now = tl.minimum(t, L - 1)
    before = tl.maximum(now - 1, 0)
    same = tl.load(runs_ptr + row(now, L, REVERSE)) == tl.load(runs_ptr + row(before, L, REVERSE))
    return same | (t >= L)
