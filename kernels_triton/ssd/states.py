"""States of the scan at chunk boundaries: what each chunk adds, and the pass over the chunks.

    added[c] = sum over the tokens t of chunk c of   exp(a_last - a_t) dt_t x_t (outer) B_t
    states[c + 1] = exp(a_last) states[c] + added[c]

(P, R) for each batch and head, with a the sums of `decays.py`; states[c] is that before chunk c.
Backward the same for gradients, from the last chunk to the first:

    d_added[c] = sum over t of   exp(a_t) d_y_t (outer) C_t
    d_states[c - 1] = exp(a_last) d_states[c] + d_added[c],   d_states[c] that of states[c + 1]

All are float32 (B, CHUNKS, H, P, R). Where segments differ an exponential is 0.
"""

import triton
import triton.language as tl

from kernels_triton.grouped.tiles import left_tile, load_operand
from kernels_triton.ssd.decays import extent, from_start, rows, to_end, total


@triton.jit
def ssd_chunk_states(
    x_ptr, B_ptr, steps_ptr, runs_ptr,
    L, CHUNKS,
    added_ptr,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, R: tl.constexpr, CHUNK: tl.constexpr,
    HAS_RUNS: tl.constexpr, REVERSE: tl.constexpr, TO_END: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """One program makes a tile (BLOCK_P, BLOCK_R) of `added` of one chunk and head.

    TO_END for what x and B add; without it, with d_y and C in their places, for the gradient.
    Grid: (B * CHUNKS * H * cdiv(P, BLOCK_P) * cdiv(R, BLOCK_R),).
    """
    tiles_p: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    tiles_r: tl.constexpr = (R + BLOCK_R - 1) // BLOCK_R
    pid = tl.program_id(0)
    start_r = pid % tiles_r * BLOCK_R
    start_p = pid // tiles_r % tiles_p * BLOCK_P
    head = pid // (tiles_r * tiles_p)
    h, chunk = head % H, head // H % CHUNKS
    b = (head // H // CHUNKS).to(tl.int64)
    origin, length = extent(chunk, L, CHUNK, REVERSE)
    time = CHUNKS * CHUNK
    steps_ptr += (b * H + h) * 3 * time + chunk * CHUNK
    runs_ptr += b * L + origin
    x_ptr += ((b * L + origin) * H + h) * P
    B_ptr += ((b * L + origin) * G + h // (H // G)) * R
    offs_p = start_p + tl.arange(0, BLOCK_P)[:, None]

    added = tl.zeros([BLOCK_P, BLOCK_R], tl.float32)
    for start in range(0, length, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        if TO_END:
            weight = to_end(steps_ptr, runs_ptr, t, length, time, CHUNK, HAS_RUNS, REVERSE)
            weight *= tl.load(steps_ptr + t)
        else:
            weight = from_start(steps_ptr, runs_ptr, t, chunk, length, time, HAS_RUNS, REVERSE)
            weight = tl.where(t < length, weight, 0.0)
        x_pointers = x_ptr + rows(t, length, H * P, REVERSE)[None, :] + offs_p
        x = load_operand(x_pointers) if P % BLOCK_P == 0 else load_operand(x_pointers, offs_p < P)
        x = (x.to(tl.float32) * weight[None, :]).to(x_ptr.dtype.element_ty)
        B = left_tile(B_ptr + rows(t, length, G * R, REVERSE)[:, None], start_r, R, BLOCK_R)
        added = tl.dot(x, B, added, input_precision=PRECISION)

    offs_r = start_r + tl.arange(0, BLOCK_R)[None, :]
    added_ptr += ((b * CHUNKS + chunk) * H + h) * (P * R)
    tl.store(added_ptr + offs_p * R + offs_r, added, mask=(offs_p < P) & (offs_r < R))


@triton.jit
def ssd_pass_states(
    added_ptr, first_ptr, steps_ptr, runs_ptr,
    L, CHUNKS,
    states_ptr, last_ptr,
    H: tl.constexpr, SIZE: tl.constexpr, CHUNK: tl.constexpr, HAS_FIRST: tl.constexpr,
    HAS_RUNS: tl.constexpr, REVERSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program passes BLOCK of the SIZE = P R elements of one head's state over all chunks.

    first and last (B, H, P, R): the initial state, which is 0 without HAS_FIRST, and the final one.
    Grid: (B * H * cdiv(SIZE, BLOCK),).
    """
    tiles: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    pid = tl.program_id(0)
    offs = pid % tiles * BLOCK + tl.arange(0, BLOCK)
    mask = offs < SIZE
    h, b = pid // tiles % H, (pid // tiles // H).to(tl.int64)
    state = tl.zeros([BLOCK], tl.float32)
    if HAS_FIRST:
        state = tl.load(first_ptr + (b * H + h) * SIZE + offs, mask=mask, other=0.0)
    for chunk in range(CHUNKS):
        offsets = ((b * CHUNKS + chunk) * H + h) * SIZE + offs
        tl.store(states_ptr + offsets, state, mask=mask)
        added = tl.load(added_ptr + offsets, mask=mask, other=0.0)
        state = (
            total(steps_ptr, runs_ptr, b, h, chunk, L, CHUNKS, H, CHUNK, HAS_RUNS, REVERSE) * state
            + added
        )
    tl.store(last_ptr + (b * H + h) * SIZE + offs, state, mask=mask)


@triton.jit
def ssd_pass_d_states(
    d_added_ptr, d_last_ptr, states_ptr, steps_ptr, runs_ptr,
    L, CHUNKS,
    d_states_ptr, d_first_ptr, carried_ptr,
    H: tl.constexpr, SIZE: tl.constexpr, CHUNK: tl.constexpr,
    HAS_RUNS: tl.constexpr, REVERSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program passes BLOCK elements of one head's gradient over all chunks, backwards.

    carried (B, CHUNKS, H, cdiv(SIZE, BLOCK)): its share of the gradient of the logarithm of what
    remains of the state, exp(a_last) states . d_states.
    Grid: (B * H * cdiv(SIZE, BLOCK),).
    """
    tiles: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    pid = tl.program_id(0)
    tile = pid % tiles
    offs = tile * BLOCK + tl.arange(0, BLOCK)
    mask = offs < SIZE
    h, b = pid // tiles % H, (pid // tiles // H).to(tl.int64)
    d_state = tl.load(d_last_ptr + (b * H + h) * SIZE + offs, mask=mask, other=0.0)
    for i in range(CHUNKS):
        chunk = CHUNKS - 1 - i
        head = (b * CHUNKS + chunk) * H + h
        offsets = head * SIZE + offs
        tl.store(d_states_ptr + offsets, d_state, mask=mask)
        state = tl.load(states_ptr + offsets, mask=mask, other=0.0)
        d_added = tl.load(d_added_ptr + offsets, mask=mask, other=0.0)
        d_state *= total(steps_ptr, runs_ptr, b, h, chunk, L, CHUNKS, H, CHUNK, HAS_RUNS, REVERSE)
        tl.store(carried_ptr + head * tiles + tile, tl.sum(d_state * state, 0))
        d_state += d_added
    tl.store(d_first_ptr + (b * H + h) * SIZE + offs, d_state, mask=mask)
