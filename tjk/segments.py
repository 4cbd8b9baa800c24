"""Several sequences packed into one: where along time a state starts anew."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from tjk import checks


def runs(
    op: str, segment_ids: ArrayLike | None, shape: tuple[int, int], reverse: bool
) -> Array | None:
    """How often the id has changed up to each position, in the order of the scan.

    0 from where the scan starts up to the first change, and so on: positions with equal numbers
    belong to one segment, even where an id comes back after another one.

    Args:
        op: the public function's name.
        segment_ids: (B, L) of an integer dtype, or None.
        shape: (B, L).
        reverse: whether the scan runs from the last position to the first.

    Returns:
        (B, L) int32, or None.

    Raises:
        TypeError: segment_ids are no integers.
        ValueError: they have another shape.
    """
    if segment_ids is None:
        return None
    segment_ids = jnp.asarray(segment_ids)
    if not jnp.issubdtype(segment_ids.dtype, jnp.integer):
        raise TypeError(f"{op}: segment_ids must be integers, got {segment_ids.dtype}")
    checks.check_shape(op, "segment_ids", segment_ids, "BL", dict(zip("BL", shape)))
    changes = resets(segment_ids, reverse).astype(jnp.int32)
    return jax.lax.cumsum(changes, axis=1, reverse=reverse)


def resets(segment_ids: Array, reverse: bool) -> Array:
    """Whether each position is the first of a segment, (B, L) bool.

    Not the position where the scan starts: there the initial state enters.
    """
    changed = segment_ids[:, 1:] != segment_ids[:, :-1]
    start = jnp.zeros_like(segment_ids[:, :1], bool)
    return jnp.concatenate((changed, start) if reverse else (start, changed), axis=1)
