"""The grouped product by its definition: the oracle of the tests, never a default.

out[r] = lhs[r] rhs[g]      for the rows r of group g; 0 for rows behind the last group
"""

import jax.numpy as jnp
from jax import Array


def grouped_matmul(lhs: Array, rhs: Array, group_sizes: Array) -> Array:
    """lhs (M, K), rhs (G, K, N), group_sizes (G,) -> (M, N), in the operands' dtype."""
    ends = jnp.cumsum(group_sizes)
    rows = jnp.arange(lhs.shape[0], dtype=group_sizes.dtype)[:, None]
    mine = (rows >= ends - group_sizes) & (rows < ends)  # (M, G)
    return jnp.einsum("mg,mk,gkn->mn", mine.astype(lhs.dtype), lhs, rhs)
