"""What each part of time does to the state, forward and backward in time.

A part maps the state before it to `decay` times that state plus `end`: a step of a recurrence over
the parts. The adjoint state is q_t = a_t (d_h_t + q_{t+1}), what time t passes on to that before.
"""

import triton
import triton.language as tl

from kernels_triton.linear.steps import (
    decay,
    fixed_decay,
    load_pair,
    multiply,
    program,
    row_at,
    store_pair,
)


@triton.jit
def linear_summaries(
    a_re_ptr, a_im_ptr, x_re_ptr, x_im_ptr, runs_ptr,
    L, PARTS, LENGTH,
    decay_re_ptr, decay_im_ptr, end_re_ptr, end_im_ptr,
    D: tl.constexpr, VARYING: tl.constexpr, HAS_RUNS: tl.constexpr, REVERSE: tl.constexpr,
    COMPLEX: tl.constexpr, ADJOINT: tl.constexpr, BLOCK_D: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """One program makes decay and end of a part for BLOCK_D channels; outputs (B, PARTS, D).

    ADJOINT: of q instead of h, from the part's last time to its first, with d_h for x.
    Grid: (B * PARTS * cdiv(D, BLOCK_D),).
    """
    b, part, offs = program(D, BLOCK_D, PARTS)
    x_re_ptr += b * L * D
    x_im_ptr += b * L * D
    runs_ptr += b * L
    if VARYING:
        a_re_ptr += b * L * D
        a_im_ptr += b * L * D
    fixed_re, fixed_im = fixed_decay(a_re_ptr, a_im_ptr, offs, D, VARYING, COMPLEX)
    h_re = tl.zeros([BLOCK_D], tl.float32)
    h_im = h_re
    p_re = h_re + 1.0
    p_im = h_re
    for block in range(0, LENGTH, STEPS):
        start = part * LENGTH + (LENGTH - STEPS - block if ADJOINT else block)
        xs = ()
        for i in tl.static_range(STEPS):
            t = start + (STEPS - 1 - i if ADJOINT else i)
            offset, width = row_at(t, L, D, REVERSE)
            x = load_pair(x_re_ptr, x_im_ptr, offset, offs, width, 0.0, COMPLEX)
            a = decay(
                a_re_ptr, a_im_ptr, fixed_re, fixed_im, runs_ptr, t, offs, L,
                D, VARYING, HAS_RUNS, REVERSE, COMPLEX,
            )  # fmt: skip
            xs = xs + ((a[0], a[1], x[0], x[1]),)
        for i in tl.static_range(STEPS):
            a_re, a_im, x_re, x_im = xs[i]
            if ADJOINT:
                h_re, h_im = multiply(a_re, a_im, h_re + x_re, h_im + x_im, COMPLEX)
            else:
                h_re, h_im = multiply(a_re, a_im, h_re, h_im, COMPLEX)
                h_re += x_re
                h_im += x_im
            p_re, p_im = multiply(a_re, a_im, p_re, p_im, COMPLEX)
    offset = (b * PARTS + part) * D
    store_pair(decay_re_ptr, decay_im_ptr, offset, offs, p_re, p_im, D, COMPLEX)
    store_pair(end_re_ptr, end_im_ptr, offset, offs, h_re, h_im, D, COMPLEX)
