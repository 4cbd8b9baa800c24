"""What every implementation of the selective scan takes, and its checks."""

from typing import NamedTuple

from jax import Array

from tjk import checks
from tjk.precision import accumulator

# Steps between the states that the forward pass keeps for the backward pass.
SPACING = 256


class Operands(NamedTuple):
    """The differentiable arguments of `selective_scan`, or their gradients.

    Those of `selective_scan_step` have no axis L. "Wide" dtypes are x's and float32 (float64 where
    x is float64).

    Attributes:
        x: (B, L, D).
        delta: (B, L, D), wide.
        A: (D, R), wide.
        B: (B, L, R) in x's dtype.
        C: (B, L, R) in x's dtype.
        D: (D,), wide, or None.
        z: (B, L, D) in x's dtype, or None.
        delta_bias: (D,), wide, or None.
        state: (B, D, R) float32 (float64), what the scan starts from, or None.
    """

    x: Array
    delta: Array
    A: Array
    B: Array
    C: Array
    D: Array | None
    z: Array | None
    delta_bias: Array | None
    state: Array | None


def check(op: str, operands: Operands, time: str, state: str) -> None:
    """Raises TypeError or ValueError unless the operands fit together.

    Args:
        op: the public function's name.
        operands: arrays.
        time: "L", or "" where there is no axis of time.
        state: what the public function calls the state.
    """
    rows = f"B{time}D"
    checks.check_shape(op, "x", operands.x, rows, {})
    checks.check_shape(op, "A", operands.A, "DR", {"D": operands.x.shape[-1]})
    sizes = dict(zip(rows, operands.x.shape)) | {"R": operands.A.shape[1]}
    if not 1 <= sizes["R"] <= 256:
        checks.fail_value(op, "A must have shape (D, R) with R from 1 to 256", operands.A.shape)
    checks.check_dtype(op, "x", operands.x, ("float32", "bfloat16", "float16", "float64"))
    exact = str(accumulator(operands.x.dtype))
    own, wide = (str(operands.x.dtype),), dict.fromkeys((str(operands.x.dtype), exact))
    for name, x, axes, dtypes in (
        ("delta", operands.delta, rows, wide),
        ("A", operands.A, "DR", wide),
        ("B", operands.B, f"B{time}R", own),
        ("C", operands.C, f"B{time}R", own),
        ("D", operands.D, "D", wide),
        ("z", operands.z, rows, own),
        ("delta_bias", operands.delta_bias, "D", wide),
        (state, operands.state, "BDR", (exact,)),
    ):
        if x is not None:
            checks.check_shape(op, name, x, axes, sizes)
            checks.check_dtype(op, name, x, dtypes)
