"""GroupNorm in Triton: launches, and how much each program takes."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from kernels_triton import group_norm as kernels
from tjk import executors
from tjk.launch import Launch

# Elements that a program may hold where it has all positions: 32 each of 512 threads. 64 spill.
_WHOLE = 16384
# So few elements that a second launch would cost more than multiprocessors that have nothing to do.
_SMALL = 4096
# Elements of a tile where positions are cut into parts, and those of a part at least.
_TILE, _PART = 4096, 1024
# Lanes of a group in such a tile.
_LANES = 1024
# Partial results of one kind that a program puts together.
_PARTIALS = 256
# Bytes next to each other that memory hands out at once, and those of a line of the cache.
_SECTOR, _LINE = 32, 128


def forward(
    x: Array, scale: Array, bias: Array, *, groups: int, epsilon: float, activation: str | None
) -> tuple[Array, Array, Array]:
    """y (B, S, C); mean and 1 / sqrt(variance + epsilon), (B, groups) float32."""
    tile = tile_of(x.shape, groups, x.dtype.itemsize, 1, executors.multiprocessors())
    partials = (x, x)
    if tile.partials:
        partials = executors.run(statistics_launch(x, groups, tile))
    operands = (x, scale[None], bias[None], *partials)
    return executors.run(forward_launch(operands, groups, tile, epsilon, activation))


def backward(
    x: Array,
    scale: Array,
    bias: Array,
    mean: Array,
    rstd: Array,
    d_y: Array,
    *,
    groups: int,
    activation: str | None,
) -> tuple[Array, Array, Array]:
    """The gradients of x (B, S, C), scale (C,) and bias (C,)."""
    tile = tile_of(x.shape, groups, x.dtype.itemsize, 2, executors.multiprocessors())
    operands = (x, scale[None], bias[None], mean, rstd, d_y)
    if tile.partials:
        d_scale, d_bias, *partials = executors.run(sums_launch(operands, groups, tile, activation))
        launch = backward_launch((*operands, *partials), groups, tile, activation)
        d_x = executors.run(launch)[0]
    else:
        launch = backward_launch((*operands, x, x), groups, tile, activation)
        d_x, d_scale, d_bias = executors.run(launch)
    return d_x, jnp.sum(d_scale, (0, 1)), jnp.sum(d_bias, (0, 1))


class Tile(NamedTuple):
    """What a program takes.

    Attributes:
        groups: whole groups of a slab of channels, a power of two.
        width: lanes of a group, a power of two; a wider group is cut into pieces.
        slabs: of the channels.
        block_s: positions of a tile.
        parts: of the positions.
        length: positions of a part.
        partials: partial results of a group; 0 where a program has all positions.
    """

    groups: int
    width: int
    slabs: int
    block_s: int
    parts: int
    length: int
    partials: int


def tile_of(
    shape: tuple[int, ...], groups: int, itemsize: int, arrays: int, multiprocessors: int
) -> Tile:
    """A program has all positions of a slab if they fit and three in four multiprocessors get one.

    Else positions are cut into parts, so that each multiprocessor gets four programs.

    Args:
        shape: (B, S, C).
        groups: of C.
        itemsize: bytes of an element.
        arrays: how many arrays of this shape a program holds.
        multiprocessors: of the card.
    """
    B, S, C = shape
    width, rows = _power(C // groups), _power(S)
    count = _least(groups, width, itemsize)
    while (
        2 * count * width * rows <= 2 * _SMALL
        and count < groups
        and B * -(-groups // (2 * count)) >= 4 * multiprocessors
    ):
        count *= 2
    slabs, elements = -(-groups // count), count * width * rows
    if elements <= _SMALL or (elements * arrays <= _WHOLE and 4 * B * slabs >= 3 * multiprocessors):
        return Tile(count, width, slabs, rows, 1, S, 0)

    width = min(width, _LANES)
    pieces = -(-C // groups // width)
    wanted = -(-4 * multiprocessors // (B * pieces))  # programs for a piece of each group

    def most(count: int) -> int:
        """Parts."""
        return max(1, min(_PARTIALS // (count * pieces), S * count * width // _PART))

    count = _least(groups, width, itemsize)
    while (
        2 * count * width * itemsize <= _LINE
        and count < groups
        and -(-groups // (2 * count)) * most(2 * count) >= wanted
    ):
        count *= 2
    slabs = -(-groups // count)
    rows = -(-S // min(most(count), -(-wanted // slabs)))
    block_s = min(max(1, _TILE // (count * width)), _power(rows + 1) // 2)
    length = rows // block_s * block_s
    parts = -(-S // length)
    return Tile(count, width, slabs * pieces, block_s, parts, length, parts * pieces)


def _least(groups: int, width: int, itemsize: int) -> int:
    """Groups of a slab that fill a sector."""
    return min(_power(groups), max(1, _SECTOR // (width * itemsize)))


def _power(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def statistics_launch(x: Array, groups: int, tile: Tile) -> Launch:
    """The launch that makes mean and sum of squared deviations of each part and piece."""
    partials = jax.ShapeDtypeStruct((len(x), tile.partials, groups), jnp.float32)
    return _launch(kernels.group_norm_statistics, (x,), (), (partials, partials), groups, tile)


def forward_launch(
    operands: tuple[Array, ...],
    groups: int,
    tile: Tile,
    epsilon: float,
    activation: str | None,
) -> Launch:
    """The launch that makes y, mean and rstd."""
    x = operands[0]
    statistics = jax.ShapeDtypeStruct((len(x), groups), jnp.float32)
    return _launch(
        kernels.group_norm_forward,
        operands,
        (epsilon,),
        (jax.ShapeDtypeStruct(x.shape, x.dtype), statistics, statistics),
        groups,
        tile,
        PARTIALS=_padded(tile),
        ACTIVATION=activation,
    )


def sums_launch(
    operands: tuple[Array, ...], groups: int, tile: Tile, activation: str | None
) -> Launch:
    """The launch that makes the sums of each part, for d_scale, d_bias and d_x."""
    B, _, C = operands[0].shape
    channels = jax.ShapeDtypeStruct((B, tile.parts, C), jnp.float32)
    partials = jax.ShapeDtypeStruct((B, tile.partials, groups), jnp.float32)
    outputs = (channels, channels, partials, partials)
    return _launch(
        kernels.group_norm_sums, operands, (), outputs, groups, tile, ACTIVATION=activation
    )


def backward_launch(
    operands: tuple[Array, ...], groups: int, tile: Tile, activation: str | None
) -> Launch:
    """The launch that makes d_x and, where a program has all positions, d_scale and d_bias."""
    x = operands[0]
    B, _, C = x.shape
    channels = jax.ShapeDtypeStruct((0,) if tile.partials else (B, 1, C), jnp.float32)
    return _launch(
        kernels.group_norm_backward,
        operands,
        (),
        (jax.ShapeDtypeStruct(x.shape, x.dtype), channels, channels),
        groups,
        tile,
        PARTIALS=_padded(tile),
        ACTIVATION=activation,
    )


def _padded(tile: Tile) -> int:
    return _power(tile.partials) if tile.partials else 0


def _launch(
    kernel: Any,
    inputs: tuple[Array, ...],
    scalars: tuple[float, ...],
    outputs: tuple[jax.ShapeDtypeStruct, ...],
    groups: int,
    tile: Tile,
    **constexprs: Any,
) -> Launch:
    """A launch example by example.

    scale and bias have a leading axis of 1 in place of the batch, so that vmap can fold into both.
    """
    x = inputs[0]
    B, S, C = x.shape
    # 32 elements a thread, 16 in loops; AMD's warps have 64 threads.
    threads = tile.groups * tile.width * tile.block_s // (16 if tile.partials else 32)
    warp = 64 if isinstance(executors.architecture(), str) else 32
    # What is left out is x once more.
    moved = (x, *(a for a in inputs if a is not x), *outputs)
    batch = () if len(inputs) == 1 else (B,)
    return Launch(
        kernel=kernel,
        inputs=inputs,
        scalars=(*batch, S, tile.parts, tile.length, *scalars),
        outputs=outputs,
        grid=(B * tile.parts * tile.slabs,),
        constexprs={
            **{"C": C, "W": C // groups, "GROUPS": tile.groups, "WIDTH": tile.width},
            **{"BLOCK_S": tile.block_s, **constexprs},
        },
        num_warps=max(1, min(threads, 512) // warp),
        num_stages=1,
        batched=True,
        bytes=sum(a.size * a.dtype.itemsize for a in moved),
        arch=executors.architecture(),
    )
