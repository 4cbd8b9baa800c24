"""What attention takes: arrays, and what is fixed while a program is traced."""

import dataclasses
from typing import NamedTuple

from jax import Array

from tjk.choice import Implementation
from tjk.elementwise import Program


class Operands(NamedTuple):
    """The arrays of one call, or their gradients; those that are left out are None.

    Attributes:
        query: (B, T, N, H).
        key: (B, S, K, H).
        value: (B, S, K, V).
        bias: added to the scaled products, (B, N, T, S) with each axis full or 1.
        mask: bool, as bias.
        query_lengths: (B,) int32.
        key_lengths: (B,) int32.
        sinks: (N,) float32.
        kinds: of tiles, see `tjk.ops.masks.BlockMask`: what is empty need not be visited, and in
            what is full the mask of `Modifiers` need not be asked.
        score_arrays, mask_arrays, keep_arrays: what the programs of `Modifiers` read.
    """

    query: Array
    key: Array
    value: Array
    bias: Array | None = None
    mask: Array | None = None
    query_lengths: Array | None = None
    key_lengths: Array | None = None
    sinks: Array | None = None
    kinds: Array | None = None
    score_arrays: tuple[Array, ...] = ()
    mask_arrays: tuple[Array, ...] = ()
    keep_arrays: tuple[Array, ...] = ()


@dataclasses.dataclass(frozen=True)
class Modifiers:
    """What is done to each logit and weight: programs of (score,) b, h, q_idx, kv_idx.

    Attributes:
        score: the logit, of the scaled product plus bias.
        mask: whether the key is visible.
        keep: whether the weight is kept: dropout.
        keep_scale: what kept weights are multiplied by.
    """

    score: Program | None = None
    mask: Program | None = None
    keep: Program | None = None
    keep_scale: float = 1.0


@dataclasses.dataclass(frozen=True)
class Options:
    """What is fixed while a program is traced."""

    implementation: Implementation
    scale: float
    window: tuple[int | None, int | None] = (None, None)
    precision: str = "default"
    deterministic: bool = False
    modifiers: Modifiers = Modifiers()
