"""How precise matrix products are: from the public argument to what the tensor cores multiply."""

from typing import Any, Literal

import jax
import jax.numpy as jnp

from tjk.checks import fail_value
from tjk.launch import Arch

Precision = jax.lax.Precision | str | None
Products = Literal["16-bit", "tf32", "ieee"]

_NAMES = {"bfloat16": "default", "fastest": "default", "tensorfloat32": "high"} | {
    "bfloat16_3x": "high",
    "float32": "highest",
}


def resolve(op: str, precision: Precision) -> str:
    """One of "default", "high" and "highest"; None is what JAX is configured to.

    Raises:
        ValueError: for anything else.
    """
    if precision is None:
        precision = jax.config.jax_default_matmul_precision or "default"
    name = precision.name if isinstance(precision, jax.lax.Precision) else str(precision)
    name = _NAMES.get(name.lower(), name.lower())
    if name not in ("default", "high", "highest"):
        rule = "precision must be None, 'default', 'high', 'highest' or a jax.lax.Precision"
        fail_value(op, rule, repr(precision))
    return name


def products(dtype: Any, precision: str, arch: Arch | None) -> Products:
    """What the tensor cores multiply; gfx950 has no TF32."""
    if dtype != jnp.float32:
        return "16-bit"
    return "ieee" if precision == "highest" or arch == "gfx950" else "tf32"


def input_precision(kind: Products) -> str:
    """Triton's name for it, which it asks for in products of 16-bit operands, too."""
    return "tf32" if kind == "tf32" else "ieee"


def accumulator(dtype: Any) -> jnp.dtype:
    """What sums and states of real numbers are: float32, or float64 for float64."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)
