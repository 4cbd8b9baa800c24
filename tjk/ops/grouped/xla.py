"""The grouped product in plain JAX: a loop over blocks of rows, each of one group.

As in the kernels, the blocks are found from the group sizes while the program runs: the loop has as
many trips as there are blocks, and no operand is padded, sorted or copied.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

# Rows in a block: enough to make a product worth reading its matrix for, few enough that the last,
# partly empty block of a group costs little.
BLOCK = 256


class Block(NamedTuple):
    """The rows from `start` on, of which the `inside` ones belong to `group`."""

    group: Array
    start: Array
    inside: Array  # (block, 1)

    def rows(self, x: Array) -> Array:
        """The block's rows of x (M, ...), 0 where they belong to another group."""
        return jnp.where(self.inside, self.slice(x), jnp.zeros((), x.dtype))

    def slice(self, x: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(x, self.start, len(self.inside))

    def write(self, x: Array, rows: Array) -> Array:
        """x with the block's rows replaced; those of other groups stay."""
        rows = jnp.where(self.inside, rows.astype(x.dtype), self.slice(x))
        return jax.lax.dynamic_update_slice_in_dim(x, rows, self.start, 0)

    def matrix(self, x: Array) -> Array:
        """The group's matrix."""
        return jax.lax.dynamic_index_in_dim(x, self.group, keepdims=False)

    def add(self, x: Array, matrix: Array) -> Array:
        """x (G, ...) with the matrix added to the group's."""
        return jax.lax.dynamic_update_index_in_dim(x, self.matrix(x) + matrix, self.group, 0)


def for_each_block(
    group_sizes: Array, M: int, body: Callable[[Block, Any], Any], carry: Any
) -> Any:
    """carry = body(block, carry) for every block of every group, M > 0 rows in all."""
    size = min(BLOCK, M)
    sizes = jnp.clip(group_sizes, 0, M)
    ends = jnp.cumsum(sizes)
    starts, ends = jnp.clip(ends - sizes, 0, M), jnp.clip(ends, 0, M)
    blocks = (ends - starts + size - 1) // size
    block_ends = jnp.cumsum(blocks)

    def step(i: Array, carry: Any) -> Any:
        group = jnp.sum(block_ends <= i, dtype=jnp.int32)
        first = starts[group] + (i - block_ends[group] + blocks[group]) * size
        start = jnp.minimum(first, M - size)
        rows = start + jnp.arange(size, dtype=jnp.int32)
        inside = (rows >= first) & (rows < ends[group])
        return body(Block(group, start, inside[:, None]), carry)

    return jax.lax.fori_loop(jnp.int32(0), block_ends[-1].astype(jnp.int32), step, carry)


def product(x: Array, y: Array, contract: tuple[int, int], precision: str) -> Array:
    """The sum over one axis of each, accumulated in float32 (float64 for float64)."""
    return jax.lax.dot_general(
        x,
        y,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=precision,
        preferred_element_type=accumulator(x.dtype),
    )


def accumulator(dtype: Any) -> Any:
    """The dtype of sums."""
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


def forward(lhs: Array, rhs: Array, group_sizes: Array, *, dtype: Any, precision: str) -> Array:
    """lhs (M, K), rhs (G, K, N) -> (M, N) in `dtype`."""

    def body(block: Block, out: Array) -> Array:
        return block.write(
            out, product(block.slice(lhs), block.matrix(rhs), (1, 0), precision).astype(dtype)
        )

    out = jnp.zeros((len(lhs), rhs.shape[2]), dtype)
    return for_each_block(group_sizes, len(lhs), body, out)


def backward(
    lhs: Array, rhs: Array, group_sizes: Array, d_out: Array, *, precision: str
) -> tuple[Array, Array]:
    """The gradients of lhs and rhs, in their dtypes; d_out (M, N) is rounded to lhs's first."""
    d_out = d_out.astype(lhs.dtype)

    def body(block: Block, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        d_lhs, d_rhs = carry
        rows = block.rows(d_out)
        d_lhs = block.write(d_lhs, product(rows, block.matrix(rhs), (1, 1), precision))
        return d_lhs, block.add(d_rhs, product(block.rows(lhs), rows, (0, 0), precision))

    start = (jnp.zeros_like(lhs), jnp.zeros(rhs.shape, accumulator(rhs.dtype)))
    d_lhs, d_rhs = for_each_block(group_sizes, len(lhs), body, start)
    return d_lhs, d_rhs.astype(rhs.dtype)
