"""What operations need inside `jax.shard_map`, where the type of an array says how it varies."""

from typing import Any

import jax


def vary_together(*operands: Any) -> tuple[Any, ...]:
    """The operands, made to vary over all mesh axes over which one of them does; None stays.

    Branches and loops want one type for what they carry. Differentiated, this is the sum over the
    axes that an operand did not vary over: right for a gradient.
    """
    present = [x for x in operands if x is not None]
    axes = frozenset().union(*(_varying(x) for x in present))
    return tuple(
        x if x is None or axes == _varying(x) else _cast(x, axes - _varying(x)) for x in operands
    )


def _varying(x: Any) -> frozenset[Any]:
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def _cast(x: Any, axes: frozenset[Any]) -> Any:
    return jax.lax.pcast(x, tuple(axes), to="varying")
