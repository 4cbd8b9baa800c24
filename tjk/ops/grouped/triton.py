"""The grouped product in Triton: launches and the choice of their tiles."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array

from kernels_triton import grouped as kernels
from tjk import executors
from tjk.launch import Launch
from tjk.ops.grouped.tiles import Tile, outer_tile, programs, rows_tile, splits
from tjk.precision import input_precision, products


def forward(lhs: Array, rhs: Array, group_sizes: Array, *, dtype: Any, precision: str) -> Array:
    """lhs (M, K), rhs (G, K, N) -> (M, N) in `dtype`."""
    launch = matmul_launch(lhs, rhs, group_sizes, dtype=dtype, precision=precision)
    return executors.run(launch)[0]


def backward(
    lhs: Array, rhs: Array, group_sizes: Array, d_out: Array, *, precision: str
) -> tuple[Array, Array]:
    """The gradients of lhs and rhs, in their dtypes; d_out (M, N) is rounded to lhs's first."""
    d_out = d_out.astype(lhs.dtype)
    launch = matmul_launch(
        d_out, rhs, group_sizes, dtype=lhs.dtype, precision=precision, transposed=True
    )
    (d_lhs,) = executors.run(launch)
    return d_lhs, outer(lhs, d_out, group_sizes, dtype=rhs.dtype, precision=precision)


def matmul_launch(
    lhs: Array,
    rhs: Array,
    group_sizes: Array,
    *,
    dtype: Any,
    precision: str,
    transposed: bool = False,
) -> Launch:
    """The launch that multiplies each row with its group's matrix, or its transpose."""
    M, K = lhs.shape
    G, *matrix = rhs.shape
    N = matrix[0] if transposed else matrix[1]
    arch = executors.architecture()
    kind = products(lhs.dtype, precision, arch)
    tile = rows_tile("matmul", kind, M, G, N)
    return rows_launch(
        kernels.grouped_matmul,
        tile,
        (lhs, rhs, group_sizes),
        (jax.ShapeDtypeStruct((M, N), dtype),),
        sizes=(M, G, K, N),
        constexprs={"G": G, "TRANSPOSED": transposed, "PRECISION": input_precision(kind)},
    )


def rows_launch(
    kernel: Any,
    tile: Tile,
    inputs: tuple[Array, ...],
    outputs: tuple[jax.ShapeDtypeStruct, ...],
    *,
    sizes: tuple[int, int, int, int],
    constexprs: dict[str, Any],
    products: int = 1,
) -> Launch:
    """A launch of a persistent kernel that makes (M, N) from (M, K) and a (K, N) for each group.

    The group sizes are known to the device alone: the FLOPs are those of half a tile of padding a
    group, which is the mean over groups of any size.
    """
    M, G, K, N = sizes
    tiles_n, tiles_k = -(-N // tile.block_n), -(-K // tile.block_k)
    rows = M + G * tile.block_m // 2
    return Launch(
        kernel=kernel,
        inputs=inputs,
        scalars=(M,),
        outputs=outputs,
        grid=(programs(tile, M, G, N) if M else 0,),
        constexprs={
            **{"GROUPS": groups_block(G), "K": K, "N": N},
            **{"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k},
            **constexprs,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        flops=2 * products * rows * tiles_n * tile.block_n * tiles_k * tile.block_k,
        bytes=sum(x.size * x.dtype.itemsize for x in (*inputs, *outputs)),
        arch=executors.architecture(),
    )


def groups_block(G: int) -> int:
    """A power of two for G groups and the one of the rows behind them."""
    return 1 << G.bit_length()


def outer(
    left: Array,
    right: Array,
    group_sizes: Array,
    *,
    dtype: Any,
    precision: str,
    order: Array | None = None,
    gather: Literal["left", "right"] | None = None,
    top_k: int = 1,
) -> Array:
    """sum over each group's rows of left[r]^T right[r]: (M, K), (M, N) -> (G, K, N) in `dtype`.

    One of the two may be given by token instead, (M / top_k, ...), with the `order` of the slots.
    """
    launch = outer_launch(left, right, group_sizes, dtype, precision, order, gather, top_k)
    (parts,) = executors.run(launch)
    return parts[0] if len(parts) == 1 else parts.sum(0).astype(dtype)


def outer_launch(
    left: Array,
    right: Array,
    group_sizes: Array,
    dtype: Any,
    precision: str,
    order: Array | None,
    gather: Literal["left", "right"] | None,
    top_k: int,
) -> Launch:
    """The launch behind `outer`, which makes (SPLITS, G, K, N), in float32 if in several parts."""
    M = (right if gather == "left" else left).shape[0]
    G, K, N = len(group_sizes), left.shape[1], right.shape[1]
    arch = executors.architecture()
    kind = products(left.dtype, precision, arch)
    tile = outer_tile(kind, K, N)
    parts = splits(tile, M, G, K, N)
    tiles_k, tiles_n = -(-K // tile.block_k), -(-N // tile.block_n)
    out = jax.ShapeDtypeStruct((parts, G, K, N), jnp.float32 if parts > 1 else dtype)
    inputs = (left, right, group_sizes if order is None else order, group_sizes)
    rows = M + G * tile.block_m // 2
    return Launch(
        kernel=kernels.grouped_outer,
        inputs=inputs,
        scalars=(M,),
        outputs=(out,),
        grid=(parts * G * tiles_k * tiles_n if M else 0,),
        constexprs={
            **{"G": G, "GROUPS": groups_block(G), "K": K, "N": N, "TOP_K": top_k},
            **{"GATHER_LEFT": gather == "left", "GATHER_RIGHT": gather == "right"},
            **{"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k},
            **{"SPLITS": parts, "PRECISION": input_precision(kind)},
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        flops=2 * rows * tiles_n * tile.block_n * tiles_k * tile.block_k,
        bytes=sum(x.size * x.dtype.itemsize for x in (*inputs[:2], out)),
        arch=arch,
    )
