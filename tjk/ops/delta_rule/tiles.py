"""Tiles of the delta rule's kernels, and the parts that time is cut into.

Each was found by compiling at the width 32, where none spills a register; wider ones were compiled
before the last changes to the kernels, and float32 spilled. None was measured.
"""

from tjk.executors import multiprocessors

WARPS = 4  # each has 16 rows of a chunk of 64
_PROGRAMS = 4  # on a multiprocessor, two at a time: the last ones leave less of the card idle


def block(width: int) -> int:
    """The power of two that covers a width; products need 16."""
    return max(16, 1 << (width - 1).bit_length())


def columns(K: int, width: int) -> int:
    """How many of so many columns of a state a program carries, beside keys K wide."""
    return min(block(K), block(width), 32 if block(K) <= 64 else 16)


def parts(sequences: int, chunks: int) -> int:
    """In how many parts time is cut, for so many programs that go through it chunk by chunk.

    1 while they fill the card: parts cost a pass over all chunks more.
    """
    wanted = -(-_PROGRAMS * multiprocessors() // sequences)
    if 2 * wanted <= _PROGRAMS:
        return 1
    return -(-chunks // max(1, chunks // wanted))
