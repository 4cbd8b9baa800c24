"""The recurrence in plain JAX: all chunks side by side, one position of each after the other.

Twice: first from states of zero, for what each chunk adds to the state before it and how much of
that remains; then, from the true states, for the outputs. Arrays are (K, B, n, D) inside: position
in the chunk, batch, chunk, channel, in the order of the scan.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from tjk.ops.linear.operands import Operands, accumulator

_CHUNK = 64


def forward(operands: Operands, *, reverse: bool, dtype: Any) -> tuple[Array, Array]:
    """h (B, L, D) in a dtype, and the final state (B, D)."""
    x = operands.x
    steps = _Steps(operands, reverse)
    over = (steps.decays, steps.cut(x))

    def step(h: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
        h = steps.decay(now[0]) * h + now[1]
        return h, h.astype(dtype)

    first = operands.initial_state
    first = jnp.zeros_like(x[:, 0], steps.exact) if first is None else first
    states, final = steps.states(first, over, step, backward=False)
    _, h = lax.scan(step, states, over)
    return steps.join(h), final


def backward(
    operands: Operands, h: Array, d_h: Array, d_final: Array, *, reverse: bool
) -> tuple[Array, Array, Array]:
    """The gradients of a, x and the initial state, in their dtypes."""
    a, x, first, _ = operands
    steps = _Steps(operands, reverse)
    first = jnp.zeros_like(x[:, 0], steps.exact) if first is None else first
    before = (h[:, 1:], first[:, None]) if reverse else (first[:, None], h[:, :-1])
    over = (steps.decays, steps.cut(d_h), steps.cut(jnp.concatenate(before, axis=1)))
    varying = a.ndim == 3

    def step(q: Array, now: tuple[Array, Array]) -> tuple[Array, Any]:
        return steps.decay(now[0]) * (now[1] + q), None

    def step_back(carry: tuple[Array, Array], now: tuple[Array, ...]) -> tuple[Any, Any]:
        q, sums = carry
        g = now[1] + q
        d_a = steps.where_passed(g * now[2], now[0])
        carry = (steps.decay(now[0]) * g, sums if varying else sums + d_a)
        return carry, (g.astype(x.dtype), d_a.astype(a.dtype) if varying else None)

    behind, d_first = steps.states(d_final, over[:2], step, backward=True)
    (_, sums), (d_x, d_a) = lax.scan(
        step_back, (behind, jnp.zeros_like(behind)), over, reverse=True
    )
    d_a = steps.join(d_a) if varying else jnp.sum(sums, (0, 1)).astype(a.dtype)
    return d_a, steps.join(d_x), d_first


class _Steps:
    """How arrays are cut into chunks, and what a state is multiplied by from step to step."""

    def __init__(self, operands: Operands, reverse: bool) -> None:
        a, x, _, runs = operands
        self.exact = accumulator(x.dtype)
        self.batch, self.length, _ = x.shape
        self.chunk = min(_CHUNK, self.length)
        self.reverse = reverse
        self.fixed = a.astype(self.exact) if a.ndim == 1 else None
        # Masks (K, B, n, 1), or None: whether a state passes; whether a position is no padding,
        # which leaves states as they are.
        passed = inside = None
        if runs is not None:
            before = (runs[:, 1:], runs[:, -1:]) if reverse else (runs[:, :1], runs[:, :-1])
            passed = self.cut((jnp.concatenate(before, axis=1) == runs)[:, :, None], True)
        if self.length % self.chunk:
            inside = self.cut(jnp.ones((self.batch, self.length, 1), bool))
        self.decays = (None if a.ndim == 1 else self.cut(a), passed, inside)

    def decay(self, now: Any) -> Array:
        """a at a position of each chunk."""
        a, _, inside = now
        a = self.fixed if a is None else a
        a = a if inside is None else jnp.where(inside, a, jnp.ones((), self.exact))
        return self.where_passed(a, now)

    def where_passed(self, value: Array, now: Any) -> Array:
        """0 where a segment starts."""
        _, passed, _ = now
        return value if passed is None else jnp.where(passed, value, jnp.zeros((), self.exact))

    def states(self, first: Array, over: Any, step: Any, *, backward: bool) -> tuple[Array, Array]:
        """The states before all chunks (behind them if backward), (B, n, D), and the last one."""
        zeros = jnp.zeros_like(over[1][0])

        def summary(carry: tuple[Array, Array], now: Any) -> tuple[tuple[Array, Array], None]:
            h, product = carry
            return (step(h, now)[0], product * self.decay(now[0])), None

        (ends, products), _ = lax.scan(
            summary, (zeros, jnp.ones_like(zeros)), over, reverse=backward
        )

        def chunk(h: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
            end, product = now
            return product * h + end, h

        by_chunk = (jnp.moveaxis(ends, 1, 0), jnp.moveaxis(products, 1, 0))
        last, states = lax.scan(chunk, first, by_chunk, reverse=backward)
        return jnp.moveaxis(states, 0, 1), last

    def cut(self, x: Array, fill: bool = False) -> Array:
        """(B, L, D) -> (K, B, n, D), padded; numbers in the dtype of the states."""
        x = x if x.dtype == bool else x.astype(self.exact)
        x = jnp.flip(x, 1) if self.reverse else x
        padding = ((0, 0), (0, -self.length % self.chunk), (0, 0))
        x = jnp.pad(x, padding, constant_values=jnp.asarray(fill, x.dtype))
        return jnp.moveaxis(x.reshape(self.batch, -1, self.chunk, x.shape[2]), 2, 0)

    def join(self, x: Array) -> Array:
        """The inverse."""
        x = jnp.moveaxis(x, 0, 2).reshape(self.batch, -1, x.shape[-1])[:, : self.length]
        return jnp.flip(x, 1) if self.reverse else x
