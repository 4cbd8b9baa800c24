"""What all public functions of attention check alike, and which implementation they choose."""

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from tjk import checks, choice
from tjk.choice import Implementation

DTYPES = ("float32", "bfloat16", "float16")


def check_arrays(
    op: str, query: ArrayLike, key: ArrayLike, value: ArrayLike, implementation: Implementation
) -> tuple[Array, Array, Array, bool]:
    """Query, key and value with a batch axis, and whether the caller gave one.

    Raises:
        TypeError, ValueError: as the public functions say.
    """
    query, key, value = jnp.asarray(query), jnp.asarray(key), jnp.asarray(value)
    if query.ndim not in (3, 4):
        checks.fail_value(op, "query must have shape (B, T, N, H) or (T, N, H)", query.shape)
    batched = query.ndim == 4
    lead = "B" if batched else ""
    sizes = {"H": query.shape[-1]} | ({"B": query.shape[0]} if batched else {})
    checks.check_shape(op, "key", key, lead + "SKH", sizes)
    S, K, _ = key.shape[-3:]
    checks.check_shape(op, "value", value, lead + "SKV", sizes | {"S": S, "K": K})
    choice.check_implementation(op, implementation)
    allowed = DTYPES if implementation == "triton" else (*DTYPES, "float64")
    checks.check_dtype(op, "query", query, allowed)
    checks.check_same_dtype(op, "key", key, "query", query)
    checks.check_same_dtype(op, "value", value, "query", query)
    if not batched:
        query, key, value = query[None], key[None], value[None]
    *_, N, H = query.shape
    if 0 in (N, K, H, value.shape[-1]) or N % K:
        rule = "query's heads N must be a positive multiple of key's heads K, and widths positive"
        checks.fail_value(op, rule, f"N={N}, K={K}, H={H}, V={value.shape[-1]}")
    return query, key, value, batched


def choose(
    op: str, implementation: Implementation, query: Array, value: Array, **lacks: bool
) -> Implementation:
    """Turns None into "xla" where the kernels lack something, and "triton" into an error there.

    Args:
        op: the public function's name.
        implementation: what the caller asked for.
        query, value: its arguments.
        lacks: whether the call wants what the kernels have not, by name.
    """
    width = max(query.shape[-1], value.shape[-1])
    lacks |= {f"a width above 256 ({width})": width > 256, "float64": query.dtype == jnp.float64}
    missing = [name for name, is_used in lacks.items() if is_used]
    if implementation == "triton" and missing:
        raise NotImplementedError(
            f"{op}: implementation='triton' does not take {' or '.join(missing)}; "
            "use implementation='xla' or None"
        )
    return "xla" if missing else implementation
