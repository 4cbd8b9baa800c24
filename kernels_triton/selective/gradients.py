"""Gradients of the selective scan, in the names of `states.py`.

    g_t = d_t C_t + q_t                                       (the gradient of h_t)
    e_t = g_t exp(delta_t A) h_{t-1}                          (that of the exponent delta_t A)
    d_x_t = delta_t (g_t . B_t) + D d_t                       (sums over the states of a channel)
    d_delta_t = (A . e_t + x_t (g_t . B_t)) delta''_t         delta'' the derivative of softplus
    d_B_t = sum of g_t delta_t x_t,   d_C_t = sum of h_t d_t  (sums over the channels)
    d_A = sum of delta_t e_t,   d_D = sum of x_t d_t,   d_bias = sum of d_delta_t   (over time)
    d_z_t = d_y_t (C_t . h_t + D x_t) silu'(z_t)

h before each chunk of SPACING steps comes from the forward pass and q behind it from the adjoint
states, so chunks are independent. A chunk's steps are spread over the threads: OUTER lanes take
INNER = 8 consecutive steps each, as tuples of INNER tiles (BLOCK_D, OUTER). Sums over states stay
in registers from state to state. For one state at a time a thread walks through its steps alone,
h forwards and q backwards: first from 0, to learn what the steps turn any h and q into, and, once
those maps have been passed on through the lanes, from what it is really entered with.
exp(delta A) h_{t-1} is a factor of its own, never h_t - u_t, which cancels, nor h_t / decay.
"""

import triton
import triton.language as tl

from kernels_triton.activation import activation
from kernels_triton.scan import row
from kernels_triton.selective.steps import LOG2E, kept, step_sizes


@triton.jit
def stack(tiles, M: tl.constexpr, N: tl.constexpr):
    """Eight tiles (M, N) as one (M, N, 8); nothing moves between threads."""
    even = tl.join(tl.join(tiles[0], tiles[4]), tl.join(tiles[2], tiles[6]))
    odd = tl.join(tl.join(tiles[1], tiles[5]), tl.join(tiles[3], tiles[7]))
    return tl.join(even, odd).reshape(M, N, 8)


