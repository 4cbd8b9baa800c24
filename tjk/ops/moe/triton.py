"""The expert layer in Triton: launches and the choice of their tiles."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from kernels_triton import moe as kernels
from tjk import executors
from tjk.launch import Launch
from tjk.ops.grouped.tiles import rows_tile
from tjk.ops.grouped.triton import matmul_launch, outer, rows_launch
from tjk.ops.moe.residuals import Residuals
from tjk.ops.routing.triton import sort
from tjk.precision import input_precision, products

_COMBINE_TOKENS = 16
_COMBINE_COLUMNS = 256


def forward(
    x: Array,
    w_gate: Array,
    w_up: Array,
    w_down: Array,
    weights: Array,
    experts: Array,
    *,
    activation: str,
    precision: str,
    keep: bool,
) -> tuple[Array, Residuals | None]:
    """y (M, D) in x's dtype, and what a backward pass needs, if it is to be kept."""
    order, position, group_sizes = sort(experts.reshape(-1), len(w_gate))
    launch = gate_up_launch(
        x, w_gate, w_up, order, group_sizes, activation=activation, precision=precision, keep=keep
    )
    hidden, gate, up = executors.run(launch)
    launch = matmul_launch(hidden, w_down, group_sizes, dtype=x.dtype, precision=precision)
    (rows,) = executors.run(launch)
    (y,) = executors.run(combine_launch(rows, position, experts, weights, len(w_gate)))
    return y, Residuals(gate, up, order, position, group_sizes) if keep else None


def backward(
    x: Array,
    w_gate: Array,
    w_up: Array,
    w_down: Array,
    weights: Array,
    experts: Array,
    residuals: Residuals,
    d_y: Array,
    *,
    activation: str,
    precision: str,
) -> tuple[Array, Array, Array, Array, Array]:
    """The gradients of x, the three expert weights and the routing weights, in their dtypes."""
    gate, up, order, position, group_sizes = residuals
    top_k = experts.shape[1]
    launch = d_hidden_launch(
        d_y,
        w_down,
        gate,
        up,
        weights,
        order,
        group_sizes,
        activation=activation,
        precision=precision,
    )
    d_gate, d_up, weighted, d_weights = executors.run(launch)
    d_weights = d_weights.sum(0)[position].reshape(weights.shape)
    launch = d_input_launch(d_gate, d_up, w_gate, w_up, group_sizes, precision=precision)
    (d_rows,) = executors.run(launch)
    (d_x,) = executors.run(combine_launch(d_rows, position, experts, None, len(w_gate)))
    sums = {"dtype": x.dtype, "precision": precision, "order": order, "top_k": top_k}
    d_w_gate = outer(x, d_gate, group_sizes, gather="left", **sums)
    d_w_up = outer(x, d_up, group_sizes, gather="left", **sums)
    d_w_down = outer(weighted, d_y, group_sizes, gather="right", **sums)
    return d_x, d_w_gate, d_w_up, d_w_down, d_weights


def gate_up_launch(
    x: Array,
    w_gate: Array,
    w_up: Array,
    order: Array,
    group_sizes: Array,
    *,
    activation: str,
    precision: str,
    keep: bool,
) -> Launch:
    """The launch that makes hidden and, if they are to be kept, gate and up: (M k, F) each."""
    (E, D, F), rows = w_gate.shape, len(order)
    kind = products(x.dtype, precision, executors.architecture())
    hidden = jax.ShapeDtypeStruct((rows, F), x.dtype)
    kept = hidden if keep else jax.ShapeDtypeStruct((0,), x.dtype)
    return rows_launch(
        kernels.moe_gate_up,
        rows_tile("gate_up", kind, rows, E, F),
        (x, w_gate, w_up, order, group_sizes),
        (hidden, kept, kept),
        sizes=(rows, E, D, F),
        constexprs={
            **{"E": E, "TOP_K": _top_k(x, order), "ACTIVATION": activation, "KEEP": keep},
            "PRECISION": input_precision(kind),
        },
        products=2,
    )


def d_hidden_launch(
    d_y: Array,
    w_down: Array,
    gate: Array,
    up: Array,
    weights: Array,
    order: Array,
    group_sizes: Array,
    *,
    activation: str,
    precision: str,
) -> Launch:
    """The launch that makes d_gate, d_up and weighted, (M k, F), and d_weights (tiles, M k)."""
    (E, F, D), rows = w_down.shape, len(order)
    kind = products(d_y.dtype, precision, executors.architecture())
    tile = rows_tile("d_hidden", kind, rows, E, F)
    hidden = jax.ShapeDtypeStruct((rows, F), d_y.dtype)
    partial = jax.ShapeDtypeStruct((-(-F // tile.block_n), rows), jnp.float32)
    return rows_launch(
        kernels.moe_d_hidden,
        tile,
        (d_y, w_down, gate, up, weights, order, group_sizes),
        (hidden, hidden, hidden, partial),
        sizes=(rows, E, D, F),
        constexprs={
            **{"E": E, "TOP_K": _top_k(d_y, order), "ACTIVATION": activation},
            "PRECISION": input_precision(kind),
        },
    )


def d_input_launch(
    d_gate: Array, d_up: Array, w_gate: Array, w_up: Array, group_sizes: Array, *, precision: str
) -> Launch:
    """The launch that makes the gradient of each row of x, (M k, D)."""
    (E, D, F), rows = w_gate.shape, len(d_gate)
    kind = products(d_gate.dtype, precision, executors.architecture())
    return rows_launch(
        kernels.moe_d_input,
        rows_tile("d_input", kind, rows, E, D),
        (d_gate, d_up, w_gate, w_up, group_sizes),
        (jax.ShapeDtypeStruct((rows, D), d_gate.dtype),),
        sizes=(rows, E, F, D),
        constexprs={"E": E, "PRECISION": input_precision(kind)},
        products=2,
    )


def combine_launch(
    rows: Array, position: Array, experts: Array, weights: Array | None, num_experts: int
) -> Launch:
    """The launch that adds up each token's rows, weighted if there are weights: (M, D)."""
    (M, top_k), D = experts.shape, rows.shape[1]
    y = jax.ShapeDtypeStruct((M, D), rows.dtype)
    block_d = min(_COMBINE_COLUMNS, max(16, 1 << (D - 1).bit_length()))
    inputs: tuple[Any, ...] = (rows, position, experts)
    return Launch(
        kernel=kernels.moe_combine,
        inputs=(*inputs, position if weights is None else weights),
        scalars=(M,),
        outputs=(y,),
        grid=(-(-M // _COMBINE_TOKENS) * -(-D // block_d),),
        constexprs={
            **{"E": num_experts, "D": D, "TOP_K": top_k, "WEIGHTED": weights is not None},
            **{"BLOCK_M": _COMBINE_TOKENS, "BLOCK_D": block_d},
        },
        bytes=sum(x.size * x.dtype.itemsize for x in (*inputs, y)),
        arch=executors.architecture(),
    )


def _top_k(by_token: Array, order: Array) -> int:
    return len(order) // max(1, len(by_token))
