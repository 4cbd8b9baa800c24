"""Tile sizes of the scan's kernels, by kind of products, width and architecture.

Each was found by compiling: the largest that spills no register and fits the shared memory of every
card it is meant for. None was measured.
"""

import dataclasses
from typing import Literal

from tjk.launch import Arch
from tjk.precision import Products

Kernel = Literal["states", "outputs", "d_C", "d_inputs"]


@dataclasses.dataclass(frozen=True)
class Tile:
    """Tokens of a program and of one step of its loop (for states: head width, tokens)."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# For widths, of heads and states, up to 64, 128 and 256.
_TILES: dict[tuple[Kernel, Products], tuple[Tile, Tile, Tile]] = {
    ("states", "16-bit"): (Tile(64, 32, 4, 2), Tile(64, 32, 4, 2), Tile(64, 32, 4, 2)),
    ("states", "tf32"): (Tile(64, 32, 4, 2), Tile(64, 32, 4, 2), Tile(64, 32, 4, 2)),
    ("states", "ieee"): (Tile(32, 32, 4, 1), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    ("outputs", "16-bit"): (Tile(64, 64, 4, 2), Tile(64, 64, 8, 2), Tile(64, 32, 8, 1)),
    ("outputs", "tf32"): (Tile(64, 64, 4, 2), Tile(64, 64, 8, 2), Tile(32, 16, 8, 1)),
    ("outputs", "ieee"): (Tile(32, 32, 8, 1), Tile(32, 32, 8, 1), Tile(16, 16, 8, 1)),
    ("d_C", "16-bit"): (Tile(64, 32, 8, 1), Tile(64, 64, 8, 1), Tile(16, 32, 8, 1)),
    ("d_C", "tf32"): (Tile(64, 64, 8, 1), Tile(64, 32, 8, 2), Tile(16, 16, 8, 1)),
    ("d_C", "ieee"): (Tile(32, 16, 8, 1), Tile(32, 16, 8, 1), Tile(16, 16, 8, 1)),
    ("d_inputs", "16-bit"): (Tile(64, 64, 8, 1), Tile(64, 64, 8, 1), Tile(32, 32, 8, 1)),
    ("d_inputs", "tf32"): (Tile(64, 64, 8, 1), Tile(64, 64, 8, 1), Tile(16, 16, 8, 1)),
    ("d_inputs", "ieee"): (Tile(32, 32, 8, 1), Tile(32, 32, 8, 1), Tile(16, 16, 8, 1)),
}

# A wavefront's 64 lanes share fewer registers.
_AMD: dict[tuple[Kernel, Products], Tile] = {
    ("d_C", "16-bit"): Tile(32, 32, 4, 1),
    ("d_C", "tf32"): Tile(32, 32, 4, 1),
    ("d_inputs", "tf32"): Tile(64, 32, 8, 1),
}


def choose(
    kernel: Kernel, products: Products, width: int, chunk_size: int, arch: Arch | None
) -> Tile:
    """The tile for the width P or R, whichever is larger; no longer than a chunk."""
    tile = _TILES[kernel, products][(width > 64) + (width > 128)]
    if isinstance(arch, str) and width <= 128:
        tile = _AMD.get((kernel, products), tile)
    block_m = tile.block_m if kernel == "states" else min(tile.block_m, chunk_size)
    return dataclasses.replace(tile, block_m=block_m, block_n=min(tile.block_n, chunk_size))
