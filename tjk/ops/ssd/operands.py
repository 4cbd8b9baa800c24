"""What the scan's implementations take and keep, and the checks that all entries share."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from tjk import checks

_DTYPES = ("float32", "bfloat16", "float16", "float64")


class Operands(NamedTuple):
    """The arrays of one scan; those that the caller leaves out are None.

    Attributes:
        x: (B, L, H, P).
        dt: (B, L, H).
        A: (H,).
        B: (B, L, G, R).
        C: (B, L, G, R).
        D: (H,).
        z: (B, L, H, P).
        dt_bias: (H,).
        initial_state: (B, H, P, R).
        runs: (B, L) int32, see `tjk.segments.runs`.
    """

    x: Array
    dt: Array
    A: Array
    B: Array
    C: Array
    D: Array | None = None
    z: Array | None = None
    dt_bias: Array | None = None
    initial_state: Array | None = None
    runs: Array | None = None


def check(
    op: str,
    time: str,
    x: ArrayLike,
    dt: ArrayLike,
    A: ArrayLike,
    B: ArrayLike,
    C: ArrayLike,
    D: ArrayLike | None,
    z: ArrayLike | None,
    dt_bias: ArrayLike | None,
    state: ArrayLike | None,
) -> Operands:
    """The operands as arrays, once shapes and dtypes are known to fit.

    Args:
        op: the public function's name.
        time: the letter of the time axis, "" where there is none.
        x, dt, A, B, C, D, z, dt_bias: what the caller passed.
        state: the initial state, by that name in messages if there is a time axis.

    Raises:
        TypeError, ValueError: as the public functions say.
    """
    given = Operands(x, dt, A, B, C, D, z, dt_bias, state)
    given = Operands(*(a if a is None else jnp.asarray(a) for a in given))
    state_name = "initial_state" if time else "state"
    checks.check_shape(op, "x", given.x, f"B{time}HP", {})
    sizes = dict(zip(f"B{time}HP", given.x.shape))
    checks.check_shape(op, "B", given.B, f"B{time}GR", sizes)
    G, R = given.B.shape[-2:]
    if G == 0 or sizes["H"] % G:
        checks.fail_value(op, f"B's groups must divide the {sizes['H']} heads of x", f"G={G}")
    sizes |= {"G": G, "R": R}
    axes = {"dt": f"B{time}H", "A": "H", "C": f"B{time}GR", "D": "H", "z": f"B{time}HP"}
    axes |= {"dt_bias": "H"}
    for name, letters in axes.items():
        if (array := getattr(given, name)) is not None:
            checks.check_shape(op, name, array, letters, sizes)
    if given.initial_state is not None:
        checks.check_shape(op, state_name, given.initial_state, "BHPR", sizes)

    checks.check_dtype(op, "x", given.x, _DTYPES)
    exact = "float64" if given.x.dtype == jnp.float64 else "float32"
    for name in ("B", "C", "z"):
        if (array := getattr(given, name)) is not None:
            checks.check_same_dtype(op, name, array, "x", given.x)
    checks.check_dtype(op, "dt", given.dt, dict.fromkeys((str(given.x.dtype), exact)))
    for name, array in (
        *((name, getattr(given, name)) for name in ("A", "D", "dt_bias")),
        (state_name, given.initial_state),
    ):
        if array is not None:
            checks.check_dtype(op, name, array, (exact,))
    return given
