"""Routing three ways: as asked for, in float64, and in plain JAX."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.numerics import assert_within_budget
from tjk.ops import route_top_k
from tjk.ops.routing import reference

NORMALIZE = ("selected", "all")


def draw(M: int, E: int, k: int, dtype: Any, seed: int = 0) -> tuple[jax.Array, np.ndarray]:
    """logits (M, E) in a dtype and the weights' cotangent (M, k) in float64."""
    normal = np.random.default_rng(seed).standard_normal
    return jnp.asarray(3 * normal((M, E)), dtype), normal((M, k))


@functools.partial(jax.jit, static_argnums=(0, 3))
def gradients(route: Any, logits: Any, d_weights: Any, k: int) -> tuple[tuple[Any, ...], ...]:
    """weights, d_logits and experts for each kind of normalization: route(logits, k, kind)."""

    def one(normalize: str) -> tuple[Any, ...]:
        weights, vjp, experts = jax.vjp(lambda x: route(x, k, normalize), logits, has_aux=True)
        return weights, *vjp(d_weights.astype(weights.dtype)), experts

    return tuple(map(one, NORMALIZE))


@functools.cache
def ours(implementation: str | None) -> Any:
    """`route_top_k` for `gradients`."""
    return lambda x, k, normalize: route_top_k(
        x, k, normalize=normalize, implementation=implementation
    )


def plain(logits: Any, k: int, normalize: str) -> tuple[Any, Any]:
    """The reference, for `gradients`."""
    return reference.route_top_k(logits, k, normalize=normalize)


def check(logits: jax.Array, d_weights: np.ndarray, k: int, implementation: str | None) -> None:
    """Fails unless experts are right and weights and d_logits within the budget."""
    actual = gradients(ours(implementation), logits, jnp.float32(d_weights), k)
    # In float32 whatever the dtype, as the kernels are; so one compilation serves all dtypes.
    expected = gradients(plain, logits.astype(jnp.float32), jnp.float32(d_weights), k)
    with jax.enable_x64(True):
        exact = jnp.asarray(np.asarray(logits), jnp.float64)
        exact = gradients(plain, exact, jnp.asarray(d_weights, jnp.float32), k)
    for normalize, *results in zip(NORMALIZE, actual, exact, expected):
        np.testing.assert_array_equal(results[0][2], results[1][2], f"experts, {normalize}")
        assert results[0][0].dtype == jnp.float32
        assert results[0][1].dtype == logits.dtype
        for name, result, right, near in zip(("weights", "d_logits"), *results):
            near = near.astype(result.dtype)
            assert_within_budget(f"{name}, {normalize}", result, right, near)
