"""Wording of the errors that public functions raise for bad arguments: name, rule, value."""

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import jax.numpy as jnp


def fail_value(op: str, rule: str, got: object) -> NoReturn:
    """Raises ValueError: `op: rule, got value`."""
    raise ValueError(f"{op}: {rule}, got {got}")


def check_dtype(op: str, name: str, x: Any, allowed: Iterable[str]) -> None:
    """Raises TypeError unless x has one of the allowed dtypes."""
    allowed = tuple(allowed)
    if str(x.dtype) not in allowed:
        names = " or ".join(allowed)
        raise TypeError(f"{op}: {name} must have dtype {names}, got {x.dtype}")


def check_same_dtype(op: str, name: str, x: Any, other_name: str, other: Any) -> None:
    """Raises TypeError unless both have one dtype."""
    if x.dtype != other.dtype:
        raise TypeError(
            f"{op}: {name} must have the dtype of {other_name} ({other.dtype}), got {x.dtype}"
        )


def check_shape(op: str, name: str, x: Any, axes: str, sizes: Mapping[str, int]) -> None:
    """Raises ValueError unless x has the axes named, one letter each, with the sizes given.

    Args:
        op: the public function's name.
        name: the argument's name.
        x: the argument.
        axes: one letter an axis, such as "BSKH".
        sizes: size of the axes that are fixed; the others are free.
    """
    fits = jnp.ndim(x) == len(axes) and all(
        sizes.get(axis, size) == size for axis, size in zip(axes, jnp.shape(x))
    )
    if not fits:
        known = ", ".join(f"{axis}={sizes[axis]}" for axis in axes if axis in sizes)
        shape = f"({', '.join(axes)}{',' if len(axes) == 1 else ''})"
        rule = f"{name} must have shape {shape}" + (f" with {known}" if known else "")
        fail_value(op, rule, jnp.shape(x))
