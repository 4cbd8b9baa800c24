"""Which operands the gated delta rule takes: what the scan and its step check alike."""

import jax.numpy as jnp
from jax import Array

from tjk import checks

_DTYPES = ("float32", "bfloat16", "float16", "float64")


def check_operands(
    op: str,
    time: str,
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    state: tuple[str, Array | None],
) -> None:
    """Raises TypeError or ValueError unless shapes and dtypes fit one another.

    Args:
        op: the public function's name.
        time: the letter of the time axis, "L" or nothing.
        q, k, v, g, beta: its arguments.
        state: name and value of the argument that holds a state.
    """
    heads = f"B{time}H"
    checks.check_shape(op, "q", q, heads + "K", {})
    sizes = dict(zip(heads + "K", q.shape))
    checks.check_shape(op, "k", k, heads + "K", sizes)
    checks.check_shape(op, "v", v, heads + "V", {axis: sizes[axis] for axis in heads})
    sizes["V"] = v.shape[-1]
    if not (sizes["K"] and sizes["V"]):
        checks.fail_value(op, "widths K and V must be positive", f"K={sizes['K']}, V={sizes['V']}")
    checks.check_dtype(op, "q", q, _DTYPES)
    exact = str(state_dtype(q.dtype))
    for name, x in (("k", k), ("v", v)):
        checks.check_same_dtype(op, name, x, "q", q)
    for name, x in (("g", g), ("beta", beta)):
        checks.check_shape(op, name, x, heads, sizes)
        checks.check_dtype(op, name, x, dict.fromkeys((str(q.dtype), exact)))
    name, array = state
    if array is not None:
        checks.check_shape(op, name, array, "BHKV", sizes)
        checks.check_dtype(op, name, array, (exact,))


def state_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """What states, decays and sums have: float32, but float64 for float64."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)
