"""Auxiliary losses of a router, in plain JAX: a few sums over the logits, which XLA fuses."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from tjk import checks

_DTYPES = ("float32", "bfloat16", "float16", "float64")


def load_balance_loss(logits: ArrayLike, experts: ArrayLike) -> Array:
    r"""How unevenly a router loads the experts: 1 if evenly, E if all goes to one.

    .. math::
        E \sum_e f_e P_e, \qquad f_e = \frac{1}{M k} \#\{(m, j): e_{mj} = e\}, \qquad
        P_e = \frac{1}{M} \sum_m \mathrm{softmax}(x_m)_e

    Differentiable in the logits through P alone. Computed in float32 (float64 for float64).

    Source: Fedus et al., Switch Transformers, https://arxiv.org/abs/2101.03961, equations 4 to 6,
    there for k = 1 and with a factor, alpha, which is left to the caller.

    Args:
        logits: (M, E), the router's.
        experts: (M, k) int32, the chosen experts; others than 0 to E - 1 count in no f.

    Returns:
        A scalar; 0 for M = 0.

    Raises:
        TypeError, ValueError: for a dtype or shape that does not fit.

    Example:
        >>> import jax.numpy as jnp
        >>> from tjk.ops import load_balance_loss
        >>> float(load_balance_loss(jnp.zeros((4, 2)), jnp.array([[0], [1], [0], [1]])))
        1.0
    """
    logits, experts = _logits("load_balance_loss", logits), jnp.asarray(experts)
    M, E = logits.shape
    checks.check_shape("load_balance_loss", "experts", experts, "Mk", {"M": M})
    checks.check_dtype("load_balance_loss", "experts", experts, ("int32",))
    chosen = experts.reshape(-1, 1) == jnp.arange(E, dtype=jnp.int32)
    fraction = chosen.sum(0).astype(logits.dtype) / max(1, experts.size)
    mean = jax.nn.softmax(logits, axis=1).sum(0) / max(1, M)
    return E * jnp.sum(fraction * mean)


def router_z_loss(logits: ArrayLike) -> Array:
    r"""How large a router's logits are.

    .. math::
        \frac{1}{M} \sum_m \Bigl(\log \sum_e \exp x_{me}\Bigr)^2

    Differentiable in the logits. Computed in float32 (float64 for float64).

    Source: Zoph et al., ST-MoE, https://arxiv.org/abs/2202.08906, equation 5.

    Args:
        logits: (M, E), the router's.

    Returns:
        A scalar; 0 for M = 0.

    Raises:
        TypeError, ValueError: for a dtype or shape that does not fit.

    Example:
        >>> import jax.numpy as jnp
        >>> from tjk.ops import router_z_loss
        >>> float(router_z_loss(jnp.zeros((4, 1))))
        0.0
    """
    logits = _logits("router_z_loss", logits)
    return jnp.square(jax.nn.logsumexp(logits, axis=1)).sum() / max(1, len(logits))


def _logits(op: str, logits: ArrayLike) -> Array:
    """The logits in float32, or float64."""
    logits = jnp.asarray(logits)
    checks.check_shape(op, "logits", logits, "ME", {})
    checks.check_dtype(op, "logits", logits, _DTYPES)
    return logits if logits.dtype == jnp.float64 else logits.astype(jnp.float32)
