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
    states = cut.states(x, first, adjoint=False)
    outputs = [jax.ShapeDtypeStruct(x.shape, dtype), cut.struct(x.shape[0], x.shape[2])]
    h, final = cut.run(kernels.linear_outputs, [a, x, cut.runs, states], outputs)
    return h, final


def backward(
    operands: Operands, h: Array, d_h: Array, d_final: Array, *, reverse: bool
) -> tuple[Array, Array, Array]:
    """The gradients of a, x and the initial state, in the dtype of the states.

    d_a is (B, L, D), or (D,) as a is.
    """
    a, x, first, _ = operands
    cut = _Cut(operands, reverse)
    states = cut.states(d_h, d_final, adjoint=True)
    d_x, d_a, d_first = cut.run(
        kernels.linear_gradients,
        [a, h, cut.runs, d_final if first is None else first, d_h, states],
        [
            cut.struct(*x.shape),
            cut.struct(*(x.shape if cut.varying else states.shape)),
            cut.struct(x.shape[0], x.shape[2]),
        ],
        HAS_INITIAL=first is not None,
    )
    return d_a if cut.varying else jnp.sum(d_a, (0, 1)), d_x, d_first


class _Cut:
    """How one scan is cut into programs, and what its launches have in common."""

    def __init__(self, operands: Operands, reverse: bool) -> None:
        self.a, x, _, runs = operands
        (self.B, self.L, self.D), self.exact = x.shape, accumulator(x.dtype)
        self.varying = self.a.ndim == 3
        self.complex = jnp.iscomplexobj(x)
        self.has_runs, self.reverse = runs is not None, reverse
        self.runs = jnp.zeros((self.B, 0), jnp.int32) if runs is None else runs
        self.block = 128 if self.D > 64 else 64 if self.D > 32 else 32
        self.columns = -(-self.D // self.block)
        self.steps = 4 if self.complex else 8  # at a time: twice the registers each
        shortest = min(_SHORTEST, self.steps * -(-self.L // self.steps))
        most = -(-self.L // shortest)
        wanted = -(-_PROGRAMS * executors.multiprocessors() // (self.B * self.columns))
        self.length = shortest * -(-most // min(wanted, most))  # steps of a part
        self.parts = -(-self.L // self.length)

    def struct(self, *shape: int) -> jax.ShapeDtypeStruct:
        """An array of states."""
        return jax.ShapeDtypeStruct(shape, self.exact)

    def states(self, x: Array, first: Array | None, *, adjoint: bool) -> Array:
        """The states before all parts (the adjoint ones behind them), (B, parts, D)."""
        first = jnp.zeros((self.B, self.D), self.exact) if first is None else first
        if self.parts == 1:
            return first[:, None]
        shape = self.struct(self.B, self.parts, self.D)
        summaries = self.run(
            kernels.linear_summaries, [self.a, x, self.runs], [shape, shape], ADJOINT=adjoint
        )
        (states,) = _run(
            kernels.linear_pass_states,
            [*summaries, first],
            (self.parts,),
            [shape],
            self.B * self.columns,
            {"D": self.D, "COMPLEX": self.complex, "ADJOINT": adjoint, "BLOCK_D": self.block},
            batched=True,
        )
        return states

    def run(
        self,
        kernel: Any,
        inputs: Sequence[Array],
        outputs: Sequence[jax.ShapeDtypeStruct],
        **constexprs: Any,
    ) -> list[Array]:
        """Runs a kernel of which a program takes a part and a block of channels."""
        constexprs |= {
            "D": self.D,
            "VARYING": self.varying,
            "HAS_RUNS": self.has_runs,
            "REVERSE": self.reverse,
            "COMPLEX": self.complex,
            "BLOCK_D": self.block,
            "STEPS": self.steps,
        }
        scalars = (self.L, self.parts, self.length)
        grid = self.B * self.parts * self.columns
        return _run(kernel, inputs, scalars, outputs, grid, constexprs, batched=self.varying)


def _run(
    kernel: Any,
    inputs: Sequence[Array],
    scalars: tuple[int, ...],
    outputs: Sequence[jax.ShapeDtypeStruct],
    programs: int,
    constexprs: dict[str, Any],
    batched: bool,
) -> list[Array]:
    """Runs a kernel on pairs of real and imaginary parts; those of real numbers are not read."""
    pairs = [part for x in inputs for part in _split(x)]
    structs = [part for out in outputs for part in _split_struct(out)]
    arrays = (*inputs, *outputs)
    launch = Launch(
        kernel=kernel,
        inputs=tuple(pairs),
        scalars=scalars,
        outputs=tuple(structs),
        grid=(programs,),
        constexprs=constexprs,
        num_warps=1,
        batched=batched,
        bytes=sum(x.size * x.dtype.itemsize for x in arrays),
        arch=executors.architecture(),
    )
    parts = executors.run(launch)
    joined = zip(outputs, parts[::2], parts[1::2], strict=True)
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
