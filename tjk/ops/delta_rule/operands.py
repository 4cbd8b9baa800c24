"""What the gated delta rule takes, and the checks that the scan and its step share."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from tjk import checks
from tjk.precision import accumulator


class Operands(NamedTuple):
    """The arrays of one scan, or their gradients; those that are left out are None.

    Attributes:
        q: (B, L, H, K).
        k: (B, L, H, K).
        v: (B, L, H, V).
        g: (B, L, H).
        beta: (B, L, H).
        initial_state: (B, H, K, V).
        runs: (B, L) int32, see `tjk.segments.runs`.
    """

    q: Array
    k: Array
    v: Array
    g: Array
    beta: Array
    initial_state: Array | None
    runs: Array | None = None


def check(
    op: str,
    time: str,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    g: ArrayLike,
    beta: ArrayLike,
    state: tuple[str, ArrayLike | None],
) -> Operands:
    """The operands as arrays, once shapes and dtypes are known to fit.

    Args:
        op: the public function's name.
        time: the letter of the time axis, "" where there is none.
        q, k, v, g, beta: what the caller passed.
        state: name and value of the argument that is a state.

    Raises:
        TypeError, ValueError: as the public functions say.
    """
    state_name, initial_state = state
    operands = Operands(q, k, v, g, beta, initial_state)
    operands = Operands(*(x if x is None else jnp.asarray(x) for x in operands))
    q, heads = operands.q, f"B{time}H"
    checks.check_shape(op, "q", q, heads + "K", {})
    sizes = dict(zip(heads + "K", q.shape))
    checks.check_shape(op, "k", operands.k, heads + "K", sizes)
    checks.check_shape(op, "v", operands.v, heads + "V", {axis: sizes[axis] for axis in heads})
    sizes["V"] = operands.v.shape[-1]
    if not (sizes["K"] and sizes["V"]):
        checks.fail_value(op, "widths K and V must be positive", f"K={sizes['K']}, V={sizes['V']}")
    checks.check_dtype(op, "q", q, ("float32", "bfloat16", "float16", "float64"))
    exact = str(accumulator(q.dtype))
    for name in ("k", "v"):
        checks.check_same_dtype(op, name, getattr(operands, name), "q", q)
    for name in ("g", "beta"):
        checks.check_shape(op, name, getattr(operands, name), heads, sizes)
        checks.check_dtype(op, name, getattr(operands, name), dict.fromkeys((str(q.dtype), exact)))
    if operands.initial_state is not None:
        checks.check_shape(op, state_name, operands.initial_state, "BHKV", sizes)
        checks.check_dtype(op, state_name, operands.initial_state, (exact,))
    return operands
