"""The selective scan in plain JAX: a loop over time, states kept at the start of each chunk only.

The backward pass goes back chunk by chunk: it brings the state forward through the chunk once,
noting it at the start of each block, and then goes back block by block, with the states of one
block, (BLOCK, B, D, R), at a time. So a decay is computed three times, and memory beside the chunk
states does not grow with L.

Arrays are time-major in the order of the scan inside, cut into chunks and blocks, padded by steps
that change nothing: delta = 0.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from tjk.ops.selective.operands import SPACING, Operands
from tjk.precision import accumulator

# Steps of which the backward pass holds all states; it divides SPACING.
_BLOCK = 16


class _Steps(NamedTuple):
    """What steps of the recurrence take: of one step, or with leading axes of time.

    Attributes:
        delta: (B, D), after bias and softplus.
        x: (B, D).
        B: (B, R).
        C: (B, R).
        keep: (B,) bool, false where the state restarts; or None.
    """

    delta: Array
    x: Array
    B: Array
    C: Array
    keep: Array | None

    def decay(self, A: Array) -> Array:
        """exp(delta A), 0 at a restart: (B, D, R)."""
        decay = jnp.exp(self.delta[:, :, None] * A)
        if self.keep is None:
            return decay
        return jnp.where(self.keep[:, None, None], decay, jnp.zeros_like(decay))

    def input(self) -> Array:
        """delta x B: (B, D, R)."""
        return (self.delta * self.x)[:, :, None] * self.B[:, None, :]


def forward(
    operands: Operands, runs: Array | None, *, softplus: bool, reverse: bool, keep: bool
) -> tuple[Array, Array, Array | None]:
    """y (B, L, D), the final state (B, D, R), and the states before each chunk, if to be kept.

    The states are (B, cdiv(L, SPACING), D, R), chunks in the order of the scan.
    """
    exact = _exact(operands)
    delta, _ = _step_sizes(exact, softplus)
    steps = _steps(exact, delta, runs, reverse)

    def step(h: Array, step: _Steps) -> tuple[Array, Array]:
        h = step.decay(exact.A) * h + step.input()
        return h, _dot("bdr,br->bd", h, step.C)

    def chunk(h: Array, steps: _Steps) -> tuple[Array, tuple[Array, Array | None]]:
        end, y = jax.lax.scan(step, h, steps)
        return end, (y, h if keep else None)

    final, (y, states) = jax.lax.scan(chunk, _start(exact), jax.tree.map(_join_blocks, steps))
    y = _by_batch(y, operands.x.shape[1], reverse)
    y = _gate(_skip(y, exact), exact.z)
    return y.astype(operands.x.dtype), final, None if states is None else jnp.moveaxis(states, 0, 1)


def backward(
    operands: Operands,
    runs: Array | None,
    states: Array,
    d_y: Array,
    d_final: Array,
    *,
    softplus: bool,
    reverse: bool,
) -> Operands:
    """The gradients of all operands, in their dtypes."""
    exact, L = _exact(operands), operands.x.shape[1]
    A = exact.A
    delta, slope = _step_sizes(exact, softplus)
    steps = _steps(exact, delta, runs, reverse)
    d_y = d_y.astype(A.dtype)
    d_sum = d_y if exact.z is None else d_y * jax.nn.silu(exact.z)  # of y before the gate

    def advance(h: Array, step: _Steps) -> tuple[Array, None]:
        return step.decay(A) * h + step.input(), None

    def block_start(h: Array, steps: _Steps) -> tuple[Array, Array]:
        return jax.lax.scan(advance, h, steps)[0], h

    def recompute(h: Array, operands: tuple[_Steps, Array]) -> tuple[Array, Any]:
        """A step of h again: what it passed on, the gradient of C, y before the skip."""
        step, d_sum = operands
        passed = step.decay(A) * h
        h = passed + step.input()
        y = None if exact.z is None else _dot("bdr,br->bd", h, step.C)
        return h, (passed, _dot("bdr,bd->br", h, d_sum), y)

    def step_back(carry: tuple[Array, Array], operands: Any) -> tuple[tuple[Array, Array], Any]:
        """carry: the gradient of h that comes from later steps, and A's so far, (B, D, R) each."""
        d_h, d_A = carry
        step, d_sum, passed = operands
        d_h = d_h + d_sum[:, :, None] * step.C[:, None, :]
        d_exponent = d_h * passed  # of delta A
        d_A = d_A + step.delta[:, :, None] * d_exponent
        through_input = _dot("bdr,br->bd", d_h, step.B)
        through_decay = _dot("bdr,dr->bd", d_exponent, A)
        d_B = _dot("bdr,bd->br", d_h, step.delta * step.x)
        return (step.decay(A) * d_h, d_A), (through_input, through_decay, d_B)

    def block_back(carry: tuple[Array, Array], block: Any) -> tuple[tuple[Array, Array], Any]:
        steps, d_sum, h = block
        _, (passed, d_C, y) = jax.lax.scan(recompute, h, (steps, d_sum))
        carry, through = jax.lax.scan(step_back, carry, (steps, d_sum, passed), reverse=True)
        return carry, (*through, d_C, y)

    def chunk_back(carry: tuple[Array, Array], chunk: Any) -> tuple[tuple[Array, Array], Any]:
        steps, d_sum, h = chunk
        _, starts = jax.lax.scan(block_start, h, steps)
        return jax.lax.scan(block_back, carry, (steps, d_sum, starts), reverse=True)

    chunks = (steps, _by_time(d_sum, reverse), jnp.moveaxis(states, 1, 0))
    carry = (d_final.astype(A.dtype), jnp.zeros_like(d_final, A.dtype))
    (d_start, d_A), outputs = jax.lax.scan(chunk_back, carry, chunks, reverse=True)
    through_input, through_decay, d_B, d_C, y = (
        a if a is None else _by_batch(_join_blocks(a), L, reverse) for a in outputs
    )
    d_delta = (through_decay + exact.x * through_input) * slope
    d_x, d_D, d_z = delta * through_input, None, None
    if exact.D is not None:
        d_x += exact.D * d_sum
        d_D = jnp.sum(exact.x * d_sum, (0, 1))
    if exact.z is not None:
        (d_z,) = jax.vjp(lambda z: _gate(_skip(y, exact), z), exact.z)[1](d_y)
    gradients = Operands(
        x=d_x,
        delta=d_delta,
        A=jnp.sum(d_A, 0),
        B=d_B,
        C=d_C,
        D=d_D,
        z=d_z,
        delta_bias=None if exact.delta_bias is None else jnp.sum(d_delta, (0, 1)),
        state=None if exact.state is None else d_start,
    )
    return jax.tree.map(lambda d, x: d.astype(x.dtype), gradients, operands)


