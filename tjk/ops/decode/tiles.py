"""Tiles of the decoding kernels, and in how many parts a cache is read.

Each tile was found by compiling: it spills no register on any architecture. None was measured.
"""

import dataclasses

from tjk.executors.architectures import SHARED_MEMORY
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
    """The tile for widths H and V and so many rows, T N / K."""
    parts = [split_width(width) for width in widths]
    # Larger accumulators spill, and 64 rows of TF32 products make sm_90 copy single words.
    most = 16 if products == "ieee" else 32
    if products == "16-bit" and max(map(sum, parts)) <= 128:
        most = 64
    block_m = min(max(16, 1 << (rows - 1).bit_length()), most)
    # Bytes of keys and values in a step. Three stages hold two steps in shared memory, and a second
    # program must fit beside them.
    is_large = SHARED_MEMORY.get(arch, 0) >= 2**17 and products != "ieee"
    step = 2**15 if is_large else 2**14
    row = sum(map(sum, parts)) * (2 if products == "16-bit" else 4)
    block_n = max(16, min(1 << (step // row).bit_length() - 1, 128))
    return Tile(block_m, block_n, 4, 2 if isinstance(arch, str) else 3)


def choose_splits(programs: int, tiles: int, multiprocessors: int) -> int:
    """In how many parts each of `programs` goes through its `tiles` of keys.

    Two programs for each multiprocessor: one computes while the other waits for its copies, and
    more would only add parts to combine.
    """
    return max(1, min(-(-2 * multiprocessors // max(programs, 1)), tiles))
