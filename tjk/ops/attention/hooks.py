"""Attention kernels with modifiers compiled in: their text, their tables of tiles, their arrays.

A kernel with hooks is made for each problem: a module text with the modifiers as Triton functions,
and one kernel that calls the same body as the kernel without.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from tjk import elementwise
from tjk.elementwise import Derivative, Program
from tjk.executors import generated
from tjk.launch import Launch
from tjk.ops import masks
from tjk.ops.attention.modifiers import with_bias, with_mask
from tjk.ops.attention.operands import Modifiers, Operands


class Body(NamedTuple):
    """The function that does a kernel's work, and what this kernel passes for some parameters."""

    function: Any
    fixed: Mapping[str, str] = {}


@dataclasses.dataclass(frozen=True)
class Hooks:
    """What is compiled in or passed besides what all kernels take.

    Attributes:
        score, mask, keep: see `Modifiers`; the score adds the bias first, the mask asks the array.
        d_score: of score.
        keep_scale: see `Modifiers`.
        arrays: what score, mask and keep read, one after the other.
        sinks: (N,), or None.
        kinds: of tiles, or None.
        asks_everywhere: whether full tiles may hide keys nevertheless: those of a mask array.
    """

    score: Program | None
    d_score: Derivative | None
    mask: Program | None
    keep: Program | None
    keep_scale: float
    arrays: tuple[tuple[Array, ...], tuple[Array, ...], tuple[Array, ...]]
    sinks: Array | None
    kinds: Array | None
    asks_everywhere: bool

    @classmethod
    def of(cls, operands: Operands, modifiers: Modifiers) -> "Hooks":
        score, score_arrays = modifiers.score, operands.score_arrays
        mask, mask_arrays = modifiers.mask, operands.mask_arrays
        if operands.bias is not None:
            score, score_arrays = with_bias(score, operands.bias)
        if operands.mask is not None:
            mask, mask_arrays = with_mask(mask, mask_arrays, operands.mask)
        return cls(
            score=score,
            d_score=None if score is None else elementwise.derivative(score, "score"),
            mask=mask,
            keep=modifiers.keep,
            keep_scale=modifiers.keep_scale,
            arrays=(score_arrays, mask_arrays, operands.keep_arrays),
            sinks=operands.sinks,
            kinds=operands.kinds,
            asks_everywhere=operands.mask is not None,
        )

    @property
    def is_empty(self) -> bool:
        """Whether the kernel without hooks will do."""
        used = (self.score, self.mask, self.keep, self.sinks, self.kinds)
        return all(x is None for x in used)

    def attach(
        self,
        launch: Launch,
        body: Body,
        lengths: tuple[int, int],
        tile: tuple[int, int],
        by_key: bool,
    ) -> Launch:
        """The launch with hooks, or as it is if there are none.

        Args:
            launch: of the kernel without hooks.
            body: of that kernel.
            lengths: T and S.
            tile: queries and keys of a tile.
            by_key: whether a program has a tile of keys, and goes through those of queries.
        """
        if self.is_empty:
            return launch
        unused = launch.inputs[0]
        inputs: dict[str, Array] = {"sinks_ptr": unused if self.sinks is None else self.sinks}
        inputs |= {"counts_ptr": unused, "blocks_ptr": unused}
        blocks = (0, 0)
        if self.kinds is not None:
            kinds = jnp.minimum(self.kinds, masks.PARTIAL) if self.asks_everywhere else self.kinds
            inputs["counts_ptr"], inputs["blocks_ptr"] = table(kinds, lengths, tile, by_key)
            blocks = self.kinds.shape[:2]
        names = body.function.arg_names
        arrays = tuple(x for group in self.arrays for x in group)
        d_arrays: tuple[jax.ShapeDtypeStruct, ...] = ()
        if self.d_score is not None and "d_arrays" in names and "d_query_ptr" not in body.fixed:
            shapes = (self.d_score.program.arrays[i][0] for i in self.d_score.arrays)
            d_arrays = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
        constexprs = dict(launch.constexprs) | {"BLOCKS_B": blocks[0], "BLOCKS_N": blocks[1]}
        if "HAS_SINKS" in names:
            constexprs["HAS_SINKS"] = self.sinks is not None
        text = self._text(launch.name, body, constexprs, bool(d_arrays))
        first = len(launch.outputs)
        outputs = (*launch.outputs, *d_arrays)
        more = (*(x for name, x in inputs.items() if name in names), *arrays)
        return dataclasses.replace(
            launch,
            kernel=generated.kernel(text, launch.name),
            inputs=(*launch.inputs, *more),
            scalars=(*launch.scalars, self.keep_scale),
            outputs=outputs,
            constexprs=constexprs,
            zeroed=(*launch.zeroed, *range(first, len(outputs))),
            batched=False,  # what hooks read has no batch
            bytes=launch.bytes + sum(x.size * x.dtype.itemsize for x in (*more, *d_arrays)),
        )

    def _text(self, name: str, body: Body, constexprs: Collection[str], d_arrays: bool) -> str:
        """The module text of a kernel that calls the body with hooks."""
        imported = (
            f"from {body.function.fn.__module__} import {body.function.fn.__name__} as body\n"
        )
        parts = [elementwise.HEADER + imported]
        hooks = dict.fromkeys(("SCORE", "MASK", "KEEP", "D_SCORE"), "None")
        first = 0
        for hook, program, arrays in zip(hooks, (self.score, self.mask, self.keep), self.arrays):
            if program is not None:
                parts += [
                    elementwise.source(program, f"_{hook.lower()}"),
                    _adapter(hook, program, first),
                ]
                hooks[hook] = hook.lower()
            first += len(arrays)
        if self.d_score is not None:
            parts.append(elementwise.source(self.d_score.program, "_d_score"))
            parts.append(_d_score(self.d_score, d_arrays))
            hooks["D_SCORE"] = "d_score"
        parameters, arguments, fixed = [], [], body.fixed
        tuples = {"arrays": sum(map(len, self.arrays)), "d_arrays": 0}
        tuples["d_arrays"] = len(self.d_score.arrays) if d_arrays else 0
        for parameter in body.function.arg_names:
            if parameter in tuples:
                pointers = [f"{parameter}_{i}_ptr" for i in range(tuples[parameter])]
                parameters += pointers
                arguments.append(f"({''.join(f'{pointer}, ' for pointer in pointers)})")
            elif parameter in hooks:
                arguments.append(hooks[parameter])
            elif parameter in fixed:
                arguments.append(fixed[parameter])
            else:
                kind = ": tl.constexpr" if parameter in constexprs else ""
                parameters.append(parameter + kind)
                arguments.append(parameter)
        parts.append(
            f"@triton.jit\ndef {name}({', '.join(parameters)}):\n    body({', '.join(arguments)})\n"
        )
        return "\n\n".join(parts)

    def gradients(self, operands: Operands, d_arrays: tuple[Array, ...]) -> Operands:
        """The gradients of what hooks read, from the outputs that `attach` adds."""
        arrays = self.arrays[0]
        numbers = () if self.d_score is None else self.d_score.arrays
        by_number = {i: d.astype(arrays[i].dtype) for i, d in zip(numbers, d_arrays)}
        gradients = [by_number.get(i) for i in range(len(arrays))]
        bias = None if operands.bias is None else gradients.pop()
        return Operands(
            *(None,) * 3,
            bias=bias,
            score_arrays=tuple(gradients),
            mask_arrays=(None,) * len(operands.mask_arrays),
            keep_arrays=(None,) * len(operands.keep_arrays),
        )


