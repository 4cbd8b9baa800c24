"""The convolution in plain JAX: shifted multiply-adds, which fuse to one pass over memory."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from tjk.ops.convolution.operands import Operands, accumulator


def forward(operands: Operands, *, activation: str | None, reverse: bool) -> Array:
    """y (B, L, D)."""
    total = _total(operands, reverse)
    y = jax.nn.silu(total) if activation == "silu" else total
    return y.astype(operands.x.dtype)


def backward(
    operands: Operands, d_y: Array, *, activation: str | None, reverse: bool
) -> tuple[Array, Array, Array | None]:
    """The gradients of x, weight and bias, in their dtypes.

    One sequence after the other: XLA writes shifted inputs of sums to memory, here to the same
    cached place each time.
    """
    _, weight, bias, *_ = operands

    def sequence(sums: Any, now: Any) -> tuple[Any, Array]:
        own, d_y = jax.tree.map(lambda a: a[None], now)
        d_x, d_weight, d_bias = _gradients(
            Operands(own[0], weight, bias, *own[1:]), d_y, activation, reverse
        )
        return (sums[0] + d_weight, sums[1] + d_bias), d_x[0]

    exact = accumulator(operands.x.dtype)
    zeros = jnp.zeros_like(weight.T, exact), jnp.zeros_like(weight[:, 0], exact)
    over = (operands.x, operands.initial_state, operands.runs), d_y
    (d_weight, d_bias), d_x = lax.scan(sequence, zeros, over)
    d_bias = None if bias is None else d_bias.astype(bias.dtype)
    return d_x, d_weight.T.astype(weight.dtype), d_bias


def _gradients(
    operands: Operands, d_y: Array, activation: str | None, reverse: bool
) -> tuple[Array, Array, Array]:
    """d_x in x's dtype, d_weight (W, D) and d_bias (D,) of all sequences given."""
    x, weight, *_ = operands
    exact, width = accumulator(x.dtype), weight.shape[1]
    d_total = d_y.astype(exact)
    if activation == "silu":
        (d_total,) = jax.vjp(jax.nn.silu, _total(operands, reverse))[1](d_total)
        d_total = lax.optimization_barrier(d_total)  # else made anew for each sum
    d_x, d_weight = jnp.zeros_like(d_total), []
    for j in range(width):
        back = width - 1 - j
        d_weight.append(jnp.sum(d_total * _tap(operands, back, reverse), (0, 1)))
        d_tap = weight[:, j].astype(exact) * d_total
        if operands.runs is not None:
            d_tap = jnp.where(_same_run(operands, back, reverse), d_tap, jnp.zeros((), exact))
        d_x += _shift(d_tap, -back, reverse)
    return d_x.astype(x.dtype), jnp.stack(d_weight), jnp.sum(d_total, (0, 1))


def _total(operands: Operands, reverse: bool) -> Array:
    """The sum before the activation."""
    x, weight, bias = operands[:3]
    exact, width = accumulator(x.dtype), weight.shape[1]
    total = jnp.zeros(x.shape, exact) if bias is None else bias.astype(exact)
    for j in range(width):
        total += weight[:, j].astype(exact) * _tap(operands, width - 1 - j, reverse)
    return total


def _tap(operands: Operands, back: int, reverse: bool) -> Array:
    """What each position sees `back` steps ago, (B, L, D)."""
    x, state = operands.x.astype(accumulator(operands.x.dtype)), operands.initial_state
    edge = None if state is None else state[:, state.shape[1] - back :]
    tap = _shift(x, back, reverse, edge)
    if operands.runs is None:
        return tap
    return jnp.where(_same_run(operands, back, reverse), tap, jnp.zeros_like(tap))


def _same_run(operands: Operands, back: int, reverse: bool) -> Array:
    """(B, L, 1); the initial state counts as run 0."""
    return (_shift(operands.runs, back, reverse) == operands.runs)[:, :, None]


def _shift(x: Array, back: int, reverse: bool, edge: Array | None = None) -> Array:
    """Each row of (B, L, ...) becomes that of `back` steps ago, in the order of the scan.

    Negative steps look ahead. Rows from outside are `edge`, (B, back, ...), or zeros.
    """
    L = x.shape[1]
    count = min(abs(back), L)
    if count == 0:
        return x
    if edge is None:
        edge = jnp.zeros_like(x[:, :count])
    edge = edge[:, :count].astype(x.dtype)
    if (back < 0) != reverse:
        return jnp.concatenate((x[:, count:], jnp.flip(edge, 1)), axis=1)
    return jnp.concatenate((edge, x[:, : L - count]), axis=1)
