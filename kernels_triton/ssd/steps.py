"""Steps and sums of logarithms of decays of the scan, and the gradients of what they are made of.

    dt' = softplus(dt + bias) or dt + bias,   log_t = dt'_t A

and per chunk the sums of log, as `decays.py` describes. heads (B, 3, H) float32 holds A, bias and D
of each head, dt is (B, L, H). Backward, with d_log_t the gradient of a token's logarithm,

    d_dt_t = (direct_t + A d_log_t) dt''_t,   d_A = sum over t of dt'_t d_log_t,
    d_log_t = sum of everything that is carried from before t to t or behind it,

which `ssd_d_inputs`, `ssd_d_C` and `ssd_pass_d_states` add up in pieces.
"""

import triton
import triton.language as tl

from kernels_triton.scan import row, softplus
from kernels_triton.ssd.decays import cut_log


@triton.jit
def head_of_chunk(CHUNKS, H: tl.constexpr):
    """Batch (int64), chunk and head of one of B * CHUNKS * H programs."""
    pid = tl.program_id(0)
    return (pid // H // CHUNKS).to(tl.int64), (pid // H) % CHUNKS, pid % H


@triton.jit
def ssd_steps(
    dt_ptr, heads_ptr,
    L, CHUNKS,
    steps_ptr,
    H: tl.constexpr, CHUNK: tl.constexpr, SOFTPLUS: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """One program makes the steps and sums of one chunk of one head.

    Grid: (B * CHUNKS * H,).
    """
    b, chunk, h = head_of_chunk(CHUNKS, H)
    t = chunk * CHUNK + tl.arange(0, CHUNK)
    mask = t < L
    heads_ptr += b * 3 * H + h
    dt_ptr += b * L * H + h
    dt = tl.load(dt_ptr + tl.cast(row(t, L, REVERSE), tl.int64) * H, mask=mask, other=0.0)
    dt = dt.to(tl.float32) + tl.load(heads_ptr + H)
    if SOFTPLUS:
        dt, _ = softplus(dt)
    dt = tl.where(mask, dt, 0.0)
    coarse, fine = cut_log(dt * tl.load(heads_ptr))
    time = CHUNKS * CHUNK
    steps_ptr += (b * H + h) * 3 * time + t
    tl.store(steps_ptr, dt)
    tl.store(steps_ptr + time, tl.cumsum(coarse, 0))
    tl.store(steps_ptr + 2 * time, tl.cumsum(fine, 0))


@triton.jit
def ssd_d_steps(
    dt_ptr, heads_ptr, steps_ptr, tokens_ptr, crossing_ptr, from_state_ptr, carried_ptr,
    L, CHUNKS,
    d_dt_ptr, d_heads_ptr,
    H: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr, TILES: tl.constexpr,
    SOFTPLUS: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """One program makes the gradients of the steps of one chunk of one head.

    time = CHUNKS CHUNK. tokens (B, H, 3, time): for each token the gradient of its step as a factor
    of what it adds, what it adds to the state behind the chunk times that state's gradient, and
    x . d_y. crossing (B, H, PARTS, time): pairs of tokens of a chunk, whose sum over PARTS counts
    those that lie on both sides of t. from_state (B, H, time): what a token takes from the state
    before its chunk. carried (B, CHUNKS, H, TILES): from the state before a chunk to that behind.
    d_heads (B, CHUNKS, 3, H) is each chunk's share of the gradients of A, bias and D.
    Grid: (B * CHUNKS * H,).
    """
    b, chunk, h = head_of_chunk(CHUNKS, H)
    start = chunk * CHUNK
    t = start + tl.arange(0, CHUNK)
    mask = t < L
    head = b * H + h
    heads_ptr += b * 3 * H + h
    A = tl.load(heads_ptr)

    time = CHUNKS * CHUNK
    d_log = tl.cumsum(tl.load(from_state_ptr + head * time + t), 0, reverse=True)
    tokens_ptr += head * 3 * time + t
    d_log += tl.cumsum(tl.load(tokens_ptr + time - 1, mask=t > start, other=0.0), 0)
    for part in tl.static_range(PARTS):
        d_log += tl.load(crossing_ptr + (head * PARTS + part) * time + t)
    carried_ptr += ((b * CHUNKS + chunk) * H + h) * TILES
    for tile in tl.static_range(TILES):
        d_log += tl.load(carried_ptr + tile)
    d_log = tl.where(mask, d_log, 0.0)

    d_dt = tl.where(mask, tl.load(tokens_ptr), 0.0) + A * d_log
    offsets = tl.cast(row(t, L, REVERSE), tl.int64) * H + h
    if SOFTPLUS:
        raw = tl.load(dt_ptr + b * L * H + offsets, mask=mask, other=0.0).to(tl.float32)
        _, slope = softplus(raw + tl.load(heads_ptr + H))
        d_dt *= slope
    d_dt_ptr += b * L * H
    tl.store(d_dt_ptr + offsets, d_dt.to(d_dt_ptr.dtype.element_ty), mask=mask)
    d_heads_ptr += (b * CHUNKS + chunk) * 3 * H + h
    dt = tl.load(steps_ptr + head * 3 * time + t)
    tl.store(d_heads_ptr, tl.sum(dt * d_log, 0))
    tl.store(d_heads_ptr + H, tl.sum(d_dt, 0))
    tl.store(d_heads_ptr + 2 * H, tl.sum(tl.where(mask, tl.load(tokens_ptr + 2 * time), 0.0), 0))