def _adapter(hook: str, program: Program, first: int) -> str:
    """A hook that takes positions and arrays as one tuple, of which its own begin at `first`."""
    name, x = hook.lower(), "x, " if hook == "SCORE" else ""
    arrays = "".join(f", at[4][{first + i}]" for i in range(len(program.arrays)))
    return (
        f"@triton.jit\ndef {name}({x}at):\n"
        f"    return _{name}({x}at[0], at[1], at[2], at[3]{arrays})\n"
    )


def _d_score(derivative: Derivative, adds: bool) -> str:
    """The hook that makes the gradient of a score, and adds up those of what it has read.

    A gradient of 0 times an infinite slope is no number: where a weight is 0, `used` is false. What
    has no slope, as where something is added to a score, needs no such care.
    """
    program = derivative.program
    arrays = "".join(f", at[4][{i}]" for i in range(len(program.arrays)))
    names = [f"y{i}" for i in range(len(program.outputs))]
    lines = [
        "@triton.jit",
        "def d_score(x, at, d, used, d_arrays):",
        f"    {', '.join(names)} = _d_score(x, at[0], at[1], at[2], at[3], d{arrays})",
    ]

    def gradient(i: int) -> str:
        is_d = program.outputs[i] == len(program.inputs) - 1
        return f"y{i}" if is_d else f"tl.where(used, y{i}, 0.0)"

    d_x, reads = derivative.split(tuple(range(len(names))))
    for number, d_read, indices in reads if adds else ():
        place = elementwise.offset(program.arrays[number][0], [names[i] for i in indices])
        lines.append(
            f"    elementwise.add_at(d_arrays[{derivative.arrays.index(number)}], {place}, "
            f"{gradient(d_read)})"
        )
    return "\n".join((*lines, f"    return {gradient(d_x)}\n"))


def table(
    kinds: Array, lengths: tuple[int, int], tile: tuple[int, int], by_key: bool
) -> tuple[Array, Array]:
    """Which tiles a kernel visits: counts (B, N, rows) and blocks (B, N, rows, columns), int32.

    Args:
        kinds: (B, N, cdiv(T, 64), cdiv(S, 64)), see `tjk.ops.masks.BlockMask`.
        lengths: T and S.
        tile: queries and keys of a tile of the kernel.
        by_key: whether a row of the table is a tile of keys, not of queries.
    """
    visited, full = kinds != masks.EMPTY, kinds == masks.FULL
    for axis, length, size in zip((2, 3), lengths, tile):
        visited = _resample(visited, axis, length, size, jnp.any)
        full = _resample(full, axis, length, size, jnp.all)
    if by_key:
        visited, full = visited.swapaxes(2, 3), full.swapaxes(2, 3)
    order = jnp.argsort(~visited, axis=3, stable=True).astype(jnp.int32)
    asks = ~jnp.take_along_axis(full, order, 3)
    return visited.sum(3, dtype=jnp.int32), 2 * order + asks.astype(jnp.int32)


def _resample(x: Array, axis: int, length: int, size: int, join: Any) -> Array:
    """A row of tiles of 64 as one of tiles of another power of two."""
    if size < masks.TILE:
        return jnp.repeat(x, masks.TILE // size, axis).take(jnp.arange(-(-length // size)), axis)
    together = size // masks.TILE
    # The last tile of the new size has what is there, again.
    index = jnp.arange(-(-length // size) * together).clip(0, x.shape[axis] - 1)
    x = x.take(index, axis)
    shape = (*x.shape[:axis], -1, together, *x.shape[axis + 1 :])
    return join(x.reshape(shape), axis + 1)
