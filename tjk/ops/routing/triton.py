"""Routing in Triton: launches."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from kernels_triton import routing as kernels
from tjk import executors
from tjk.launch import Launch
from tjk.ops.routing.order import ExpertOrder

_BLOCK = 128  # slots: four warps then compare each with each in 128 steps of a thread
_PREFIX_BLOCK = 1024  # blocks whose counts a program adds up at a time
_TOP_K_ELEMENTS = 1024  # logits that a program of top-k holds


def sort(experts: Array, num_experts: int) -> ExpertOrder:
    """A stable counting sort of slots by expert; experts (S,) int32."""
    if not experts.size:
        nothing = jnp.zeros(0, jnp.int32)
        return ExpertOrder(nothing, nothing, jnp.zeros(num_experts, jnp.int32))
    counts, totals = executors.run(histogram_launch(experts, num_experts))
    (prefix,) = executors.run(prefix_launch(counts, totals))
    order, position = executors.run(scatter_launch(experts, prefix))
    return ExpertOrder(order, position, totals[:num_experts])


def histogram_launch(experts: Array, num_experts: int) -> Launch:
    """The launch that counts experts by block, (E + 1, blocks), and in all, (E + 1,)."""
    slots, bins = len(experts), num_experts + 1
    blocks = -(-slots // _BLOCK)
    return _launch(
        kernels.expert_histogram,
        (experts,),
        (_int32(bins, blocks), _int32(bins)),
        scalars=(slots, num_experts, blocks),
        programs=blocks,
        constexprs={"BINS": _power_of_two(bins), "BLOCK": _BLOCK},
        num_warps=2,  # no more threads than slots, also where a warp has 64
        zeroed=(1,),
    )


def prefix_launch(counts: Array, totals: Array) -> Launch:
    """The launch that makes each expert's first position in each block, (E + 1, blocks)."""
    bins, blocks = counts.shape
    block = min(_PREFIX_BLOCK, _power_of_two(blocks))
    return _launch(
        kernels.expert_prefix,
        (counts, totals),
        (_int32(bins, blocks),),
        scalars=(blocks,),
        programs=bins,
        constexprs={"BINS": _power_of_two(bins), "BLOCK": block},
    )


def scatter_launch(experts: Array, prefix: Array) -> Launch:
    """The launch that makes order and position, (S,) each."""
    slots, (bins, blocks) = len(experts), prefix.shape
    return _launch(
        kernels.expert_scatter,
        (experts, prefix),
        (_int32(slots), _int32(slots)),
        scalars=(slots, bins - 1, blocks),
        programs=blocks,
        constexprs={"BLOCK": _BLOCK},
    )


def top_k_forward(logits: Array, *, k: int, normalize: str) -> tuple[Array, Array]:
    """logits (M, E) -> weights (M, k) float32, experts (M, k) int32."""
    M, E = logits.shape
    weights, experts = executors.run(
        _launch(
            kernels.top_k_forward,
            (logits[None],),
            (jax.ShapeDtypeStruct((1, M, k), jnp.float32), _int32(1, M, k)),
            **_rows(M, E, k, normalize),
        )
    )
    return weights[0], experts[0]


def top_k_backward(
    logits: Array, weights: Array, experts: Array, d_weights: Array, *, k: int, normalize: str
) -> Array:
    """d_logits (M, E) in the logits' dtype."""
    M, E = logits.shape
    (d_logits,) = executors.run(
        _launch(
            kernels.top_k_backward,
            tuple(x[None] for x in (logits, weights, experts, d_weights)),
            (jax.ShapeDtypeStruct((1, M, E), logits.dtype),),
            unread=0 if normalize == "all" else 1,
            **_rows(M, E, k, normalize),
        )
    )
    return d_logits[0]


def _rows(M: int, E: int, k: int, normalize: str) -> dict[str, Any]:
    """What both launches of top-k have in common: a batch of 1, and a tile of whole rows."""
    block_e = _power_of_two(E)
    block_m = max(1, _TOP_K_ELEMENTS // block_e)
    return {
        "scalars": (M,),
        "programs": -(-M // block_m),
        "constexprs": {
            "E": E,
            "BLOCK_E": block_e,
            "TOP_K": k,
            "BLOCK_K": _power_of_two(k),
            "NORMALIZE_ALL": normalize == "all",
            "BLOCK_M": block_m,
        },
        "batched": True,
    }


def _launch(
    kernel: Any,
    inputs: tuple[Array, ...],
    outputs: tuple[jax.ShapeDtypeStruct, ...],
    *,
    programs: int,
    unread: int = 0,
    **options: Any,
) -> Launch:
    """A launch on a grid of one axis; it does not read the first `unread` of its inputs."""
    moved: tuple[Any, ...] = (*inputs[unread:], *outputs)
    return Launch(
        kernel=kernel,
        inputs=inputs,
        outputs=outputs,
        grid=(programs,),
        bytes=sum(x.size * x.dtype.itemsize for x in moved),
        arch=executors.architecture(),
        **options,
    )


def _int32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _power_of_two(size: int) -> int:
    """The least that is not below `size`."""
    return 1 << (size - 1).bit_length()
