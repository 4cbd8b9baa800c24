"""The states between parts of time, each of which maps the state affinely. All float32.

    S' = decay S + update S + addend,    S (K, V), update (K, K), addend (K, V)

decay stands apart from update, so that what a part leaves alone is not rounded by a product.
"""

import triton
import triton.language as tl

from kernels_triton.delta_rule.tiles import locate, matrix
from kernels_triton.grouped.tiles import load_operand


@triton.jit
def delta_rule_states(
    maps_ptr, decay_ptr, initial_ptr,
    parts,
    states_ptr,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    HAS_INITIAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program passes BLOCK_V columns of one head's state through all parts.

    maps (B, parts - 1, H, K, K + V) is update and addend of all parts but the last, decay
    (B, parts - 1, H); initial (B, H, K, V), states (B, parts, H, K, V) the state before each part.
    Grid: (B * H * cdiv(V, BLOCK_V),).
    """
    b, _, h, block = locate(tl.program_id(0), 1, H, (V + BLOCK_V - 1) // BLOCK_V)
    column = block * BLOCK_V
    state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if HAS_INITIAL:
        offsets, mask = matrix(b * H + h, column, K, V, BLOCK_K, BLOCK_V)
        state = tl.load(initial_ptr + offsets, mask=mask, other=0.0)
    for part in range(parts):
        offsets, mask = matrix((b * parts + part) * H + h, column, K, V, BLOCK_K, BLOCK_V)
        tl.store(states_ptr + offsets, state, mask=mask)
        if part < parts - 1:
            index = (b * (parts - 1) + part) * H + h
            state = _next(state, maps_ptr, decay_ptr, index, column, K, V, PRECISION)


@triton.jit
def _next(
    state, maps_ptr, decay_ptr, index, column,
    K: tl.constexpr, V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Columns from `column` on of the state behind a part."""
    BLOCK_K: tl.constexpr = state.shape[0]
    offsets, mask = matrix(index, K + column, K, K + V, BLOCK_K, state.shape[1])
    addend = tl.load(maps_ptr + offsets, mask=mask, other=0.0)
    offsets, mask = matrix(index, 0, K, K + V, BLOCK_K, BLOCK_K)
    update = load_operand(maps_ptr + offsets, mask & (tl.arange(0, BLOCK_K)[None, :] < K))
    kept = tl.load(decay_ptr + index) * state + addend
    return tl.dot(update, state, kept, input_precision=PRECISION)
