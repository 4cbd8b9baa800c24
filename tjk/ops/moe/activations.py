"""The activation functions of the expert layer."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": lambda x: jnp.maximum(x, jnp.zeros((), x.dtype)),
}
