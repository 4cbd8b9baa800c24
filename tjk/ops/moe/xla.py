"""The expert layer in plain JAX: a loop over blocks of rows, each of one expert.

As in the kernels, rows of x are gathered block by block, nothing is padded, and no array but the
pre-activations and the rows' results has a row for each slot.
"""

import jax
import jax.numpy as jnp
from jax import Array

from tjk.ops.grouped.xla import Block, accumulator, for_each_block, product
from tjk.ops.moe.activations import ACTIVATIONS
from tjk.ops.moe.residuals import Residuals
from tjk.ops.routing.xla import sort


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
    top_k = experts.shape[1]

    def body(block: Block, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        rows, *kept = carry
        tokens = block.slice(order) // top_k
        inputs = x[tokens]
        gate = product(inputs, block.matrix(w_gate), (1, 0), precision)
        up = product(inputs, block.matrix(w_up), (1, 0), precision)
        hidden = (ACTIVATIONS[activation](gate) * up).astype(x.dtype)
        rows = block.write(rows, product(hidden, block.matrix(w_down), (1, 0), precision))
        return rows, *(block.write(old, new) for old, new in zip(kept, (gate, up)))

    M, D, F = len(order), x.shape[1], w_gate.shape[2]
    widths = (D, F, F) if keep else (D,)
    start = tuple(jnp.zeros((M, width), x.dtype) for width in widths)
    rows, *kept = for_each_block(group_sizes, M, body, start)
    present = (experts >= 0) & (experts < len(w_gate))
    y = _combine(rows, position, jnp.where(present, weights, jnp.zeros((), weights.dtype)))
    return y, Residuals(*kept, order, position, group_sizes) if keep else None


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
    order, top_k, dtype = residuals.order, experts.shape[1], x.dtype
    sums = accumulator(dtype)
    sorted_weights = weights.reshape(-1, 1)[order].astype(sums)

    def gated(gate: Array, up: Array) -> Array:
        return ACTIVATIONS[activation](gate) * up

    def body(block: Block, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        d_rows, d_weights, d_w_gate, d_w_up, d_w_down = carry
        tokens = block.slice(order) // top_k
        d_outputs = jnp.where(block.inside, d_y[tokens], jnp.zeros((), dtype))
        h = product(d_outputs, block.matrix(w_down), (1, 1), precision)
        gate, up = (block.rows(kept).astype(sums) for kept in (residuals.gate, residuals.up))
        hidden, vjp = jax.vjp(gated, gate, up)
        share = block.rows(sorted_weights)
        d_gate, d_up = (d.astype(dtype) for d in vjp(h * share))
        weighted = (hidden * share).astype(dtype)
        d_inputs = product(d_gate, block.matrix(w_gate), (1, 1), precision)
        d_inputs += product(d_up, block.matrix(w_up), (1, 1), precision)
        inputs = jnp.where(block.inside, x[tokens], jnp.zeros((), dtype))
        return (
            block.write(d_rows, d_inputs),
            block.write(d_weights, jnp.sum(hidden * h, axis=1, keepdims=True)),
            block.add(d_w_gate, product(inputs, d_gate, (0, 0), precision)),
            block.add(d_w_up, product(inputs, d_up, (0, 0), precision)),
            block.add(d_w_down, product(weighted, d_outputs, (0, 0), precision)),
        )

    M = len(order)
    start = (
        jnp.zeros((M, x.shape[1]), dtype),
        jnp.zeros((M, 1), sums),
        *(jnp.zeros(w.shape, sums) for w in (w_gate, w_up, w_down)),
    )
    d_rows, d_weights, *d_w = for_each_block(residuals.group_sizes, M, body, start)
    d_x = _combine(d_rows, residuals.position, jnp.ones_like(weights))
    d_weights = d_weights[residuals.position].reshape(weights.shape).astype(weights.dtype)
    return d_x, *(d.astype(dtype) for d in d_w), d_weights


def _combine(rows: Array, position: Array, weights: Array) -> Array:
    """Each token's rows, weighted and added up in the order of its slots: (M, D)."""
    M, top_k = weights.shape
    position = position.reshape(M, top_k)
    total = jnp.zeros((M, rows.shape[1]), weights.dtype)
    for j in range(top_k):
        total += rows[position[:, j]].astype(weights.dtype) * weights[:, j, None]
    return total.astype(rows.dtype)
