"""Tile sizes of the grouped products, by kernel, kind of products and rows in a group.

Each was found by compiling: it spills no register on any architecture, in float32 and in 16 bits,
and loads 128 bits at a time where the widths allow it. None was measured.
"""

import dataclasses
from typing import Literal

from tjk import executors
from tjk.precision import Products

Kernel = Literal["matmul", "gate_up", "d_hidden", "d_input", "outer"]


@dataclasses.dataclass(frozen=True)
class Tile:
    """Sizes of one step of a program, its warps, its pipeline's depth, and programs at a time.

    A product of rows makes block_m rows and block_n columns, block_k terms a step. A contraction
    over rows ("outer") makes block_k times block_n elements, block_m rows a step.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    resident: int = 3  # programs that a multiprocessor holds at a time


# By kernel and kind of products, for blocks of 64, 32 and 16 rows.
_TILES: dict[tuple[Kernel, Products], tuple[Tile, ...]] = {
    ("matmul", "16-bit"): (
        Tile(64, 128, 32, 4, 3),
        Tile(32, 128, 32, 4, 3),
        Tile(16, 128, 32, 4, 3),
    ),
    ("matmul", "tf32"): (
        Tile(64, 128, 32, 4, 2, resident=2),
        Tile(32, 128, 32, 4, 2),
        Tile(16, 128, 32, 4, 2),
    ),
    ("gate_up", "16-bit"): (
        Tile(64, 64, 32, 4, 3),
        Tile(32, 64, 32, 4, 3),
        Tile(16, 64, 32, 4, 3),
    ),
    ("gate_up", "tf32"): (
        Tile(64, 64, 32, 4, 2),
        Tile(32, 64, 32, 4, 2),
        Tile(16, 64, 32, 4, 2),
    ),
    ("d_hidden", "16-bit"): (
        Tile(64, 64, 32, 4, 3),
        Tile(32, 64, 32, 4, 3),
        Tile(16, 64, 32, 4, 3),
    ),
    ("d_hidden", "tf32"): (
        Tile(64, 64, 32, 4, 2, resident=2),
        Tile(32, 64, 32, 4, 2),
        Tile(16, 64, 32, 4, 2),
    ),
    ("d_input", "16-bit"): (
        Tile(64, 128, 32, 4, 3),
        Tile(32, 128, 32, 4, 3),
        Tile(16, 64, 32, 4, 3),
    ),
    ("d_input", "tf32"): (
        Tile(64, 128, 32, 4, 2, resident=2),
        Tile(32, 128, 32, 4, 2),
        Tile(16, 64, 32, 4, 2),
    ),
}
# Full float32 has no tensor cores: small tiles, whose accumulators leave registers for the rest.
_IEEE = (Tile(32, 64, 32, 4, 2), Tile(16, 64, 32, 4, 2))
_IEEE_GATE_UP = (Tile(32, 32, 32, 4, 2), Tile(16, 32, 32, 4, 2))  # which has two accumulators
_OUTER: dict[Products, Tile] = {
    "16-bit": Tile(32, 128, 128, 8, 3),
    "tf32": Tile(32, 128, 128, 8, 2),
    "ieee": Tile(32, 64, 64, 8, 2),
}


def rows_tile(kernel: Kernel, products: Products, rows: int, groups: int, columns: int) -> Tile:
    """The tile for a product of `rows` rows in `groups` groups with matrices of so many columns.

    A group of any size pads half a tile on average: tiles are as high as leaves that within an
    eighth of the rows.
    """
    highest = rows // max(1, 4 * groups)
    if products == "ieee":
        tiles = _IEEE_GATE_UP if kernel == "gate_up" else _IEEE
    else:
        tiles = _TILES[kernel, products]
    chosen = next((tile for tile in tiles if tile.block_m <= highest), tiles[-1])
    return dataclasses.replace(chosen, block_n=_fitting(chosen.block_n, columns))


def outer_tile(products: Products, K: int, N: int) -> Tile:
    """The tile for a contraction that makes matrices (K, N)."""
    tile = _OUTER[products]
    return dataclasses.replace(
        tile, block_k=_fitting(tile.block_k, K), block_n=_fitting(tile.block_n, N)
    )


def _fitting(block: int, size: int) -> int:
    """The block, or the power of two that covers a smaller size; products need 16."""
    return min(block, max(16, 1 << (size - 1).bit_length()))


def programs(tile: Tile, rows: int, groups: int, columns: int) -> int:
    """How many programs share the tiles of a persistent kernel: what the card holds at a time."""
    tiles = (-(-rows // tile.block_m) + groups) * -(-columns // tile.block_n)
    return min(tiles, tile.resident * executors.multiprocessors())


def splits(tile: Tile, rows: int, groups: int, K: int, N: int) -> int:
    """In how many parts a group's rows are contracted, so that there is work for the whole card.

    Parts cost a pass over their sums: there are more than one only while there is less than one
    program for each place on the card, and none has less than eight steps.
    """
    tiles = groups * -(-K // tile.block_k) * -(-N // tile.block_n)
    places = 2 * executors.multiprocessors()
    steps = rows // max(1, groups * tile.block_m)
    return max(1, min(places // max(1, tiles), steps // 8, 16))
