"""Gradients of the scan of Mamba-2 within a chunk, in the names of `outputs.py`.

With d_y that of y before the gate, h the state before the chunk and d_h the gradient of the one
behind it, for tokens j <= i, s_ij = C_i . B_j and v_ij = d_y_i . x_j:

    d_C_i = sum over j of   exp(a_i - a_j) v_ij dt_j B_j   +   exp(a_i) h^T d_y_i
    d_B_j = sum over i of   exp(a_i - a_j) v_ij dt_j C_i   +   exp(a_last - a_j) dt_j d_h^T x_j
    u_j   = sum over i of   exp(a_i - a_j) s_ij d_y_i      +   exp(a_last - a_j) d_h B_j
    d_x_j = dt_j u_j + D d_y_j,   d_dt_j = u_j . x_j (the step as a factor),   d_D = sum of d_y . x

d_B and d_C are sums over the heads of a group, in fixed order. A logarithm of a decay at time t has
the gradient of all that passes it: exp(a_i - a_j) s_ij v_ij dt_j for every i >= t > j, and the like
with the states. Each is an addend once: a difference of sums, of what ends at t and what begins,
would lose small ones in large neighbours.
"""

import triton
import triton.language as tl

from kernels_triton.grouped.tiles import left_tile
from kernels_triton.ssd.decays import between, extent, from_start, rows, to_end
from kernels_triton.ssd.outputs import inner_products, with_state


