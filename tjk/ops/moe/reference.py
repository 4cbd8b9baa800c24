"""The expert layer by its definition: the oracle of the tests, never a default.

y[m] = sum over j of weights[m, j] E_{experts[m, j]}(x[m])
E_e(x) = (a(x w_gate[e]) * (x w_up[e])) w_down[e]
"""

import jax
import jax.numpy as jnp
from jax import Array

from tjk.ops.moe.activations import ACTIVATIONS


def moe_mlp(
    x: Array,
    w_gate: Array,
    w_up: Array,
    w_down: Array,
    weights: Array,
    experts: Array,
    *,
    activation: str = "silu",
) -> Array:
    """Every expert on every token, of which each token takes its own; in x's dtype.

    x (M, D), w_gate and w_up (E, D, F), w_down (E, F, D), weights and experts (M, k) -> (M, D).
    """
    gate = jnp.einsum("md,edf->mef", x, w_gate)
    up = jnp.einsum("md,edf->mef", x, w_up)
    every = jnp.einsum("mef,efd->med", ACTIVATIONS[activation](gate) * up, w_down)
    share = jax.nn.one_hot(experts, len(w_gate), dtype=weights.dtype) * weights[:, :, None]
    return jnp.einsum("mke,med->md", share.astype(x.dtype), every)
