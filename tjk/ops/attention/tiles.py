"""Tile sizes of the attention kernels, by kernel, kind of products, width and architecture.

Each was found by compiling: the largest tile that fits the shared memory of every card it is meant
for and spills no register in its loop (but up to 64 bytes a thread between 129 and 192 columns,
where nothing smaller spills less). None was measured.
"""

import dataclasses
from typing import Literal

from tjk.launch import Arch
from tjk.precision import Products

Kernel = Literal["forward", "backward", "backward_key_value", "backward_query"]


@dataclasses.dataclass(frozen=True)
class Tile:
    """Queries and keys of one step of a program, its warps, and its pipeline's depth."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# For widths of, in this order: one part up to 64, two parts up to 96, one of 128, two up to 192,
# one of 256. Two parts take more registers than their sum says.
_TILES: dict[tuple[Kernel, Products], tuple[Tile, ...]] = {
    ("forward", "16-bit"): (
        Tile(128, 64, 4, 3),
        Tile(128, 32, 8, 2),
        Tile(128, 64, 8, 2),
        Tile(64, 32, 4, 1),
        Tile(64, 32, 8, 1),
    ),
    ("forward", "tf32"): (
        Tile(64, 64, 4, 2),
        Tile(64, 32, 4, 2),
        Tile(128, 32, 8, 2),
        Tile(64, 32, 8, 1),
        Tile(32, 32, 4, 1),
    ),
    ("forward", "ieee"): (
        Tile(32, 32, 4, 2),
        Tile(16, 16, 4, 1),
        Tile(16, 32, 4, 1),
        Tile(16, 16, 4, 1),
        Tile(32, 32, 4, 1),
    ),
    ("backward", "16-bit"): (
        Tile(32, 64, 4, 2),
        Tile(16, 32, 4, 2),
        Tile(32, 64, 8, 2),
        Tile(16, 32, 4, 1),
        Tile(32, 32, 8, 1),
    ),
    ("backward", "tf32"): (
        Tile(32, 64, 4, 2),
        Tile(16, 32, 4, 1),
        Tile(16, 32, 4, 1),
        Tile(16, 16, 8, 1),
        Tile(16, 16, 4, 1),
    ),
    ("backward", "ieee"): (
        Tile(16, 16, 4, 1),
        Tile(16, 16, 4, 1),
        Tile(16, 16, 4, 1),
        Tile(16, 16, 8, 1),
        Tile(16, 16, 8, 1),
    ),
    ("backward_key_value", "16-bit"): (
        Tile(32, 64, 4, 1),
        Tile(16, 32, 8, 1),
        Tile(32, 64, 4, 1),
        Tile(16, 32, 4, 1),
        Tile(32, 32, 8, 1),
    ),
    ("backward_key_value", "tf32"): (
        Tile(32, 64, 4, 1),
        Tile(16, 32, 4, 1),
        Tile(16, 32, 4, 1),
        Tile(16, 16, 8, 1),
        Tile(16, 16, 4, 1),
    ),
    ("backward_key_value", "ieee"): (
        Tile(16, 32, 4, 1),
        Tile(16, 16, 4, 1),
        Tile(16, 32, 4, 1),
        Tile(16, 16, 8, 1),
        Tile(16, 16, 8, 1),
    ),
    ("backward_query", "16-bit"): (
        Tile(64, 32, 4, 2),
        Tile(64, 32, 4, 1),
        Tile(64, 32, 4, 2),
        Tile(32, 16, 4, 1),
        Tile(32, 32, 4, 2),
    ),
    ("backward_query", "tf32"): (
        Tile(64, 32, 4, 1),
        Tile(32, 32, 4, 2),
        Tile(64, 32, 8, 1),
        Tile(16, 16, 8, 1),
        Tile(32, 16, 4, 1),
    ),
    ("backward_query", "ieee"): (
        Tile(32, 32, 4, 2),
        Tile(16, 16, 4, 1),
        Tile(16, 16, 8, 1),
        Tile(16, 16, 4, 1),
        Tile(16, 32, 4, 1),
    ),
}

# Where a family of cards differs, by position in the rows above.
_AMPERE_80: dict[tuple[Kernel, Products], dict[int, Tile]] = {
    ("backward", "tf32"): {0: Tile(32, 64, 4, 1)},
}
# Products of 64 rows and more run asynchronously, and TF32 ones want their right operand's rows
# along the sum, for which a pipelined load would copy single words.
_HOPPER: dict[tuple[Kernel, Products], dict[int, Tile]] = {
    ("forward", "tf32"): {0: Tile(64, 64, 4, 1)},
    ("backward", "16-bit"): {0: Tile(64, 64, 4, 2)},
    ("backward_key_value", "tf32"): {0: Tile(32, 64, 4, 2)},
    ("backward_query", "16-bit"): {0: Tile(64, 64, 4, 2)},
    ("backward_query", "tf32"): {0: Tile(64, 64, 4, 2)},
}
# A wavefront has 64 lanes, and shared memory 64 KiB.
_AMD: dict[tuple[Kernel, Products], dict[int, Tile]] = {
    ("forward", "16-bit"): {4: Tile(64, 32, 4, 1)},
    ("forward", "tf32"): {
        1: Tile(64, 32, 4, 1),
        2: Tile(64, 32, 4, 1),
        3: Tile(32, 32, 4, 1),
    },
    ("backward", "16-bit"): {
        2: Tile(32, 32, 4, 2),
        3: Tile(16, 16, 4, 1),
        4: Tile(16, 32, 8, 1),
    },
    ("backward", "tf32"): {3: Tile(16, 16, 4, 1)},
    ("backward_key_value", "16-bit"): {1: Tile(16, 32, 4, 1), 4: Tile(32, 32, 4, 1)},
    ("backward_key_value", "tf32"): {3: Tile(16, 16, 4, 1)},
    ("backward_query", "16-bit"): {3: Tile(32, 32, 4, 2)},
    ("backward_query", "tf32"): {
        1: Tile(32, 32, 4, 1),
        2: Tile(32, 32, 4, 1),
        3: Tile(32, 16, 4, 1),
    },
}

# Below this many programs a card has idle multiprocessors, and smaller tiles fill more of them.
_FEW_PROGRAMS = 128


def split_width(width: int) -> tuple[int, int]:
    """Two powers of two, of which the second may be 0, that cover a row with little padding.

    >>> split_width(80), split_width(96), split_width(128)
    ((64, 16), (64, 32), (128, 0))
    """
    whole = max(16, 1 << (width - 1).bit_length())
    half = whole // 2
    rest = max(16, 1 << (width - half - 1).bit_length())
    return (half, rest) if rest < half else (whole, 0)


def tile(kernel: Kernel, products: Products, widths: tuple[int, int], arch: Arch | None) -> Tile:
    """The tile for widths H and V. A pure function, so that equal problems share a compilation."""
    row = max(_row(*split_width(width)) for width in widths)
    if isinstance(arch, str):
        family = _AMD
    elif arch == 80:
        family = _AMPERE_80
    else:
        family = _HOPPER if arch is not None and 90 <= arch < 120 else {}
    return family.get((kernel, products), {}).get(row, _TILES[kernel, products][row])


def forward_tile(
    products: Products, widths: tuple[int, int], arch: Arch | None, heads: int, length: int
) -> Tile:
    """The forward's tile, of half as many queries where `heads` (of all batches) are few."""
    whole = tile("forward", products, widths, arch)
    if whole.block_m < 128 or heads * -(-length // whole.block_m) >= _FEW_PROGRAMS:
        return whole
    return dataclasses.replace(whole, block_m=64, num_warps=4)


def hooked_tile(kernel: Kernel, products: Products, whole: Tile, *, has_score: bool) -> Tile:
    """A tile for a kernel with hooks compiled in, which keeps more in registers.

    Args:
        kernel: which one.
        products: what the tensor cores multiply.
        whole: the tile without hooks.
        has_score: whether there is a score, with its derivative in the backward pass.
    """
    if kernel == "forward":
        stages = min(2, whole.num_stages) if has_score else whole.num_stages
        warps = 8 if whole.block_m == 128 else whole.num_warps
        return dataclasses.replace(whole, num_warps=warps, num_stages=stages)
    if has_score and products == "tf32":
        return dataclasses.replace(whole, block_n=max(16, whole.block_n // 2))
    return dataclasses.replace(whole, block_m=min(32, whole.block_m)) if has_score else whole


def _row(part_0: int, part_1: int) -> int:
    if part_1:
        return 1 if part_0 + part_1 <= 96 else 3
    return {128: 2, 256: 4}.get(part_0, 0)
