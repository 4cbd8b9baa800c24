"""What sorting slots by expert gives, in every implementation."""

from typing import NamedTuple

from jax import Array


class ExpertOrder(NamedTuple):
    """Slots (token m's j-th expert is slot m k + j) sorted by expert, stably; all int32.

    Attributes:
        order: (M k,): the slot of each row. Rows of an expert outside [0, E) come last.
        position: (M k,): the row of each slot, order's inverse.
        group_sizes: (E,): how many rows each expert has.
    """

    order: Array
    position: Array
    group_sizes: Array
