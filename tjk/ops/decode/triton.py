"""Decoding by the kernels of `kernels_triton.decode`: launches."""

import jax
import jax.numpy as jnp
from jax import Array

from kernels_triton import decode as kernels
from tjk import executors
from tjk.launch import Launch
from tjk.ops.attention.tiles import split_width
from tjk.ops.decode.tiles import choose_splits, tile
from tjk.precision import input_precision, products


def forward(
    query: Array,
    key: Array,
    value: Array,
    lengths: Array,
    *,
    scale: float,
    left: int | None,
    soft_cap: float | None,
    splits: int | None,
    precision: str,
) -> tuple[Array, Array]:
    """Returns output (B, T, N, V) and logsumexp (B, T, N) float32."""
    launch = parts_launch(
        *(query, key, value, lengths),
        scale=scale,
        left=left,
        soft_cap=soft_cap,
        splits=splits,
        precision=precision,
    )
    output, logsumexp = executors.run(launch)
    if output.shape[1] == 1:
        return output[:, 0], logsumexp[:, 0]
    return executors.run(combine_launch(output, logsumexp, query.dtype))


def parts_launch(
    query: Array,
    key: Array,
    value: Array,
    lengths: Array,
    *,
    scale: float,
    left: int | None,
    soft_cap: float | None,
    splits: int | None,
    precision: str,
) -> Launch:
    """The launch that makes output (B, splits, T, N, V) and logsumexp (B, splits, T, N).

    The output is float32, but in query's dtype where there is one part. FLOPs and bytes are those
    of caches that are full.
    """
    B, T, N, H = query.shape
    _, S, K, V = value.shape
    arch = executors.architecture()
    kind = products(query.dtype, precision, arch)
    shape = tile(kind, (H, V), T * N // K, arch)
    programs = B * K * -(-T * N // K // shape.block_m)
    seen = S if left is None else min(S, left + T)
    tiles = -(-seen // shape.block_n)
    if splits is None:
        splits = choose_splits(programs, tiles, executors.multiprocessors())
    splits = max(1, min(splits, tiles))
    (h0, h1), (v0, v1) = split_width(H), split_width(V)
    outputs = (
        jax.ShapeDtypeStruct((B, splits, T, N, V), query.dtype if splits == 1 else jnp.float32),
        jax.ShapeDtypeStruct((B, splits, T, N), jnp.float32),
    )
    return Launch(
        kernel=kernels.decode_parts,
        inputs=(query, key, value, lengths),
        scalars=(T, S, splits, scale, left or 0, soft_cap or 0.0),
        outputs=outputs,
        grid=(programs * splits,),
        constexprs={
            **{"K": K, "GROUP": N // K},
            **{"HAS_LEFT": left is not None, "HAS_SOFT_CAP": soft_cap is not None},
            **{"H": H, "H_0": h0, "H_1": h1, "V": V, "V_0": v0, "V_1": v1},
            **{"BLOCK_M": shape.block_m, "BLOCK_N": shape.block_n},
            "PRECISION": input_precision(kind),
        },
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        batched=True,
        flops=2 * programs * shape.block_m * tiles * shape.block_n * (h0 + h1 + v0 + v1),
        bytes=_bytes(query, lengths, *outputs) + _bytes(key, value) * seen // max(S, 1),
        arch=arch,
    )


def combine_launch(output: Array, logsumexp: Array, dtype: jnp.dtype) -> Launch:
    """The launch that makes output (B, T, N, V) and logsumexp (B, T, N) of those of the parts."""
    B, splits, T, N, V = output.shape
    block_v = 1 << (V - 1).bit_length()
    outputs = (
        jax.ShapeDtypeStruct((B, T, N, V), dtype),
        jax.ShapeDtypeStruct((B, T, N), jnp.float32),
    )
    return Launch(
        kernel=kernels.decode_combine,
        inputs=(output, logsumexp),
        scalars=(splits, T * N),
        outputs=outputs,
        grid=(B * T * N,),
        constexprs={"V": V, "BLOCK_S": min(4096 // block_v, 32), "BLOCK_V": block_v},
        batched=True,
        bytes=_bytes(output, logsumexp, *outputs),
        arch=executors.architecture(),
    )


def _bytes(*arrays: Array | jax.ShapeDtypeStruct) -> int:
    return sum(x.size * x.dtype.itemsize for x in arrays)
