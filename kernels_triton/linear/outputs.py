"""Outputs of the linear recurrence, part by part from the states before the parts.

Memory-bound: reads x, and a if it varies, writes y.
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
    state_of_part,
    store_pair,
)


@triton.jit
def linear_outputs(
    a_re_ptr, a_im_ptr, x_re_ptr, x_im_ptr, runs_ptr,
    states_re_ptr, states_im_ptr, initial_re_ptr, initial_im_ptr,
    L, PARTS, LENGTH,
    y_re_ptr, y_im_ptr, final_re_ptr, final_im_ptr,
    D: tl.constexpr, VARYING: tl.constexpr, HAS_RUNS: tl.constexpr, HAS_INITIAL: tl.constexpr,
    REVERSE: tl.constexpr, COMPLEX: tl.constexpr, BLOCK_D: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """One program makes y of a part for BLOCK_D channels; that of the last part final (B, D).

    states (B, PARTS, D) are those that each part passes on, initial (B, D) that before the first.
    Grid: (B * PARTS * cdiv(D, BLOCK_D),).
    """
    b, part, offs = program(D, BLOCK_D, PARTS)
    x_re_ptr += b * L * D
    x_im_ptr += b * L * D
    y_re_ptr += b * L * D
    y_im_ptr += b * L * D
    runs_ptr += b * L
    if VARYING:
        a_re_ptr += b * L * D
        a_im_ptr += b * L * D
    fixed_re, fixed_im = fixed_decay(a_re_ptr, a_im_ptr, offs, D, VARYING, COMPLEX)
    h_re, h_im = state_of_part(
        states_re_ptr, states_im_ptr, initial_re_ptr, initial_im_ptr, b, part - 1, part == 0,
        offs, PARTS, D, HAS_INITIAL, COMPLEX,
    )  # fmt: skip
    for block in range(0, LENGTH, STEPS):
        start = part * LENGTH + block
        xs = ()
        for i in tl.static_range(STEPS):
            t = start + i
            offset, width = row_at(t, L, D, REVERSE)
            x = load_pair(x_re_ptr, x_im_ptr, offset, offs, width, 0.0, COMPLEX)
            a = decay(
                a_re_ptr, a_im_ptr, fixed_re, fixed_im, runs_ptr, t, offs, L,
                D, VARYING, HAS_RUNS, REVERSE, COMPLEX,
            )  # fmt: skip
            xs = xs + ((a[0], a[1], x[0], x[1]),)
        for i in tl.static_range(STEPS):
            a_re, a_im, x_re, x_im = xs[i]
            h_re, h_im = multiply(a_re, a_im, h_re, h_im, COMPLEX)
            h_re += x_re
            h_im += x_im
            t = start + i
            offset, width = row_at(t, L, D, REVERSE)
            store_pair(y_re_ptr, y_im_ptr, offset, offs, h_re, h_im, width, COMPLEX)
    if part == PARTS - 1:
        store_pair(final_re_ptr, final_im_ptr, b * D, offs, h_re, h_im, D, COMPLEX)
