"""What the convolution takes, and the checks that the scan and its step share."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from tjk import checks
from tjk.precision import accumulator


class Operands(NamedTuple):
    """The arrays of one convolution, or their gradients; those that are left out are None.

    Attributes:
        x: (B, L, D).
        weight: (D, W).
        bias: (D,).
        initial_state: (B, W - 1, D).
        runs: (B, L) int32, see `tjk.segments.runs`.
    """

    x: Array
    weight: Array
    bias: Array | None
    initial_state: Array | None
    runs: Array | None = None


def check(
    op: str,
    time: str,
    x: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None,
    state: tuple[str, ArrayLike | None],
    activation: str | None,
) -> Operands:
    """The operands as arrays, once shapes, dtypes and the activation are known to fit.

    Args:
        op: the public function's name.
        time: the letter of the time axis, "" where there is none.
        x, weight, bias, activation: what the caller passed.
        state: name and value of the argument that is a state.

    Raises:
        TypeError, ValueError: as the public functions say.
    """
    state_name, initial_state = state
    operands = Operands(x, weight, bias, initial_state)
    operands = Operands(*(a if a is None else jnp.asarray(a) for a in operands))
    x, weight = operands.x, operands.weight
    checks.check_shape(op, "x", x, f"B{time}D", {})
    sizes = {"B": x.shape[0], "D": x.shape[-1]}
    checks.check_shape(op, "weight", weight, "DW", sizes)
    width = weight.shape[1]
    if not 2 <= width <= 4:
        checks.fail_value(op, "weight must have shape (D, W) with W from 2 to 4", weight.shape)
    checks.check_dtype(op, "x", x, ("float32", "bfloat16", "float16", "float64"))
    exact = str(accumulator(x.dtype))
    wide = dict.fromkeys((str(x.dtype), exact))
    checks.check_dtype(op, "weight", weight, wide)
    if operands.bias is not None:
        checks.check_shape(op, "bias", operands.bias, "D", sizes)
        checks.check_dtype(op, "bias", operands.bias, wide)
    if operands.initial_state is not None:
        shape = (sizes["B"], width - 1, sizes["D"])
        if operands.initial_state.shape != shape:
            rule = f"{state_name} must have shape (B, W - 1, D) = {shape}"
            checks.fail_value(op, rule, operands.initial_state.shape)
        checks.check_dtype(op, state_name, operands.initial_state, (exact,))
    if activation not in (None, "silu"):
        checks.fail_value(op, "activation must be None or 'silu'", repr(activation))
    return operands
