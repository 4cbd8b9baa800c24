"""The program of a program's gradients, by JAX's own rules."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from tjk.elementwise.evaluate import evaluate
from tjk.elementwise.program import Program
from tjk.elementwise.trace import trace_outputs


class Derivative(NamedTuple):
    """Gradients of a program's output with respect to an input and to the elements that it reads.

    Attributes:
        program: of the inputs and of `d`, the gradient of the output. Its outputs are the gradient
            of the input; then for each read of a float array that of the element, and its indices.
        reads: the number of the array of each read.
    """

    program: Program
    reads: tuple[int, ...]

    @property
    def arrays(self) -> tuple[int, ...]:
        """The numbers of the arrays that have a gradient, each once, in order."""
        return tuple(sorted(set(self.reads)))

    def split(self, outputs: tuple) -> tuple:
        """The program's outputs as the input's gradient and (array, gradient, indices) of reads."""
        position, rest = 1, []
        for number in self.reads:
            end = position + 1 + len(self.program.arrays[number][0])
            rest.append((number, outputs[position], tuple(outputs[position + 1 : end])))
            position = end
        return outputs[0], rest


@functools.cache
def derivative(program: Program, name: str) -> Derivative:
    """The derivative of a program of one output.

    Args:
        program: its output and the input of that name are floats.
        name: of the input.
    """
    position = [n for n, _ in program.inputs].index(name)
    reads = [
        (number, instruction)
        for number, instruction in program.numbered()
        if instruction.op == "read" and jnp.issubdtype(instruction.dtype, jnp.floating)
    ]
    dtype = program.dtype(program.outputs[0])

    def gradients(*arguments):
        *values, d, arrays = arguments
        known = {n: _read(program, n, values, arrays) for n, _ in reads}

        def output(x: Array, read: tuple[Array, ...]) -> Array:
            inputs = (*values[:position], x, *values[position + 1 :])
            return evaluate(program, inputs, arrays, dict(zip(known, read)))

        _, vjp = jax.vjp(output, values[position], tuple(known.values()))
        d_x, d_reads = vjp(d)
        results = [d_x]
        for (_, instruction), d_read in zip(reads, d_reads):
            indices = [_value(program, x, values, arrays) for x in instruction.operands]
            results += [d_read.astype(dtype), *indices]
        return results

    with jax.numpy_dtype_promotion("standard"):
        traced = trace_outputs(gradients, program, (("d", dtype),))
    return Derivative(traced, tuple(instruction.params[0] for _, instruction in reads))


def _read(program: Program, number: int, values: list[Array], arrays: list[Array]) -> Array:
    return _value(program, number, values, arrays)


def _value(program: Program, operand, values: list[Array], arrays: list[Array]) -> Array:
    """Any operand of a program."""
    part = Program(program.inputs, program.arrays, program.instructions, (operand,))
    return evaluate(part, values, arrays)