@triton.jit
def fold(x, M: tl.constexpr, N: tl.constexpr):
    """Sums of the rows of x that a thread holds: of every M-th one, (M, N)."""
    return tl.sum(x.reshape(x.shape[0] // M, M, N), 0)


@triton.jit
def offsets(first, i, last, column, WIDTH: tl.constexpr, REVERSE: tl.constexpr, EVEN: tl.constexpr):
    """From the row of a chunk's first step to `column` of step `first` + i, at most `last`."""
    if EVEN:  # then i, which is known, becomes part of the instruction
        offs = ((-first if REVERSE else first) * WIDTH + column).to(tl.int64)
        offs += -i * WIDTH if REVERSE else i * WIDTH
    else:
        t = tl.minimum(first + i, last)
        offs = (-t if REVERSE else t) * WIDTH + column
    return offs


@triton.jit
def pass_on(decay, state, start, lanes, LANES: tl.constexpr, BACK: tl.constexpr):
    """What each lane is entered with, (M, LANES), where the first is entered with `start` (M, 1).

    A lane turns a state h into decay h + state. BACK: the last lane comes first.
    """
    SIGN: tl.constexpr = 1 if BACK else -1
    is_first = lanes == (LANES - 1 if BACK else 0)
    state = tl.where(is_first, decay * start + state, state)
    for level in tl.static_range(LANES.bit_length() - 1):
        source = lanes + SIGN * (1 << level)
        exists = (source >= 0) & (source < LANES)
        source = tl.minimum(tl.maximum(source, 0), LANES - 1)
        state = tl.where(exists, decay * tl.gather(state, source, 1) + state, state)
        decay = tl.where(exists, decay * tl.gather(decay, source, 1), decay)
    source = tl.minimum(tl.maximum(lanes + SIGN, 0), LANES - 1)
    return tl.where(is_first, start, tl.gather(state, source, 1))


@triton.jit
def selective_gradients(
    x_ptr, delta_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, bias_ptr, runs_ptr,
    states_ptr, adjoints_ptr, d_y_ptr,
    BATCH, L, L_AGAIN, CHUNKS, GROUPS,
    d_x_ptr, d_delta_ptr, d_A_ptr, d_rows_ptr, d_D_ptr, d_z_ptr, d_bias_ptr,
    D: tl.constexpr, R: tl.constexpr, REVERSE: tl.constexpr,
    HAS_D: tl.constexpr, HAS_Z: tl.constexpr, HAS_BIAS: tl.constexpr, SOFTPLUS: tl.constexpr,
    HAS_RUNS: tl.constexpr,
    BLOCK_D: tl.constexpr, SIDE: tl.constexpr, INNER: tl.constexpr, OUTER: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """One program makes the gradients of a chunk for every GROUPS-th block of BLOCK_D channels.

    d_rows (B, GROUPS, 2, R, L) float32 are the sums of d_B and d_C over a group's channels, added
    up block by block; d_A (B, CHUNKS, D, R), d_D and d_bias (B, CHUNKS, D) are sums over a chunk.
    EVEN: L is a multiple of the chunk, INNER OUTER. Grid: (B * CHUNKS * GROUPS,).
    """
    blocks: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    pid = tl.program_id(0)
    b = (pid // GROUPS // CHUNKS).to(tl.int64)
    chunk = pid // GROUPS % CHUNKS
    group = pid % GROUPS
    # Steps count from the first of the chunk, the `last` of the sequence, too.
    begin = chunk * (INNER * OUTER)
    last = L - 1 - begin
    at = b * L + row(begin, L, REVERSE)
    x_ptr += at * D
    delta_ptr += at * D
    z_ptr += at * D
    d_y_ptr += at * D
    d_x_ptr += at * D
    d_delta_ptr += at * D
    d_z_ptr += at * D
    B_ptr += at * R
    C_ptr += at * R
    A_ptr += b // BATCH * (D * R)
    states_ptr += (b * CHUNKS + chunk) * (D * R)
    adjoints_ptr += (b * CHUNKS + chunk) * (D * R)
    d_A_ptr += (b * CHUNKS + chunk) * (D * R)
    d_D_ptr += (b * CHUNKS + chunk) * D
    d_bias_ptr += (b * CHUNKS + chunk) * D

    lanes = tl.arange(0, OUTER)[None, :] + tl.zeros([BLOCK_D, OUTER], tl.int32)
    first = tl.arange(0, OUTER)[None, :] * INNER  # step of each lane
    zeros = tl.zeros([BLOCK_D, OUTER], tl.float32)
    # d_rows: (OUTER, INNER, 2), the last axis for B and C.
    t_rows = tl.arange(0, OUTER)[:, None, None] * INNER + tl.arange(0, INNER)[None, :, None]
    inside_rows = t_rows <= last
    d_rows_ptr += (b * GROUPS + group) * 2 * R * L + row(begin, L, REVERSE)
    offs_rows = tl.arange(0, 2)[None, None, :].to(tl.int64) * R * L
    offs_rows += -t_rows if REVERSE else t_rows

    for block in range(group, blocks, GROUPS):
        mask_d = block * BLOCK_D + tl.arange(0, BLOCK_D)[:, None] < D
        d = tl.minimum(block * BLOCK_D + tl.arange(0, BLOCK_D)[:, None], D - 1)
        bias = tl.load(bias_ptr + b // BATCH * D + d) if HAS_BIAS else 0.0
        delta, w, d_sum, keep, through_input, through_decay, y = (), (), (), (), (), (), ()
        total, keep_all = zeros, lanes >= 0
        for i in tl.static_range(INNER):
            mask = (first + i <= last) & mask_d
            offs = offsets(first, i, last, d, D, REVERSE, EVEN)
            delta_i, _ = step_sizes(tl.load(delta_ptr + offs), bias, SOFTPLUS)
            delta_i = tl.where(mask, delta_i, 0.0)
            d_i = tl.where(mask, tl.load(d_y_ptr + offs).to(tl.float32), 0.0)
            if HAS_Z:
                d_i *= activation(tl.load(z_ptr + offs).to(tl.float32), "silu")[0]
            if HAS_RUNS:
                keep_i = kept(runs_ptr + b * L, begin + first + i, L, REVERSE)
                keep_all = keep_all & keep_i
                keep = keep + (keep_i,)
            total += delta_i
            delta = delta + (delta_i,)
            w = w + (delta_i * tl.load(x_ptr + offs).to(tl.float32),)
            d_sum = d_sum + (d_i,)
            through_input = through_input + (zeros,)
            through_decay = through_decay + (zeros,)
            y = y + (zeros,)

        stored = inside_rows & (block + tl.zeros_like(t_rows) >= GROUPS)
        for r in range(0, R):
            A = tl.load(A_ptr + r + d * R)
            B, C, decay = (), (), ()
            h, q = zeros, zeros
            for i in tl.static_range(INNER):
                offs_r = offsets(first, i, last, r, R, REVERSE, EVEN)
                B = B + (tl.load(B_ptr + offs_r).to(tl.float32),)
                C = C + (tl.load(C_ptr + offs_r).to(tl.float32),)
                decay_i = tl.exp2(delta[i] * (A * LOG2E))
                if HAS_RUNS:
                    decay_i = tl.where(keep[i], decay_i, 0.0)
                decay = decay + (decay_i,)
                h = decay_i * h + w[i] * B[i]
            for i in tl.static_range(INNER - 1, -1, -1):
                q = decay[i] * (q + d_sum[i] * C[i])
            decay_all = tl.exp2(total * (A * LOG2E))
            if HAS_RUNS:
                decay_all = tl.where(keep_all, decay_all, 0.0)
            h = pass_on(decay_all, h, tl.load(states_ptr + r + d * R), lanes, OUTER, False)
            q = pass_on(decay_all, q, tl.load(adjoints_ptr + r + d * R), lanes, OUTER, True)

            passed, d_C, y_sums = (), (), ()
            for i in tl.static_range(INNER):
                passed = passed + (decay[i] * h,)
                h = passed[i] + w[i] * B[i]
                d_C = d_C + (fold(d_sum[i] * h, SIDE, OUTER),)
                if HAS_Z:
                    y_sums = y_sums + (y[i] + C[i] * h,)
            d_B, input_sums, decay_sums = (), (), ()
            d_A = zeros
            for i in tl.static_range(INNER - 1, -1, -1):
                g = q + d_sum[i] * C[i]
                q = decay[i] * g
                e = g * passed[i]
                d_A += delta[i] * e
                d_B = (fold(w[i] * g, SIDE, OUTER),) + d_B
                input_sums = (through_input[i] + g * B[i],) + input_sums
                decay_sums = (through_decay[i] + e * A,) + decay_sums
            through_input, through_decay = input_sums, decay_sums
            if HAS_Z:
                y = y_sums
            d_A = tl.sum(d_A, 1)[:, None] + zeros
            tl.store(d_A_ptr + r + d * R + lanes * 0, d_A, mask=mask_d & (lanes == 0))
            pointers = d_rows_ptr + offs_rows + tl.cast(r, tl.int64) * L
            known = tl.load(pointers, mask=stored, other=0.0)
            both = tl.join(stack(d_B, SIDE, OUTER), stack(d_C, SIDE, OUTER))
            tl.store(pointers, known + tl.sum(both, 0), mask=inside_rows)
        tl.debug_barrier()  # the next block adds to what this one has stored

        # A second L: or else the addresses of above are kept, in registers that there are not.
        last_again = L_AGAIN - 1 - begin
        skip = tl.load(D_ptr + b // BATCH * D + d) if HAS_D else 0.0
        d_D, d_bias = zeros, zeros
        for i in tl.static_range(INNER):
            mask = (first + i <= last_again) & mask_d
            offs = offsets(first, i, last_again, d, D, REVERSE, EVEN)
            x = tl.load(x_ptr + offs).to(tl.float32)
            _, slope = step_sizes(tl.load(delta_ptr + offs), bias, SOFTPLUS)
            d_x = delta[i] * through_input[i] + skip * d_sum[i]
            d_delta = (through_decay[i] + x * through_input[i]) * slope
            tl.store(d_x_ptr + offs, d_x.to(d_x_ptr.dtype.element_ty), mask=mask)
            tl.store(d_delta_ptr + offs, d_delta.to(d_delta_ptr.dtype.element_ty), mask=mask)
            if HAS_Z:
                _, gate_slope = activation(tl.load(z_ptr + offs).to(tl.float32), "silu")
                d_z = tl.load(d_y_ptr + offs).to(tl.float32) * (y[i] + skip * x) * gate_slope
                tl.store(d_z_ptr + offs, d_z.to(d_z_ptr.dtype.element_ty), mask=mask)
            d_D += x * d_sum[i]
            d_bias += tl.where(mask, d_delta, 0.0)
        if HAS_D:
            tl.store(d_D_ptr + d, tl.sum(d_D, 1)[:, None], mask=mask_d)
        if HAS_BIAS:
            tl.store(d_bias_ptr + d, tl.sum(d_bias, 1)[:, None], mask=mask_d)
