"""The gated delta rule by its definition: the oracle of the tests, never a default.

S_t = exp(g_t) S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T,   o_t = scale S_t q_t
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from tjk.segments import resets


def gated_delta_rule(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    initial_state: Array | None = None,
    segment_ids: Array | None = None,
    *,
    scale: float | None = None,
    l2_normalize: bool = False,
    reverse: bool = False,
    operand: Callable[[Array], Array] = lambda x: x,
) -> tuple[Array, Array]:
    """One token after the other; in v's dtype but for 16-bit inputs, whose arithmetic is float32.

    q, k (B, L, H, K), v (B, L, H, V), g, beta (B, L, H), segment_ids (B, L)
    -> o (B, L, H, V), final state (B, H, K, V), the transpose of S. Operands of products pass
    through `operand`, by which tests round them.
    """
    dtype = v.dtype
    exact = jnp.float64 if dtype == jnp.float64 else jnp.float32
    q, k, v, g, beta = (x.astype(exact) for x in (q, k, v, g, beta))
    if l2_normalize:
        q, k = (x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6) for x in (q, k))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    B, L, H, K = q.shape
    if segment_ids is None:
        segment_ids = jnp.zeros((B, L), jnp.int32)
    reset = resets(segment_ids, reverse)

    def product(subscripts: str, *operands: Array) -> Array:
        return jnp.einsum(subscripts, *map(operand, operands))

    def step(state: Array, token: tuple[Array, ...]) -> tuple[Array, Array]:
        q, k, v, g, beta, reset = token
        state = jnp.where(reset[:, None, None, None], jnp.zeros_like(state), state)
        state = state * jnp.exp(g)[..., None, None]
        new = beta[..., None] * (v - product("bhk,bhkv->bhv", k, state))
        state = state + product("bhk,bhv->bhkv", k, new)
        return state, scale * product("bhk,bhkv->bhv", q, state)

    if initial_state is None:
        initial_state = jnp.zeros((B, H, K, v.shape[-1]), exact)
    tokens = tuple(jnp.moveaxis(x, 1, 0) for x in (q, k, v, g, beta, reset))
    state, o = jax.lax.scan(step, initial_state, tokens, reverse=reverse)
    return jnp.moveaxis(o, 0, 1).astype(dtype), state
