"""The recurrence of the selective scan in both directions: states, output, adjoint states.

    h_t = exp(delta_t A) h_{t-1} + delta_t x_t B_t            y_t = (C_t . h_t + D x_t) silu(z_t)
    q_{t-1} = exp(delta_t A) (q_t + d_t C_t)                  d_t = d_y_t silu(z_t)

where q_t is what later steps add to the gradient of h_t. x, delta, z, y (B, L, D), B and C
(B, L, R), A (D, R) float32, states (..., D, R) float32. All arithmetic is float32.

What a state costs is its exponential (16 a clock and multiprocessor), so little else may be done
for one. A program therefore walks through time with its states in registers; BLOCK_D times STEPS is
its number of threads, STEPS threads share the states of a channel. For STEPS steps at a time each
thread makes the step size and the input of one step of one channel, from which it is handed on to
the other threads of the channel by a shuffle, step by step. Rows of B and C are loaded AHEAD = 4
steps before they are needed, straight into the threads that need them.

Source: Gu, Dao, https://arxiv.org/abs/2312.00752.
"""

import triton
import triton.language as tl

from kernels_triton.activation import activation
from kernels_triton.scan import row
from kernels_triton.selective.steps import LOG2E, kept, step_sizes

AHEAD = tl.constexpr(4)  # STEPS is at least as much


