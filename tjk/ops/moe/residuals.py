"""What the expert layer's forward pass keeps for its backward pass, in every implementation."""

from typing import NamedTuple

from jax import Array


class Residuals(NamedTuple):
    """The pre-activations, (M k, F) in x's dtype, rows sorted by expert; and the routing.

    Attributes:
        gate: x w_gate.
        up: x w_up.
        order: (M k,) int32: slot of each row.
        position: (M k,) int32: row of each slot.
        group_sizes: (E,) int32: rows of each expert.
    """

    gate: Array
    up: Array
    order: Array
    position: Array
    group_sizes: Array
