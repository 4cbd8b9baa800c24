"""What the recurrence takes, and the checks that the scan and its step share."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from tjk import checks

_DTYPES = ("float32", "bfloat16", "float16", "complex64", "float64", "complex128")


class Operands(NamedTuple):
    """The arrays of one scan, or their gradients; those that are left out are None.

    Attributes:
        a: (B, L, D) or (D,).
        x: (B, L, D).
        initial_state: (B, D).
        runs: (B, L) int32, see `tjk.segments.runs`.
    """

    a: Array
    x: Array
    initial_state: Array | None
    runs: Array | None = None


def accumulator(dtype: DTypeLike) -> jnp.dtype:
    """What states are and sums: float32 for 16-bit numbers, else the dtype itself."""
    return jnp.dtype(jnp.float32 if jnp.dtype(dtype).itemsize == 2 else dtype)


def check(
    op: str, time: str, a: ArrayLike, x: ArrayLike, state: tuple[str, ArrayLike | None]
) -> Operands:
    """The operands as arrays, once shapes and dtypes are known to fit.

    Args:
        op: the public function's name.
        time: the letter of the time axis, "" where there is none.
        a, x: what the caller passed.
        state: name and value of the argument that is a state.

    Raises:
        TypeError, ValueError: as the public functions say.
    """
    name, initial_state = state
    a, x = jnp.asarray(a), jnp.asarray(x)
    checks.check_shape(op, "x", x, f"B{time}D", {})
    sizes = dict(zip(f"B{time}D", x.shape))
    checks.check_shape(op, "a", a, "D" if a.ndim == 1 else f"B{time}D", sizes)
    checks.check_dtype(op, "x", x, _DTYPES)
    exact = str(accumulator(x.dtype))
    checks.check_dtype(op, "a", a, dict.fromkeys((str(x.dtype), exact)))
    if initial_state is not None:
        initial_state = jnp.asarray(initial_state)
        checks.check_shape(op, name, initial_state, "BD", sizes)
        checks.check_dtype(op, name, initial_state, (exact,))
    return Operands(a, x, initial_state)
