"""Gradients of the linear recurrence, from the adjoint states behind the parts.

    g_t = d_y_t + q_{t+1},   q_t = a_t g_t,   d_x_t = g_t,   d_a_t = g_t h_{t-1},   d_initial = q_0

JAX's cotangents of complex numbers: nothing is conjugated. Where a segment starts q and d_a are 0.
Memory-bound: reads d_y and h, and a if it varies, writes d_x, and d_a if a varies.
"""

import triton
import triton.language as tl

from kernels_triton.linear.steps import (
    decay,
    fixed_decay,
    load_pair,
    multiply,
    passes,
    program,
    row_at,
    state_of_part,
    store_pair,
)


@triton.jit
def linear_gradients(
    a_re_ptr, a_im_ptr, h_re_ptr, h_im_ptr, runs_ptr, initial_re_ptr, initial_im_ptr,
    d_y_re_ptr, d_y_im_ptr, states_re_ptr, states_im_ptr, final_re_ptr, final_im_ptr,
    L, PARTS, LENGTH,
    d_x_re_ptr, d_x_im_ptr, d_a_re_ptr, d_a_im_ptr, d_initial_re_ptr, d_initial_im_ptr,
    D: tl.constexpr, VARYING: tl.constexpr, HAS_RUNS: tl.constexpr, HAS_INITIAL: tl.constexpr,
    REVERSE: tl.constexpr, COMPLEX: tl.constexpr, BLOCK_D: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """One program makes the gradients of a part for BLOCK_D channels, from its end to its start.

    d_a (B, L, D) if VARYING, else the part's sum (B, PARTS, D); the first part makes d_initial
    (B, D). states (B, PARTS, D) are the q that each part passes on, final (B, D) that behind all.
    Grid: (B * PARTS * cdiv(D, BLOCK_D),).
    """
    b, part, offs = program(D, BLOCK_D, PARTS)
    h_re_ptr += b * L * D
    h_im_ptr += b * L * D
    d_y_re_ptr += b * L * D
    d_y_im_ptr += b * L * D
    d_x_re_ptr += b * L * D
    d_x_im_ptr += b * L * D
    runs_ptr += b * L
    if VARYING:
        a_re_ptr += b * L * D
        a_im_ptr += b * L * D
        d_a_re_ptr += b * L * D
        d_a_im_ptr += b * L * D
    fixed_re, fixed_im = fixed_decay(a_re_ptr, a_im_ptr, offs, D, VARYING, COMPLEX)
    q_re, q_im = state_of_part(
        states_re_ptr, states_im_ptr, final_re_ptr, final_im_ptr, b, part + 1, part == PARTS - 1,
        offs, PARTS, D, True, COMPLEX,
    )  # fmt: skip
    sum_re = tl.zeros([BLOCK_D], tl.float32)
    sum_im = sum_re
    for block in range(0, LENGTH, STEPS):
        end = part * LENGTH + LENGTH - 1 - block
        loaded = ()
        for i in tl.static_range(STEPS):
            t = end - i
            offset, width = row_at(t, L, D, REVERSE)
            d_y = load_pair(d_y_re_ptr, d_y_im_ptr, offset, offs, width, 0.0, COMPLEX)
            a = decay(
                a_re_ptr, a_im_ptr, fixed_re, fixed_im, runs_ptr, t, offs, L,
                D, VARYING, HAS_RUNS, REVERSE, COMPLEX,
            )  # fmt: skip
            before, _ = row_at(t - 1, L, D, REVERSE)
            width = tl.where(t > 0, width, 0)
            h_re, h_im = load_pair(h_re_ptr, h_im_ptr, before, offs, width, 0.0, COMPLEX)
            if HAS_INITIAL:
                width = tl.where(t == 0, D, 0)
                first_re, first_im = load_pair(
                    initial_re_ptr, initial_im_ptr, b * D, offs, width, 0.0, COMPLEX
                )
                h_re += first_re
                h_im += first_im
            loaded = loaded + ((a[0], a[1], d_y[0], d_y[1], h_re, h_im),)
        for i in tl.static_range(STEPS):
            a_re, a_im, g_re, g_im, h_re, h_im = loaded[i]
            t = end - i
            g_re += q_re
            g_im += q_im
            offset, width = row_at(t, L, D, REVERSE)
            store_pair(d_x_re_ptr, d_x_im_ptr, offset, offs, g_re, g_im, width, COMPLEX)
            d_a_re, d_a_im = multiply(g_re, g_im, h_re, h_im, COMPLEX)
            if HAS_RUNS:
                reached = passes(runs_ptr, t, L, HAS_RUNS, REVERSE)
                d_a_re = tl.where(reached, d_a_re, 0.0)
                d_a_im = tl.where(reached, d_a_im, 0.0)
            if VARYING:
                store_pair(d_a_re_ptr, d_a_im_ptr, offset, offs, d_a_re, d_a_im, width, COMPLEX)
            else:
                sum_re += d_a_re
                sum_im += d_a_im
            q_re, q_im = multiply(a_re, a_im, g_re, g_im, COMPLEX)
    if not VARYING:
        offset = (b * PARTS + part) * D
        store_pair(d_a_re_ptr, d_a_im_ptr, offset, offs, sum_re, sum_im, D, COMPLEX)
    if part == 0:
        store_pair(d_initial_re_ptr, d_initial_im_ptr, b * D, offs, q_re, q_im, D, COMPLEX)
