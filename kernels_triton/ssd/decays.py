"""Decays in logarithms, and rows by time: what the kernels of the scan share.

`steps` (B, H, 3, time) float32, time = CHUNKS CHUNK, holds for each head and time, in the order of
the scan, the step dt (0 behind the end: such a token adds nothing) and the sum of dt A from its
chunk's first token on, as two addends: multiples of UNIT, whose sums and differences are exact, and
the rest, too small for the roundings of its sums to matter. So a large step takes no digits from
the small ones beside it. What lies below -LIMIT is cut there: its exponential is 0.

Below, t, i and j are times from a chunk's first token on, `length` says how many tokens the chunk
has, and pointers point to its first: so offsets are small, int32.
"""

import triton
import triton.language as tl

from kernels_triton.scan import row

LIMIT: tl.constexpr = tl.constexpr(128.0)
UNIT: tl.constexpr = tl.constexpr(2.0**-9)  # 256 tokens of -LIMIT sum up to 2^24 of it


@triton.jit
def extent(chunk, L, CHUNK: tl.constexpr, REVERSE: tl.constexpr):
    """The row of a chunk's first token (int64), and how many tokens it has."""
    first = chunk * CHUNK
    return tl.cast(row(first, L, REVERSE), tl.int64), tl.minimum(CHUNK, L - first)


@triton.jit
def cut_log(log):
    """A logarithm of a decay as two addends: a multiple of UNIT, and the rest."""
    log = tl.maximum(log, -LIMIT)
    coarse = tl.floor(log / UNIT + 0.5) * UNIT
    return coarse, log - coarse


@triton.jit
def load_log(steps_ptr, t, time):
    """The sums up to times t of a chunk."""
    return tl.load(steps_ptr + time + t), tl.load(steps_ptr + 2 * time + t)


@triton.jit
def rows(t, length, STRIDE: tl.constexpr, REVERSE: tl.constexpr):
    """Offsets of the rows of times t of a chunk from its first; behind its end that of the last.

    So loads need no mask; decays of 0 keep those rows out of all results.
    """
    t = tl.minimum(t, length - 1)
    return (-t if REVERSE else t) * STRIDE


@triton.jit
def load_run(runs_ptr, t, length, REVERSE: tl.constexpr):
    """The runs of times t of a chunk; behind its end the last."""
    return tl.load(runs_ptr + rows(t, length, 1, REVERSE))


@triton.jit
def from_start(
    steps_ptr, runs_ptr, t, chunk, length, time, HAS_RUNS: tl.constexpr, REVERSE: tl.constexpr
):
    """What remains at times t of the state before their chunk."""
    coarse, fine = load_log(steps_ptr, t, time)
    remains = tl.exp(coarse + fine)
    if HAS_RUNS:
        # The initial state is of run 0.
        before = tl.load(runs_ptr + (1 if REVERSE else -1), mask=chunk > 0, other=0)
        remains = tl.where(load_run(runs_ptr, t, length, REVERSE) == before, remains, 0.0)
    return remains


@triton.jit
def to_end(
    steps_ptr, runs_ptr, t, length, time,
    CHUNK: tl.constexpr, HAS_RUNS: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """What remains behind their chunk of what is added at times t."""
    coarse, fine = load_log(steps_ptr, t, time)
    coarse_last, fine_last = load_log(steps_ptr, CHUNK - 1, time)
    remains = tl.exp((coarse_last - coarse) + (fine_last - fine))
    if HAS_RUNS:
        behind = load_run(runs_ptr, length - 1, length, REVERSE)
        remains = tl.where(load_run(runs_ptr, t, length, REVERSE) == behind, remains, 0.0)
    return remains


@triton.jit
def total(
    steps_ptr, runs_ptr, b, h, chunk, L, CHUNKS,
    H: tl.constexpr, CHUNK: tl.constexpr, HAS_RUNS: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """What remains behind a chunk of head h of the state before it."""
    origin, length = extent(chunk, L, CHUNK, REVERSE)
    time = CHUNKS * CHUNK
    steps_ptr += (b * H + h) * 3 * time + chunk * CHUNK
    runs_ptr += b * L + origin
    return from_start(steps_ptr, runs_ptr, length - 1, chunk, length, time, HAS_RUNS, REVERSE)


@triton.jit
def between(steps_ptr, runs_ptr, i, j, length, time, HAS_RUNS: tl.constexpr, REVERSE: tl.constexpr):
    """What remains at times i of what is added at j <= i, a tile (j, i).

    0 for j > i, and for i behind the end. The mask comes before the exponential, whose argument
    would be positive there.
    """
    coarse_i, fine_i = load_log(steps_ptr, i, time)
    coarse_j, fine_j = load_log(steps_ptr, j, time)
    log = coarse_i[None, :] - coarse_j[:, None]
    log += fine_i[None, :] - fine_j[:, None]
    mask = (i[None, :] >= j[:, None]) & (i < length)[None, :]
    if HAS_RUNS:
        run_i = load_run(runs_ptr, i, length, REVERSE)
        mask = mask & (run_i[None, :] == load_run(runs_ptr, j, length, REVERSE)[:, None])
    return tl.exp(tl.where(mask, log, -float("inf")))
