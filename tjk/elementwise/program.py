"""Scalar functions as data: what one computes, step by step, from its inputs and from arrays."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Literal:
    """A constant of a dtype. Unlike Python's numbers, NaN equals NaN, and 0.0 is not -0.0."""

    value: bool | int | float
    dtype: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Literal) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[str, str]:
        return repr(self.value), self.dtype


# A number counts the inputs first, then the instructions.
Operand = int | Literal


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One operation on scalars.

    Attributes:
        op: a primitive's name in JAX; or "read": an element of array params[0]; or
            "custom_gradient": its first operand, whose gradients with respect to the others that
            are floats are the outputs of program params[0], of those others and of `d`.
        operands: of "read" an index for each axis, which is clamped to the array.
        dtype: of the result.
        params: of the operation.
    """

    op: str
    operands: tuple[Operand, ...]
    dtype: str
    params: tuple[Any, ...] = ()


@dataclasses.dataclass(frozen=True)
class Program:
    """A function of scalars without branches, equal and hashable by value.

    Attributes:
        inputs: name and dtype of each.
        arrays: shape and dtype of each array that it reads.
        instructions: each uses what stands before it.
        outputs: what is returned.
    """

    inputs: tuple[tuple[str, str], ...]
    arrays: tuple[tuple[tuple[int, ...], str], ...]
    instructions: tuple[Instruction, ...]
    outputs: tuple[Operand, ...]

    def depends(self, name: str) -> bool:
        """Whether an output depends on the input of that name."""
        number = [name for name, _ in self.inputs].index(name)
        return any(number in instruction.operands for instruction in self.instructions) or (
            number in self.outputs
        )

    @property
    def is_double(self) -> bool:
        """Whether it computes in float64, which kernels do not."""
        dtypes = (*(dtype for _, dtype in self.inputs), *(x.dtype for x in self.instructions))
        return "float64" in dtypes

    def numbered(self) -> Iterator[tuple[int, Instruction]]:
        """The instructions with their numbers as operands."""
        return enumerate(self.instructions, len(self.inputs))

    def dtype(self, operand: Operand) -> str:
        """Of an operand."""
        if isinstance(operand, Literal):
            return operand.dtype
        if operand < len(self.inputs):
            return self.inputs[operand][1]
        return self.instructions[operand - len(self.inputs)].dtype


class Builder:
    """Makes a program, each instruction once."""

    def __init__(self, inputs: tuple[tuple[str, str], ...]):
        self.inputs = inputs
        self.arrays: list[tuple[tuple[int, ...], str]] = []
        self._instructions: list[Instruction] = []
        self._numbers: dict[Instruction, int] = {}
        # Integer inputs are positions, and these have no sign; nor has what is made of such.
        self._unsigned = {i for i, (_, dtype) in enumerate(inputs) if "int" in dtype}

    def add(self, op: str, operands: tuple[Operand, ...], dtype: str, *params: Any) -> Operand:
        """The number of an instruction, or what it simply is."""
        if op == "lt" and self._is_unsigned(operands[0]) and operands[1] == Literal(0, "int32"):
            return Literal(False, "bool")
        if op == "select_n" and isinstance(operands[0], Literal):
            return operands[1 + int(operands[0].value)]
        if op == "integer_pow" and params == (0,):
            return literal(1, dtype)
        instruction = Instruction(op, operands, dtype, params)
        if instruction not in self._numbers:
            self._numbers[instruction] = len(self.inputs) + len(self._instructions)
            self._instructions.append(instruction)
            keeps = op in ("add", "mul", "div", "rem", "max", "min") and "int" in dtype
            if keeps and all(map(self._is_unsigned, operands)):
                self._unsigned.add(self._numbers[instruction])
        return self._numbers[instruction]

    def dtype(self, operand: int) -> str:
        """Of an input or an instruction."""
        if operand < len(self.inputs):
            return self.inputs[operand][1]
        return self._instructions[operand - len(self.inputs)].dtype

    def _is_unsigned(self, operand: Operand) -> bool:
        if isinstance(operand, Literal):
            return operand.dtype == "int32" and operand.value >= 0
        return operand in self._unsigned

    def program(self, outputs: tuple[Operand, ...]) -> Program:
        """What the outputs need, numbered anew."""
        first = len(self.inputs)
        instructions = self._instructions
        needed: set[int] = set()
        pending = [x for x in outputs if not isinstance(x, Literal)]
        while pending:
            number = pending.pop()
            if number >= first and number not in needed:
                needed.add(number)
                operands = instructions[number - first].operands
                pending += [x for x in operands if not isinstance(x, Literal)]
        new = {i: i for i in range(first)} | {n: first + i for i, n in enumerate(sorted(needed))}

        def renumbered(operands: tuple[Operand, ...]) -> tuple[Operand, ...]:
            return tuple(x if isinstance(x, Literal) else new[x] for x in operands)

        kept = (instructions[number - first] for number in sorted(needed))
        return Program(
            inputs=self.inputs,
            arrays=tuple(self.arrays),
            instructions=tuple(
                dataclasses.replace(x, operands=renumbered(x.operands)) for x in kept
            ),
            outputs=renumbered(outputs),
        )


def literal(value: Any, dtype: Any) -> Literal:
    """A constant, as Python's own number, rounded to the dtype."""
    name = str(jnp.dtype(dtype))
    rounded = np.asarray(value).astype(jnp.dtype(dtype))
    kind = bool if name == "bool" else int if "int" in name else float
    return Literal(kind(rounded), name)
