"""Routing by its definitions: the oracle of the tests, never a default."""

import jax
import jax.numpy as jnp
from jax import Array

from tjk.ops.routing.order import ExpertOrder


def route_top_k(logits: Array, k: int, *, normalize: str) -> tuple[Array, Array]:
    """The k largest logits' softmax weights, in the logits' dtype, and experts: (M, k) each."""
    experts = jnp.argsort(logits, axis=1, descending=True, stable=True)[:, :k].astype(jnp.int32)
    if normalize == "selected":
        weights = jax.nn.softmax(jnp.take_along_axis(logits, experts, axis=1), axis=1)
    else:
        weights = jnp.take_along_axis(jax.nn.softmax(logits, axis=1), experts, axis=1)
    return weights, experts


def sort_by_expert(experts: Array, num_experts: int) -> ExpertOrder:
    """A stable sort by comparison; experts (S,)."""
    experts = jnp.where((experts >= 0) & (experts < num_experts), experts, num_experts)
    order = jnp.argsort(experts, stable=True).astype(jnp.int32)
    position = jnp.argsort(order, stable=True).astype(jnp.int32)
    return ExpertOrder(order, position, jnp.bincount(experts, length=num_experts))