@triton.jit
def heads_program(CHUNKS, HEADS, PARTS: tl.constexpr, TILES: tl.constexpr):
    """Batch (int64), chunk, first of HEADS heads, part of all heads, tile of a program.

    One of B * CHUNKS * PARTS * TILES.
    """
    pid = tl.program_id(0)
    part = pid // TILES % PARTS
    chunk = pid // (TILES * PARTS) % CHUNKS
    b = (pid // (TILES * PARTS) // CHUNKS).to(tl.int64)
    return b, chunk, part * HEADS, part, pid % TILES


@triton.jit
def store_tokens(
    out_ptr, value, t, length, STRIDE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    REVERSE: tl.constexpr,
):  # fmt: skip
    """Stores rows of times t of a chunk, WIDTH wide and STRIDE apart, in the array's dtype."""
    offs = tl.arange(0, BLOCK)[None, :]
    mask = (t < length)[:, None] & (offs < WIDTH)
    pointers = out_ptr + rows(t, length, STRIDE, REVERSE)[:, None] + offs
    tl.store(pointers, value.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def clear(row_ptr, start, end, BLOCK: tl.constexpr):
    """Stores zeros from `start` up to `end`."""
    for t in range(start, end, BLOCK):
        tl.store(row_ptr + t + tl.arange(0, BLOCK), tl.zeros([BLOCK], tl.float32))


@triton.jit
def ssd_d_C(
    x_ptr, B_ptr, C_ptr, d_y_ptr, steps_ptr, runs_ptr, states_ptr,
    L, CHUNKS, HEADS,
    d_C_ptr, from_state_ptr, crossing_ptr,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, R: tl.constexpr, CHUNK: tl.constexpr,
    SPLITS: tl.constexpr, HAS_RUNS: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """One program makes d_C of BLOCK_M tokens, for one of SPLITS parts of a group's heads.

    d_C (B, L, G, SPLITS, R); from_state (B, H, time) and crossing (B, H, CHUNK / BLOCK_M, time)
    as `ssd_d_steps` takes them, of crossing the row of these tokens as i.
    Grid: (B * CHUNKS * G * SPLITS * (CHUNK / BLOCK_M),).
    """
    tiles: tl.constexpr = CHUNK // BLOCK_M
    b, chunk, head, part, tile = heads_program(CHUNKS, HEADS, G * SPLITS, tiles)
    origin, length = extent(chunk, L, CHUNK, REVERSE)
    time = CHUNKS * CHUNK
    start = (tiles - 1 - tile) * BLOCK_M
    if start >= length:
        for h in range(head, head + HEADS):
            row_ptr = crossing_ptr + ((b * H + h) * tiles + start // BLOCK_M) * time + chunk * CHUNK
            clear(row_ptr, 0, CHUNK, BLOCK_M)
            from_state_row = from_state_ptr + (b * H + h) * time + chunk * CHUNK
            clear(from_state_row, start, start + BLOCK_M, BLOCK_M)
        return
    t = start + tl.arange(0, BLOCK_M)
    runs_ptr += b * L + origin
    group = ((b * L + origin) * G + part // SPLITS) * R
    C_row = C_ptr + group + rows(t, length, G * R, REVERSE)[:, None]
    C_column = C_ptr + group + rows(t, length, G * R, REVERSE)[None, :]
    d_C = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    for h in range(head, head + HEADS):
        token = ((b * L + origin) * H + h) * P
        head_steps_ptr = steps_ptr + (b * H + h) * 3 * time + chunk * CHUNK
        state_ptr = states_ptr + ((b * CHUNKS + chunk) * H + h) * (P * R)
        d_y_row = d_y_ptr + token + rows(t, length, H * P, REVERSE)[:, None]
        from_h = with_state(
            d_y_row, state_ptr, length, P, R, False, BLOCK_M, BLOCK_K, BLOCK_R, PRECISION
        )
        remains = from_start(head_steps_ptr, runs_ptr, t, chunk, length, time, HAS_RUNS, REVERSE)
        from_h *= remains[:, None]
        from_state = tl.sum(from_h * left_tile(C_row, 0, R, BLOCK_R).to(tl.float32), 1)
        from_state_row = from_state_ptr + (b * H + h) * time + chunk * CHUNK
        tl.store(from_state_row + t, tl.where(t < length, from_state, 0.0))
        d_C += from_h

        d_y_column = d_y_ptr + token + rows(t, length, H * P, REVERSE)[None, :]
        crossing_row = (
            crossing_ptr + ((b * H + h) * tiles + start // BLOCK_M) * time + chunk * CHUNK
        )
        tl.store(crossing_row, 0.0)  # pairs do not cross a chunk's first token
        earlier = tl.zeros([BLOCK_M], tl.float32)  # pairs of i with tokens before the tile
        for start_j in range(0, start + BLOCK_M, BLOCK_N):
            j = start_j + tl.arange(0, BLOCK_N)
            x_row = x_ptr + token + rows(j, length, H * P, REVERSE)[:, None]
            B_row = B_ptr + group + rows(j, length, G * R, REVERSE)[:, None]
            values = inner_products(
                x_row, d_y_column, length, BLOCK_N, BLOCK_M, P, BLOCK_K, PRECISION
            )
            values *= between(head_steps_ptr, runs_ptr, t, j, length, time, HAS_RUNS, REVERSE)
            values *= tl.load(head_steps_ptr + j)[:, None]
            B = left_tile(B_row, 0, R, BLOCK_R)
            d_C = tl.dot(tl.trans(values.to(B.dtype)), B, d_C, input_precision=PRECISION)
            pairs = values * inner_products(
                B_row, C_column, length, BLOCK_N, BLOCK_M, R, BLOCK_K, PRECISION
            )
            crossing = tl.cumsum(pairs, 0) + earlier[None, :]
            crossing = tl.sum(tl.where(t[None, :] > j[:, None], crossing, 0.0), 1)
            tl.store(crossing_row + 1 + j, crossing, mask=1 + j < start + BLOCK_M)
            earlier += tl.sum(pairs, 0)
        clear(crossing_row, start + BLOCK_M, CHUNK, BLOCK_M)
    d_C_ptr += ((b * L + origin) * G * SPLITS + part) * R
    store_tokens(d_C_ptr, d_C, t, length, G * SPLITS * R, R, BLOCK_R, REVERSE)


@triton.jit
def ssd_d_inputs(
    x_ptr, B_ptr, C_ptr, d_y_ptr, heads_ptr, steps_ptr, runs_ptr, d_states_ptr,
    L, CHUNKS, HEADS,
    d_x_ptr, d_B_ptr, tokens_ptr,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, R: tl.constexpr, CHUNK: tl.constexpr,
    SPLITS: tl.constexpr, HAS_RUNS: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """One program makes d_x and d_B of BLOCK_M tokens, for one of SPLITS parts of a group's heads.

    d_B (B, L, G, SPLITS, R); tokens (B, H, 3, time) as `ssd_d_steps` takes it.
    Grid: (B * CHUNKS * G * SPLITS * (CHUNK / BLOCK_M),).
    """
    tiles: tl.constexpr = CHUNK // BLOCK_M
    b, chunk, head, part, tile = heads_program(CHUNKS, HEADS, G * SPLITS, tiles)
    origin, length = extent(chunk, L, CHUNK, REVERSE)
    time = CHUNKS * CHUNK
    start = tile * BLOCK_M
    j = start + tl.arange(0, BLOCK_M)
    runs_ptr += b * L + origin
    group = ((b * L + origin) * G + part // SPLITS) * R
    B_row = B_ptr + group + rows(j, length, G * R, REVERSE)[:, None]
    B_column = B_ptr + group + rows(j, length, G * R, REVERSE)[None, :]
    d_B = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    for h in range(head, head + HEADS):
        token = ((b * L + origin) * H + h) * P
        head_steps_ptr = steps_ptr + (b * H + h) * 3 * time + chunk * CHUNK
        d_state_ptr = d_states_ptr + ((b * CHUNKS + chunk) * H + h) * (P * R)
        x_row = x_ptr + token + rows(j, length, H * P, REVERSE)[:, None]
        dt = tl.load(head_steps_ptr + j)
        remains = to_end(head_steps_ptr, runs_ptr, j, length, time, CHUNK, HAS_RUNS, REVERSE)
        tokens_row = tokens_ptr + (b * H + h) * 3 * time + chunk * CHUNK + j

        d_x = with_state(
            B_row, d_state_ptr, length, R, P, True, BLOCK_M, BLOCK_K, BLOCK_P, PRECISION
        )
        d_x *= remains[:, None]
        to_state = tl.sum(d_x * left_tile(x_row, 0, P, BLOCK_P).to(tl.float32), 1) * dt
        tl.store(tokens_row + time, to_state)
        for start_i in range(start, length, BLOCK_N):
            i = start_i + tl.arange(0, BLOCK_N)
            d_y_row = d_y_ptr + token + rows(i, length, H * P, REVERSE)[:, None]
            C_row = C_ptr + group + rows(i, length, G * R, REVERSE)[:, None]
            scores = inner_products(
                C_row, B_column, length, BLOCK_N, BLOCK_M, R, BLOCK_K, PRECISION
            )
            # Tiles here are (i, j), those of `between` (j, i).
            scores *= tl.trans(
                between(head_steps_ptr, runs_ptr, i, j, length, time, HAS_RUNS, REVERSE)
            )
            d_y = left_tile(d_y_row, 0, P, BLOCK_P)
            d_x = tl.dot(tl.trans(scores.to(d_y.dtype)), d_y, d_x, input_precision=PRECISION)
        x = left_tile(x_row, 0, P, BLOCK_P).to(tl.float32)
        tl.store(tokens_row, tl.sum(d_x * x, 1))
        own_row = d_y_ptr + token + rows(j, length, H * P, REVERSE)[:, None]
        own = left_tile(own_row, 0, P, BLOCK_P).to(tl.float32)
        tl.store(tokens_row + 2 * time, tl.sum(own * x, 1))
        d_x = d_x * dt[:, None] + tl.load(heads_ptr + b * 3 * H + 2 * H + h) * own
        store_tokens(d_x_ptr + token, d_x, j, length, H * P, P, BLOCK_P, REVERSE)

        # A loop of its own: both sums together would take too many registers.
        from_h = with_state(
            x_row, d_state_ptr, length, P, R, False, BLOCK_M, BLOCK_K, BLOCK_R, PRECISION
        )
        d_B += from_h * (remains * dt)[:, None]
        x_column = x_ptr + token + rows(j, length, H * P, REVERSE)[None, :]
        for start_i in range(start, length, BLOCK_N):
            i = start_i + tl.arange(0, BLOCK_N)
            d_y_row = d_y_ptr + token + rows(i, length, H * P, REVERSE)[:, None]
            C_row = C_ptr + group + rows(i, length, G * R, REVERSE)[:, None]
            values = inner_products(
                d_y_row, x_column, length, BLOCK_N, BLOCK_M, P, BLOCK_K, PRECISION
            )
            values *= dt[None, :] * tl.trans(
                between(head_steps_ptr, runs_ptr, i, j, length, time, HAS_RUNS, REVERSE)
            )
            C = left_tile(C_row, 0, R, BLOCK_R)
            d_B = tl.dot(tl.trans(values.to(C.dtype)), C, d_B, input_precision=PRECISION)
    d_B_ptr += ((b * L + origin) * G * SPLITS + part) * R
    store_tokens(d_B_ptr, d_B, j, length, G * SPLITS * R, R, BLOCK_R, REVERSE)