def _exact(operands: Operands) -> Operands:
    dtype = accumulator(operands.x.dtype)
    return jax.tree.map(lambda x: x.astype(dtype), operands)


def _start(operands: Operands) -> Array:
    if operands.state is not None:
        return operands.state
    return jnp.zeros_like(operands.A, shape=(len(operands.x), *operands.A.shape))


def _step_sizes(operands: Operands, softplus: bool) -> tuple[Array, Array]:
    """delta after bias and softplus, and the derivative of the latter, (B, L, D) each."""
    delta = operands.delta
    if operands.delta_bias is not None:
        delta += operands.delta_bias
    if not softplus:
        return delta, jnp.ones_like(delta)
    return jax.nn.softplus(delta), jax.nn.sigmoid(delta)


def _skip(y: Array, operands: Operands) -> Array:
    return y if operands.D is None else y + operands.D * operands.x


def _gate(y: Array, z: Array | None) -> Array:
    return y if z is None else y * jax.nn.silu(z)


def _steps(operands: Operands, delta: Array, runs: Array | None, reverse: bool) -> _Steps:
    keep = None
    if runs is not None:
        runs = jnp.flip(runs, 1) if reverse else runs
        keep = jnp.diff(runs, axis=1, prepend=jnp.zeros_like(runs[:, :1])) == 0
        keep = jnp.flip(keep, 1) if reverse else keep
    return jax.tree.map(
        lambda x: _by_time(x, reverse), _Steps(delta, operands.x, operands.B, operands.C, keep)
    )


def _by_time(x: Array, reverse: bool) -> Array:
    """(B, L, ...) -> (chunks, blocks, BLOCK, B, ...), padded with 0 (true for keep)."""
    x = jnp.moveaxis(jnp.flip(x, 1) if reverse else x, 1, 0)
    L = len(x)
    size = SPACING if L > SPACING else -(-L // _BLOCK) * _BLOCK
    fill = jnp.asarray(x.dtype == bool, x.dtype)
    x = jnp.pad(x, [(0, -L % size)] + [(0, 0)] * (x.ndim - 1), constant_values=fill)
    return x.reshape(-1, size // _BLOCK, _BLOCK, *x.shape[1:])


def _join_blocks(x: Array) -> Array:
    """(chunks, blocks, BLOCK, ...) -> (chunks, steps, ...)."""
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _by_batch(x: Array, L: int, reverse: bool) -> Array:
    """(chunks, steps, B, ...) -> (B, L, ...)."""
    x = jnp.moveaxis(x.reshape(-1, *x.shape[2:])[:L], 0, 1)
    return jnp.flip(x, 1) if reverse else x


def _dot(axes: str, x: Array, y: Array) -> Array:
    """Without TF32 on a GPU."""
    return jnp.einsum(axes, x, y, precision="highest")
