"""What the text of an optimised HLO module says about memory traffic.

`compiled.as_text()` has one instruction a line, in fused computations, too:

    %name = bf16[8,512,1024]{2,1,0} copy(%operand), ...

Operands are named without their shapes. {2,1,0} is the layout, minor axis first.
"""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

OUR_CALLS = re.compile(r'custom_call_target="triton_kernel_call(?:_ffi)?"')

_INSTRUCTION = re.compile(
    r"^\s*(?:ROOT )?%(?P<name>\S+) = (?P<type>\((?:[^()]|\([^()]*\))*\)|\S+) "
    r"(?P<opcode>[\w-]+)\((?P<operands>[^)]*)\)(?P<rest>.*)$",
    re.MULTILINE,
)
_ARRAY = re.compile(r"\w+\[(?P<dims>[\d,]*)\](?:\{(?P<layout>[\d,]*))?")
# They name arrays that are there already.
_WRITE_NOTHING = ("parameter", "get-tuple-element", "tuple", "bitcast")


class Instruction(NamedTuple):
    """One line of a module; sizes and layouts are those of the arrays that it results in."""

    name: str
    opcode: str
    sizes: tuple[int, ...]
    layouts: tuple[str, ...]
    operands: tuple[str, ...]
    is_ours: bool


def instructions(hlo: str) -> Iterator[Instruction]:
    """The instructions of all computations of a module."""
    for line in _INSTRUCTION.finditer(hlo):
        arrays = list(_ARRAY.finditer(line["type"]))
        yield Instruction(
            name=line["name"],
            opcode=line["opcode"],
            sizes=tuple(math.prod(map(int, filter(None, a["dims"].split(",")))) for a in arrays),
            layouts=tuple(a["layout"] or "" for a in arrays),
            operands=tuple(re.findall(r"%([^\s,)]+)", line["operands"])),
            is_ours=bool(OUR_CALLS.search(line["rest"])),
        )


def count_triton_calls(hlo: str) -> int:
    """Launches of our kernels. XLA's own Triton fusions are others."""
    return len(OUR_CALLS.findall(hlo))


def sizes(hlo: str) -> Iterator[int]:
    """Numbers of elements of all arrays that instructions make, our kernels' outputs included."""
    for i in instructions(hlo):
        if i.opcode not in _WRITE_NOTHING:
            yield from i.sizes


def producers(hlo: str, size: int) -> list[str]:
    """Names of the instructions, but for our kernels, that make an array of so many elements.

    By the number of elements, because the same numbers may be there under another shape.
    """
    return [
        i.name
        for i in instructions(hlo)
        if size in i.sizes and not i.is_ours and i.opcode not in _WRITE_NOTHING
    ]


def rearrangements(hlo: str, size: int) -> list[str]:
    """Names of the transposes, and of the copies into another layout, of so many elements."""
    found = {i.name: i for i in instructions(hlo)}

    def moves(i: Instruction) -> bool:
        return i.opcode == "transpose" or (
            i.opcode == "copy" and i.layouts != found[i.operands[0]].layouts
        )

    return [i.name for i in found.values() if size in i.sizes and moves(i)]
