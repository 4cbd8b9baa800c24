"""`gated_delta_rule_step`: one token of the gated delta rule, for generation."""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from tjk.ops.delta_rule.operands import check

_OP = "gated_delta_rule_step"


def gated_delta_rule_step(
    state: ArrayLike,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    g: ArrayLike,
    beta: ArrayLike,
    *,
    scale: float | None = None,
    l2_normalize: bool = False,
) -> tuple[Array, Array]:
    r"""One token of `gated_delta_rule`: its output and the next state.

    .. math::
        S' = e^g S (I - \beta k k^\top) + \beta v k^\top, \qquad o = \mathrm{scale}\; S' q

    Plain JAX in float32 (float64 for float64), the output rounded once. Differentiable in all.

    Source: Yang, Kautz, Hatamizadeh, Gated Delta Networks, https://arxiv.org/abs/2412.06464.

    Args:
        state: (B, H, K, V) float32 (float64 with float64): the transpose of S.
        q: (B, H, K) queries, of dtype float32, bfloat16, float16 or float64.
        k: (B, H, K) keys, in q's dtype.
        v: (B, H, V) values, in q's dtype.
        g: (B, H) logarithms of decays, in q's dtype or float32.
        beta: (B, H) step sizes, in q's dtype or float32.
        scale: of the queries; None is K^-0.5.
        l2_normalize: whether queries and keys are divided by their norms first.

    Returns:
        The output (B, H, V) in q's dtype, and the state S'^T (B, H, K, V).

    Raises:
        TypeError: for a dtype that is not allowed.
        ValueError: for a shape that does not fit.

    Example:
        >>> import jax.numpy as jnp
        >>> from tjk.ops import gated_delta_rule_step
        >>> k, v, gate = jnp.ones((1, 2, 4)), jnp.ones((1, 2, 3)), jnp.zeros((1, 2))
        >>> o, state = gated_delta_rule_step(jnp.zeros((1, 2, 4, 3)), k, k, v, gate, gate)
        >>> o.shape, state.shape
        ((1, 2, 3), (1, 2, 4, 3))
    """
    q, k, v, g, beta, state, _ = check(_OP, "", q, k, v, g, beta, ("state", state))
    dtype, scale = v.dtype, q.shape[-1] ** -0.5 if scale is None else scale
    q, k, v, g, beta = (x.astype(state.dtype) for x in (q, k, v, g, beta))
    if l2_normalize:
        q, k = (x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6) for x in (q, k))
    product = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
    state = state * jnp.exp(g)[..., None, None]
    new = beta[..., None] * (v - product("bhk,bhkv->bhv", k, state))
    state = state + k[..., :, None] * new[..., None, :]
    return (scale * product("bhk,bhkv->bhv", q, state)).astype(dtype), state
