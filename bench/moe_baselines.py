"""The expert layer as one writes it in JAX without kernels: the baselines of the moe suite.

Functions of `tjk.ops.moe_mlp`'s positional arguments, with silu, differentiated by JAX. No token is
dropped, whatever the routing.
"""

import jax
import jax.numpy as jnp
from jax import Array

BLOCK = 128  # rows of a block of `blocked`


def ragged_dot(
    x: Array, w_gate: Array, w_up: Array, w_down: Array, weights: Array, experts: Array
) -> Array:
    """Slots sorted by expert and gathered, then three `jax.lax.ragged_dot`."""
    slots = experts.reshape(-1)
    order = jnp.argsort(slots, stable=True)
    sizes = jnp.bincount(slots, length=len(w_gate)).astype(jnp.int32)
    rows = x[order // experts.shape[1]]  # (M k, D)
    gate = jax.lax.ragged_dot(rows, w_gate, sizes)
    up = jax.lax.ragged_dot(rows, w_up, sizes)
    out = jax.lax.ragged_dot(jax.nn.silu(gate) * up, w_down, sizes)
    return _combine(out[jnp.argsort(order)], weights)


def blocked(
    x: Array, w_gate: Array, w_up: Array, w_down: Array, weights: Array, experts: Array
) -> Array:
    """Each expert's rows padded to whole blocks; each block takes its expert's matrices."""
    slots, E = experts.reshape(-1), len(w_gate)
    # So many blocks hold every routing: each expert but one may leave a block nearly empty.
    blocks = -(-len(slots) // BLOCK) + E - 1
    sizes = jnp.bincount(slots, length=E)
    ends = jnp.cumsum(-(-sizes // BLOCK))  # of each expert's blocks
    order = jnp.argsort(slots, stable=True)
    sorted_slots = slots[order]
    rank = jnp.arange(len(slots)) - (jnp.cumsum(sizes) - sizes)[sorted_slots]
    first = (ends - -(-sizes // BLOCK)) * BLOCK
    row = jnp.zeros_like(order).at[order].set(first[sorted_slots] + rank)  # of each slot
    token = jnp.full(blocks * BLOCK, len(x)).at[row].set(jnp.arange(len(slots)) // experts.shape[1])
    rows = x.at[token].get(mode="fill", fill_value=0).reshape(blocks, BLOCK, -1)
    expert = jnp.minimum(jnp.sum(jnp.arange(blocks)[:, None] >= ends, axis=1), E - 1)
    gate = jnp.einsum("bmd,bdf->bmf", rows, w_gate[expert])
    up = jnp.einsum("bmd,bdf->bmf", rows, w_up[expert])
    out = jnp.einsum("bmf,bfd->bmd", jax.nn.silu(gate) * up, w_down[expert])
    return _combine(out.reshape(blocks * BLOCK, -1)[row], weights)


def _combine(out: Array, weights: Array) -> Array:
    """The slots' outputs, (M k, D), weighted and added up for each token."""
    out = out.reshape(*weights.shape, -1)
    return jnp.sum(out * weights.astype(out.dtype)[:, :, None], axis=1)
