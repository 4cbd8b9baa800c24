"""Routing in Triton: launches."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from kernels_triton import routing as kernels
from tjk import executors
from tjk.launch import Launch
from tjk.ops.routing.order import ExpertOrder

_BLOCK = 128  # slots in a block: its comparisons, 128 x 128, fit the registers of four warps
_PREFIX_BLOCK = 1024
_HISTOGRAM_WIDTH = 64  # bins counted at a time
_TOP_K_ELEMENTS = 1024  # logits that a program of top-k holds


def sort(experts: Array, num_experts: int) -> ExpertOrder:
    """A stable counting sort of slots by expert; experts (S,) int32."""
    (slots,) = experts.shape
    if not slots:
        nothing = jnp.zeros(0, jnp.int32)
        return ExpertOrder(nothing, nothing, jnp.zeros(num_experts, jnp.int32))
    counts, totals = executors.run(histogram_launch(experts, num_experts))
    (prefix,) = executors.run(prefix_launch(counts, totals))
    order, position = executors.run(scatter_launch(experts, prefix))
    return ExpertOrder(order, position, totals[:num_experts])


def histogram_launch(experts: Array, num_experts: int) -> Launch:
    """The launch that counts experts by block, (E + 1, blocks), and in all, (E + 1,)."""
    blocks = -(-len(experts) // _BLOCK)
    bins = _power_of_two(num_experts + 1)
    return _launch(
        kernels.expert_histogram,
        (experts,),
        ((num_experts + 1, blocks), (num_experts + 1,)),
        scalars=(len(experts), blocks),
        grid=blocks,
        zeroed=(1,),
        constexprs={
            **{"E": num_experts, "EXPERTS": bins, "BLOCK": _BLOCK},
            "WIDTH": min(bins, _HISTOGRAM_WIDTH),
        },
    )


def prefix_launch(counts: Array, totals: Array) -> Launch:
    """The launch that makes each expert's first position in each block, (E + 1, blocks)."""
    bins, blocks = counts.shape
    return _launch(
        kernels.expert_prefix,
        (counts, totals),
        ((bins, blocks),),
        scalars=(blocks,),
        grid=bins,
        constexprs={
            **{"E": bins - 1, "EXPERTS": _power_of_two(bins)},
            "BLOCK": min(_PREFIX_BLOCK, max(32, _power_of_two(blocks))),
        },
    )


def scatter_launch(experts: Array, prefix: Array) -> Launch:
    """The launch that makes order and position, (S,) each."""
    slots, (bins, blocks) = len(experts), prefix.shape
    return _launch(
        kernels.expert_scatter,
        (experts, prefix),
        ((slots,), (slots,)),
        scalars=(slots, blocks),
        grid=blocks,
        constexprs={"E": bins - 1, "BLOCK": _BLOCK},
    )


def top_k_forward(logits: Array, k: int, *, normalize: str) -> tuple[Array, Array]:
    """logits (M, E) -> weights (M, k) float32, experts (M, k) int32."""
    M = logits.shape[0]
    shapes = (((M, k), jnp.float32), ((M, k), jnp.int32))
    launch = _top_k_launch(kernels.top_k_forward, (logits,), shapes, k, normalize)
    launch = dataclasses.replace(
        launch, constexprs=dict(launch.constexprs) | {"CHOSEN": _power_of_two(k)}
    )
    weights, experts = executors.run(launch)
    return weights[0], experts[0]


def top_k_backward(
    logits: Array, weights: Array, experts: Array, d_weights: Array, *, normalize: str
) -> Array:
    """d_logits (M, E) in the logits' dtype."""
    inputs = (logits, weights, experts, d_weights)
    shapes = ((logits.shape, logits.dtype),)
    launch = _top_k_launch(kernels.top_k_backward, inputs, shapes, weights.shape[1], normalize)
    return executors.run(launch)[0][0]


def _top_k_launch(
    kernel: object, inputs: tuple[Array, ...], shapes: Any, k: int, normalize: str
) -> Launch:
    (M, E), experts = inputs[0].shape, _power_of_two(inputs[0].shape[1])
    block_m = max(1, _TOP_K_ELEMENTS // experts)
    outputs = tuple(jax.ShapeDtypeStruct((1, *shape), dtype) for shape, dtype in shapes)
    return Launch(
        kernel=kernel,
        inputs=tuple(x[None] for x in inputs),
        scalars=(M,),
        outputs=outputs,
        grid=(-(-M // block_m),),
        constexprs={
            **{"E": E, "EXPERTS": experts, "TOP_K": k, "BLOCK_M": block_m},
            "NORMALIZE_ALL": normalize == "all",
        },
        batched=True,
        bytes=sum(x.size * x.dtype.itemsize for x in (*inputs, *outputs)),
        arch=executors.architecture(),
    )


def _launch(
    kernel: object,
    inputs: tuple[Array, ...],
    shapes: tuple[tuple[int, ...], ...],
    *,
    scalars: tuple[int, ...],
    grid: int,
    constexprs: dict[str, int],
    zeroed: tuple[int, ...] = (),
) -> Launch:
    outputs = tuple(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes)
    return Launch(
        kernel=kernel,
        inputs=inputs,
        scalars=scalars,
        outputs=outputs,
        grid=(grid,),
        constexprs=constexprs,
        zeroed=zeroed,
        bytes=sum(x.size * x.dtype.itemsize for x in (*inputs, *outputs)),
        arch=executors.architecture(),
    )


def _power_of_two(size: int) -> int:
    """The least that is not below `size`."""
    return 1 << (size - 1).bit_length()
