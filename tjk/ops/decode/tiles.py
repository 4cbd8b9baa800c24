"""Tiles of the decoding kernels, and in how many parts a cache is read.

Each tile was found by compiling: it spills no register on any architecture. None was measured.
"""

import dataclasses

from tjk.launch import Arch
from tjk.ops.attention.tiles import split_width
from tjk.precision import Products


@dataclasses.dataclass(frozen=True)
class Tile:
    """Rows (queries of one key head) and keys of a program's step, its warps and pipeline."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def tile(products: Products, widths: tuple[int, int], rows: int, arch: Arch | None) -> Tile:
    """The tile for widths H and V and so many rows: T N / K."""
    block_m = min(max(16, 1 << (rows - 1).bit_length()), 64)
    width = max(sum(split_width(width)) for width in widths)
    return Tile(block_m, 64 if width <= 128 else 32, 4, 3)


def choose_splits(programs: int, tiles: int, multiprocessors: int) -> int:
    """In how many parts each of `programs` goes through its `tiles` of keys.

    Two programs for each multiprocessor are enough to read as fast as the memory can; more would
    only add parts to combine.
    """
    return max(1, min(-(-2 * multiprocessors // max(programs, 1)), tiles))