@triton.jit
def load_row(
    x_ptr, first, j, L, offs_r,
    R: tl.constexpr, REVERSE: tl.constexpr, EVEN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Row `first` + j of x (L, R); the last one in place of those behind it."""
    if EVEN:  # then j, which is known, becomes part of the instruction
        pointers = x_ptr + tl.cast(row(first, L, REVERSE), tl.int64) * R + offs_r
        pointers += -j * R if REVERSE else j * R
    else:
        t = tl.minimum(first + j, L - 1)
        pointers = x_ptr + tl.cast(row(t, L, REVERSE), tl.int64) * R + offs_r
    if MASKED:
        return tl.load(pointers, mask=offs_r < R, other=0.0)
    return tl.load(pointers)


@triton.jit
def load_rows(
    B_ptr, C_ptr, first, j, L, offs_r,
    OUTPUT: tl.constexpr, R: tl.constexpr, REVERSE: tl.constexpr, EVEN: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Rows `first` + j of B and, if there is an OUTPUT, of C."""
    B = load_row(B_ptr, first, j, L, offs_r, R, REVERSE, EVEN, MASKED)
    if OUTPUT:
        return B, load_row(C_ptr, first, j, L, offs_r, R, REVERSE, EVEN, MASKED)
    return B, B


@triton.jit
def load_steps(
    x_ptr, delta_ptr, z_ptr, first, L, d,
    D: tl.constexpr, REVERSE: tl.constexpr, HAS_Z: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """x, delta and z of STEPS steps, (BLOCK_D, STEPS); behind the last step, the last one."""
    t = tl.minimum(first + tl.arange(0, STEPS)[None, :], L - 1)
    offs = row(t, L, REVERSE).to(tl.int64) * D + d
    x = tl.load(x_ptr + offs)
    return x, tl.load(delta_ptr + offs), tl.load(z_ptr + offs) if HAS_Z else x


@triton.jit
def selective_states(
    x_ptr, delta_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, bias_ptr, runs_ptr, start_ptr,
    BATCH, L, PARTS, PART_TILES,
    y_ptr, states_ptr, end_ptr, total_ptr,
    D: tl.constexpr, R: tl.constexpr, ADJOINT: tl.constexpr, REVERSE: tl.constexpr,
    HAS_D: tl.constexpr, HAS_Z: tl.constexpr, HAS_BIAS: tl.constexpr, SOFTPLUS: tl.constexpr,
    HAS_RUNS: tl.constexpr, HAS_START: tl.constexpr,
    OUTPUT: tl.constexpr, KEEP: tl.constexpr, ENDS: tl.constexpr,
    SPACING: tl.constexpr, BLOCK_D: tl.constexpr, HIGH: tl.constexpr, LOW: tl.constexpr,
    STEPS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """One program walks BLOCK_D channels through one of PARTS parts of PART_TILES * STEPS steps.

    ADJOINT: q, from the last step to the first, with d_y in place of x and C in place of B; else h,
    from the first to the last. start (B, PARTS, D, R) holds the state where each part is entered.
    OUTPUT: y. KEEP: states (B, cdiv(L, SPACING), D, R), for every SPACING steps that before them.
    ENDS: end (B, PARTS, D, R) and total (B, PARTS, D), the sum of delta; else end (B, D, R), of the
    last part that is walked through. A, D and bias serve BATCH sequences; R = HIGH LOW, padded.
    Grid: (B * PARTS * cdiv(D, BLOCK_D),).
    """
    blocks: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    pid = tl.program_id(0)
    b = (pid // blocks // PARTS).to(tl.int64)
    part = pid // blocks % PARTS
    start_d = pid % blocks * BLOCK_D
    MASKED: tl.constexpr = R != HIGH * LOW

    # In registers: (HIGH, BLOCK_D, LOW), of which a thread has HIGH times 4 neighbours.
    r = tl.arange(0, HIGH)[:, None, None] * LOW + tl.arange(0, LOW)[None, None, :]
    offs_r = r + tl.zeros([HIGH, BLOCK_D, LOW], tl.int32)
    offs_d = start_d + tl.arange(0, BLOCK_D)[None, :, None]
    mask_h = (offs_d < D) & (r < R)
    offs_h = offs_d * R + r
    A = tl.load(A_ptr + b // BATCH * (D * R) + offs_h, mask=mask_h, other=0.0) * LOG2E
    if HAS_START:
        h = tl.load(start_ptr + (b * PARTS + part) * (D * R) + offs_h, mask=mask_h, other=0.0)
    else:
        h = tl.zeros([HIGH, BLOCK_D, LOW], tl.float32)

    mask_d = start_d + tl.arange(0, BLOCK_D)[:, None] < D
    # Channels behind the last repeat it. (That they are neighbours is hidden from Triton by this,
    # too: it would load them in another order and pass them on through shared memory.)
    d = tl.minimum(start_d + tl.arange(0, BLOCK_D)[:, None], D - 1)
    steps = tl.arange(0, STEPS)[None, :]
    bias = tl.load(bias_ptr + b // BATCH * D + d) if HAS_BIAS else 0.0
    x_ptr += b * L * D
    delta_ptr += b * L * D
    z_ptr += b * L * D
    B_ptr += b * L * R
    C_ptr += b * L * R
    runs_ptr += b * L
    total = tl.zeros([BLOCK_D, STEPS], tl.float32)

    tiles = (L + STEPS - 1) // STEPS
    begin = part * PART_TILES
    count = tl.minimum(PART_TILES, tiles - begin)
    first = (begin + count - 1 if ADJOINT else begin) * STEPS
    x_next, delta_next, z_next = load_steps(
        x_ptr, delta_ptr, z_ptr, first, L, d, D, REVERSE, HAS_Z, STEPS
    )
    SIGN: tl.constexpr = -1 if ADJOINT else 1
    rows = ()
    for k in tl.static_range(AHEAD):
        j = STEPS - 1 - k if ADJOINT else k
        row_j = load_rows(B_ptr, C_ptr, first, j, L, offs_r, OUTPUT, R, REVERSE, EVEN, MASKED)
        rows = rows + (row_j,)
    for i in range(0, count):
        tile = begin + (count - 1 - i if ADJOINT else i)
        first = tile * STEPS
        after = tl.maximum(tl.minimum(tile + SIGN, tiles - 1), 0) * STEPS
        if KEEP:
            per_chunk: tl.constexpr = SPACING // STEPS
            chunk = tile // per_chunk
            if (i == 0) | (tile % per_chunk == (per_chunk - 1 if ADJOINT else 0)):
                chunks = (L + SPACING - 1) // SPACING
                tl.store(states_ptr + (b * chunks + chunk) * (D * R) + offs_h, h, mask=mask_h)
        x, z = x_next.to(tl.float32), z_next.to(tl.float32)
        delta, _ = step_sizes(delta_next, bias, SOFTPLUS)
        x_next, delta_next, z_next = load_steps(
            x_ptr, delta_ptr, z_ptr, after, L, d, D, REVERSE, HAS_Z, STEPS
        )
        gate = activation(z, "silu")[0] if HAS_Z else 1.0
        inside = first + steps < L
        if not EVEN:  # steps behind the last one change nothing
            delta = tl.where(inside, delta, 0.0)
            x = tl.where(inside, x, 0.0)
        w = x * gate if ADJOINT else delta * x
        total += delta
        y = tl.zeros([BLOCK_D, STEPS], tl.float32)
        if HAS_RUNS:
            keep = (kept(runs_ptr, first + steps, L, REVERSE) & (d >= 0)).to(tl.int32)
        for k in tl.static_range(STEPS):
            j = STEPS - 1 - k if ADJOINT else k
            index = tl.full([BLOCK_D, 1], j, tl.int32)
            decay = tl.exp2(tl.gather(delta, index, 1)[None, :, :] * A)
            if HAS_RUNS:
                decay = tl.where(tl.gather(keep, index, 1)[None, :, :] != 0, decay, 0.0)
            B, C = rows[0]
            u = tl.gather(w, index, 1)[None, :, :] * B.to(tl.float32)
            ahead_j = (j + SIGN * AHEAD + STEPS) % STEPS
            row_j = load_rows(
                B_ptr, C_ptr, first if k + AHEAD < STEPS else after, ahead_j, L, offs_r,
                OUTPUT, R, REVERSE, EVEN, MASKED,
            )  # fmt: skip
            rows = rows[1:] + (row_j,)
            h = decay * (h + u) if ADJOINT else decay * h + u
            if OUTPUT:
                terms = (h * C.to(tl.float32)).permute(1, 0, 2).reshape(BLOCK_D, HIGH * LOW)
                y = tl.where(steps == j, tl.sum(terms, 1)[:, None], y)
        if OUTPUT:
            if HAS_D:
                y += tl.load(D_ptr + b // BATCH * D + d) * x
            y *= gate
            offs = b * L * D + row(first + steps, L, REVERSE).to(tl.int64) * D + d
            tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask=inside & mask_d)

    if ENDS:
        tl.store(end_ptr + (b * PARTS + part) * (D * R) + offs_h, h, mask=mask_h)
        total_ptr += (b * PARTS + part) * D + d
        tl.store(total_ptr, tl.sum(total, 1)[:, None], mask=mask_d)
    elif part == (0 if ADJOINT else PARTS - 1):
        tl.store(end_ptr + b * (D * R) + offs_h, h, mask=mask_h)


@triton.jit
def selective_starts(
    end_ptr, A_ptr, total_ptr, runs_ptr, start_ptr,
    BATCH, L, PARTS, PART_STEPS,
    starts_ptr,
    D: tl.constexpr, R: tl.constexpr, ADJOINT: tl.constexpr, REVERSE: tl.constexpr,
    HAS_RUNS: tl.constexpr, HAS_START: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program passes BLOCK states of one sequence through the parts, each at a stroke.

    A part turns a state h into exp(total A) h + end. starts (B, PARTS, D, R) is what each part
    begins with; start (B, D, R) where the first one begins.
    Grid: (B * cdiv(D * R, BLOCK),).
    """
    blocks: tl.constexpr = (D * R + BLOCK - 1) // BLOCK
    b = (tl.program_id(0) // blocks).to(tl.int64)
    offs = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = offs < D * R
    A = tl.load(A_ptr + b // BATCH * (D * R) + offs, mask=mask, other=0.0) * LOG2E
    h = tl.zeros([BLOCK], tl.float32)
    if HAS_START:
        h = tl.load(start_ptr + b * (D * R) + offs, mask=mask, other=0.0)
    for i in range(0, PARTS):
        part = PARTS - 1 - i if ADJOINT else i
        at = (b * PARTS + part) * (D * R) + offs
        tl.store(starts_ptr + at, h, mask=mask)
        total = tl.load(total_ptr + (b * PARTS + part) * D + offs // R, mask=mask, other=0.0)
        decay = tl.exp2(total * A)
        if HAS_RUNS:
            # From before the part's first step to its last one, all must be of one segment.
            before = tl.maximum(part * PART_STEPS - 1, 0)
            last = tl.minimum((part + 1) * PART_STEPS, L) - 1
            runs = runs_ptr + b * L
            same = tl.load(runs + row(before, L, REVERSE)) == tl.load(runs + row(last, L, REVERSE))
            decay = tl.where(same, decay, 0.0)
        h = decay * h + tl.load(end_ptr + at, mask=mask, other=0.0)
