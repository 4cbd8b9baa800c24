"""What the scans over time share.

Kernels count time in the order of the scan: t = 0 is where the initial state enters, and of a scan
that runs in reverse that is the last row. Rows are found by `row`. `runs` numbers, for each t, the
segment that t belongs to, from 0 and ascending by t: a state passes from one position to a later
one if and only if both have the same number, and the initial state reaches those with number 0.
"""

import triton
import triton.language as tl


@triton.jit
def row(t, L, REVERSE: tl.constexpr):
    """The row of time t of a sequence of L."""
    return L - 1 - t if REVERSE else t


@triton.jit
def softplus(x):
    """log(1 + exp(x)) and its derivative, the logistic function; float32.

    No exponent is positive. log(1 + e) is taken as log(u) e / (u - 1) with u the rounded 1 + e,
    whose error divides out, so that small values keep all their digits.
    """
    e = tl.exp(-tl.abs(x))
    u = 1 + e
    tail = tl.where(u == 1, e, tl.log(u) * (e / tl.where(u == 1, 1.0, u - 1)))
    return tl.maximum(x, 0.0) + tail, tl.where(x < 0, e, 1.0) / u
