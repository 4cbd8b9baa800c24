"""Launches of the recurrence's kernels, and how time is cut into parts.

Complex arrays enter and leave the kernels as two arrays each, which XLA takes from `lax.complex`
without a copy.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from kernels_triton import linear as kernels
from tjk import executors
from tjk.launch import Launch
from tjk.ops.linear.operands import Operands, accumulator

# The shortest part that is worth its summary, in steps; a multiple of what a program loads at once.
_SHORTEST = 64
# Programs a multiprocessor: of one warp, with a few KiB of loads in flight each.
_PROGRAMS = 8


def forward(operands: Operands, *, reverse: bool, dtype: Any) -> tuple[Array, Array]:
    """h (B, L, D) in a dtype, and the final state (B, D)."""
    a, x, first, _ = operands
    cut = _Cut(operands, reverse)
    outputs = [jax.ShapeDtypeStruct(x.shape, dtype), cut.struct(x.shape[0], x.shape[2])]
    states = cut.states(x, first, adjoint=False)
    h, final = cut.run(
        kernels.linear_outputs,
        [a, x, cut.runs, states, cut.absent if first is None else first],
        outputs,
        HAS_INITIAL=first is not None,
    )
    return h, final


def backward(
    operands: Operands, h: Array, d_h: Array, d_final: Array, *, reverse: bool
) -> tuple[Array, Array, Array]:
    """The gradients of a, x and the initial state, in their dtypes."""
    a, x, first, _ = operands
    cut = _Cut(operands, reverse)
    states = cut.states(d_h, d_final, adjoint=True)
    d_x, d_a, d_first = cut.run(
        kernels.linear_gradients,
        [a, h, cut.runs, cut.absent if first is None else first, d_h, states, d_final],
        [
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct(a.shape, a.dtype) if cut.varying else cut.struct(*cut.by_part),
            cut.struct(x.shape[0], x.shape[2]),
        ],
        HAS_INITIAL=first is not None,
    )
    return d_a if cut.varying else jnp.sum(d_a, (0, 1)).astype(a.dtype), d_x, d_first


class _Cut:
    """How one scan is cut into programs, and what its launches have in common."""

    def __init__(self, operands: Operands, reverse: bool) -> None:
        self.a, x, _, runs = operands
        (self.B, self.L, self.D), self.exact = x.shape, accumulator(x.dtype)
        self.varying = self.a.ndim == 3
        self.complex = jnp.iscomplexobj(x)
        self.has_runs, self.reverse = runs is not None, reverse
        # What is left out has no elements.
        self.runs = jnp.zeros((self.B, 0), jnp.int32) if runs is None else runs
        self.absent = jnp.zeros((self.B, 0), self.exact)
        self.block = 128 if self.D > 64 else 64 if self.D > 32 else 32
        self.columns = -(-self.D // self.block)
        self.steps = 4 if self.complex else 8  # at a time: twice the registers each
        shortest = min(_SHORTEST, self.steps * -(-self.L // self.steps))
        most = -(-self.L // shortest)
        wanted = -(-_PROGRAMS * executors.multiprocessors() // (self.B * self.columns))
        self.length = shortest * -(-most // min(wanted, most))  # steps of a part
        self.parts = -(-self.L // self.length)
        self.by_part = self.B, self.parts, self.D

    def struct(self, *shape: int) -> jax.ShapeDtypeStruct:
        """An array of states."""
        return jax.ShapeDtypeStruct(shape, self.exact)

    def states(self, x: Array, first: Array | None, *, adjoint: bool) -> Array:
        """The states that the parts pass on, by a recurrence over them: (B, parts, D).

        If adjoint those of q, from the last part to the first. No array for a part alone.
        """
        if self.parts == 1:
            return self.absent
        shape = self.struct(*self.by_part)
        decays, ends = self.run(
            kernels.linear_summaries, [self.a, x, self.runs], [shape, shape], ADJOINT=adjoint
        )
        over_parts = Operands(decays, ends, first)
        states, _ = forward(over_parts, reverse=adjoint, dtype=self.exact)
        return states

    def run(
        self,
        kernel: Any,
        inputs: Sequence[Array],
        outputs: Sequence[jax.ShapeDtypeStruct],
        **constexprs: Any,
    ) -> list[Array]:
        """Runs a kernel of which a program takes a part and a block of channels.

        On pairs of real and imaginary parts; those of real numbers are not read.
        """
        constexprs |= {
            "D": self.D,
            "VARYING": self.varying,
            "HAS_RUNS": self.has_runs,
            "REVERSE": self.reverse,
            "COMPLEX": self.complex,
            "BLOCK_D": self.block,
            "STEPS": self.steps,
        }
        launch = Launch(
            kernel=kernel,
            inputs=tuple(part for x in inputs for part in _split(x)),
            scalars=(self.L, self.parts, self.length),
            outputs=tuple(part for out in outputs for part in _split_struct(out)),
            grid=(self.B * self.parts * self.columns,),
            constexprs=constexprs,
            num_warps=1,
            batched=self.varying,
            bytes=sum(x.size * x.dtype.itemsize for x in (*inputs, *outputs)),
            arch=executors.architecture(),
        )
        results = executors.run(launch)
        joined = zip(outputs, results[::2], results[1::2], strict=True)
        return [lax.complex(re, im) if out.dtype == jnp.complex64 else re for out, re, im in joined]


def _split(x: Array) -> tuple[Array, ...]:
    """Real and imaginary part; of integers, which are no numbers of the recurrence, the array."""
    if jnp.issubdtype(x.dtype, jnp.integer):
        return (x,)
    return (jnp.real(x), jnp.imag(x)) if jnp.iscomplexobj(x) else (x, x)


def _split_struct(out: jax.ShapeDtypeStruct) -> tuple[jax.ShapeDtypeStruct, ...]:
    if jnp.issubdtype(out.dtype, jnp.complexfloating):
        return (jax.ShapeDtypeStruct(out.shape, jnp.float32),) * 2
    return out, jax.ShapeDtypeStruct((out.shape[0], 0), jnp.float32)
