"""Stable counting sort of slots by expert: histogram, prefix sum, scatter.

    position[s] = (slots of earlier experts) + (slots before s of the same expert)
    order[position[s]] = s

experts (S,) int32; order, position (S,) int32. A value outside [0, E) counts as expert E, so such
slots come last. Blocks of BLOCK slots are counted and scattered independently; counts and prefix
are (E + 1, blocks) int32. Everything is integer arithmetic: two runs give the same result.

Source: Cormen et al., Introduction to Algorithms, counting sort; in parallel as in Satish, Harris,
Garland, Designing efficient sorting algorithms for manycore GPUs (2009).
"""

import triton
import triton.language as tl


@triton.jit
def block_experts(experts_ptr, slots, S, E):
    """The experts of some slots: E for one outside [0, E), and for slots that do not exist.

    These may be counted, too: they would come behind all others.
    """
    experts = tl.load(experts_ptr + slots, mask=slots < S, other=E)
    return tl.where((experts >= 0) & (experts < E), experts, E)


@triton.jit
def expert_histogram(
    experts_ptr,
    S, E, blocks,
    counts_ptr, totals_ptr,
    BINS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program counts the experts of one block; BINS > E.

    totals (E + 1,) is zero before and has the counts of all blocks added by integer atomics, whose
    order does not matter. Grid: (blocks,).
    """
    block = tl.program_id(0)
    slots = block * BLOCK + tl.arange(0, BLOCK)
    # 88 instructions at 64 experts on sm_86; comparisons of slots with bins took 1,184.
    counts = tl.histogram(block_experts(experts_ptr, slots, S, E), BINS)
    bins = tl.arange(0, BINS)
    tl.store(counts_ptr + bins.to(tl.int64) * blocks + block, counts, mask=bins <= E)
    tl.atomic_add(totals_ptr + bins, counts, mask=(bins <= E) & (counts > 0), sem="relaxed")


@triton.jit
def expert_prefix(
    counts_ptr, totals_ptr,
    blocks,
    prefix_ptr,
    BINS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program makes one expert's row of prefix: where its slots in each block begin.

    Grid: (E + 1,).
    """
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    begin = tl.sum(tl.load(totals_ptr + bins, mask=bins < expert, other=0), 0)
    row = expert.to(tl.int64) * blocks
    for first in range(0, blocks, BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        counts = tl.load(counts_ptr + row + offsets, mask=offsets < blocks, other=0)
        before = begin + tl.cumsum(counts, 0) - counts
        tl.store(prefix_ptr + row + offsets, before, mask=offsets < blocks)
        begin += tl.sum(counts, 0)


@triton.jit
def expert_scatter(
    experts_ptr, prefix_ptr,
    S, E, blocks,
    order_ptr, position_ptr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program places the slots of one block; their rank among equals comes from comparisons.

    Grid: (blocks,).
    """
    block = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    slots = block * BLOCK + lanes
    experts = block_experts(experts_ptr, slots, S, E)
    # Loaded once more, so that it lies along the other axis without a change of layout.
    others = block_experts(experts_ptr, block * BLOCK + tl.arange(0, BLOCK), S, E)
    earlier = (others[None, :] == experts[:, None]) & (lanes[None, :] < lanes[:, None])
    rank = tl.sum(earlier.to(tl.int32), 1)
    inside = slots < S
    begin = tl.load(prefix_ptr + experts.to(tl.int64) * blocks + block, mask=inside, other=0)
    tl.store(position_ptr + slots, begin + rank, mask=inside)
    tl.store(order_ptr + begin + rank, slots, mask=inside)
