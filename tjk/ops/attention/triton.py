"""Attention by the kernels of `kernels_triton.attention`: problems, tiles, launches."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from kernels_triton import attention as kernels
from tjk import executors
from tjk.launch import Arch, Launch
from tjk.ops.attention.tiles import Kernel, Tile, forward_tile, split_width, tile
from tjk.precision import Products, input_precision, products

Window = tuple[int | None, int | None]


def forward(
    query: Array,
    key: Array,
    value: Array,
    bias: None,
    mask: None,
    query_lengths: Array | None,
    key_lengths: Array | None,
    *,
    scale: float,
    window: Window,
    precision: str | None,
) -> tuple[Array, Array]:
    """Returns output (B, T, N, V) and logsumexp (B, N, T) float32."""
    sign, scale = _split_scale(scale)
    problem = Problem.of(query, key, value, query_lengths, key_lengths, window, precision)
    return executors.run(forward_launch(problem, _times(query, sign), key, value, scale=scale))


def backward(
    query: Array,
    key: Array,
    value: Array,
    bias: None,
    mask: None,
    query_lengths: Array | None,
    key_lengths: Array | None,
    output: Array,
    logsumexp: Array,
    d_output: Array,
    d_logsumexp: Array,
    *,
    scale: float,
    window: Window,
    precision: str | None,
    deterministic: bool,
) -> tuple[Array, Array, Array, None]:
    """Returns the gradients of query, key and value, each in its dtype, and None for the bias."""
    sign, scale = _split_scale(scale)
    problem = Problem.of(query, key, value, query_lengths, key_lengths, window, precision)
    product = output.astype(jnp.float32) * d_output.astype(jnp.float32)
    delta = jnp.moveaxis(product.sum(-1), -1, 1) - d_logsumexp
    operands = (_times(query, sign), key, value, logsumexp, delta, d_output)
    if deterministic:
        (d_query,) = executors.run(backward_query_launch(problem, *operands, scale=scale))
        d_key, d_value = executors.run(backward_key_value_launch(problem, *operands, scale=scale))
    else:
        d_key, d_value, d_query = executors.run(backward_launch(problem, *operands, scale=scale))
        d_query = (d_query * jnp.float32(scale)).astype(query.dtype)
    return _times(d_query, sign), d_key, d_value, None


def _split_scale(scale: float) -> tuple[int, float]:
    """Sign and size of the scale: the kernels take maxima before they multiply by it.

    A scale of 0 becomes a query of zeros, so that a masked logit is not -inf times 0.
    """
    return (0, 1.0) if scale == 0 else (1, scale) if scale > 0 else (-1, -scale)


def _times(x: Array, sign: int) -> Array:
    return x if sign == 1 else x * sign


@dataclasses.dataclass(frozen=True)
class Problem:
    """The sizes and flags that forward and backward share, and the lengths."""

    B: int
    T: int
    S: int
    N: int
    K: int
    H: int
    V: int
    dtype: Any
    lengths: tuple[Array, Array]
    has_lengths: tuple[bool, bool]
    window: Window
    products: Products
    arch: Arch | None

    @classmethod
    def of(
        cls,
        query: Array,
        key: Array,
        value: Array,
        query_lengths: Array | None,
        key_lengths: Array | None,
        window: Window,
        precision: str | None,
    ) -> "Problem":
        B, T, N, H = query.shape
        S, K = key.shape[1:3]
        arch = executors.architecture()
        left, right = window
        # A bound that every pair meets costs nothing; one that none meets must not overflow.
        left = None if left is None or left >= T else max(left, -(T + S))
        right = None if right is None or right >= S else max(right, -(T + S))
        unused = jnp.zeros(B, jnp.int32)
        return cls(
            B=B,
            T=T,
            S=S,
            N=N,
            K=K,
            H=H,
            V=value.shape[-1],
            dtype=query.dtype,
            lengths=tuple(unused if x is None else x for x in (query_lengths, key_lengths)),
            has_lengths=(query_lengths is not None, key_lengths is not None),
            window=(left, right),
            products=products(query.dtype, precision, arch),
            arch=arch,
        )

    def launch(
        self, kernel: Any, tile: Tile, operands: tuple[Array, ...], outputs: Any, **extra: Any
    ) -> Launch:
        """A launch of one of the kernels: query, key, value and lengths come first in all."""
        left, right = self.window
        h, v = split_width(self.H), split_width(self.V)
        inputs = (*operands[:3], *self.lengths, *operands[3:])
        structs = tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in outputs)
        return Launch(
            kernel=kernel,
            inputs=inputs,
            outputs=structs,
            constexprs={
                **{"K": self.K, "GROUP": self.N // self.K},
                "HAS_QUERY_LENGTHS": self.has_lengths[0],
                "HAS_KEY_LENGTHS": self.has_lengths[1],
                "HAS_LEFT": left is not None,
                "HAS_RIGHT": right is not None,
                **{"H": self.H, "H_0": h[0], "H_1": h[1]},
                **{"V": self.V, "V_0": v[0], "V_1": v[1]},
                "BLOCK_M": tile.block_m,
                "BLOCK_N": tile.block_n,
                "PRECISION": input_precision(self.products),
            },
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            batched=True,
            bytes=sum(x.size * x.dtype.itemsize for x in (*inputs, *structs)),
            arch=self.arch,
            **extra,
        )

    def tile(self, kernel: Kernel) -> Tile:
        return tile(kernel, self.products, (self.H, self.V), self.arch)

    def scalars(self, *scales: float) -> tuple[int | float, ...]:
        left, right = self.window
        return (self.T, self.S, *scales, left or 0, right or 0)

    def flops(self, tile: Tile, products_h: int, products_v: int) -> int:
        """Of so many products a pair of tiles over the key's and over the value's width."""
        width = products_h * sum(split_width(self.H)) + products_v * sum(split_width(self.V))
        pairs = visited_tiles(self.T, self.S, self.window, tile.block_m, tile.block_n)
        return 2 * self.B * self.N * pairs * tile.block_m * tile.block_n * width


def visited_tiles(T: int, S: int, window: Window, block_m: int, block_n: int) -> int:
    """How many pairs of tiles hold a visible key, before lengths that only the device knows."""
    left, right = window
    count = 0
    for first in range(0, T, block_m):
        begin = 0 if left is None else max(0, first - left) // block_n
        end = S if right is None else min(S, first + block_m + right)
        count += max(0, -(-end // block_n) - begin)
    return count


def forward_launch(
    problem: Problem, query: Array, key: Array, value: Array, *, scale: float
) -> Launch:
    """The launch that makes output and logsumexp."""
    p = problem
    tile = forward_tile(p.products, (p.H, p.V), p.arch, p.B * p.N, p.T)
    return p.launch(
        kernels.attention_forward,
        tile,
        (query, key, value),
        [((p.B, p.T, p.N, p.V), p.dtype), ((p.B, p.N, p.T), jnp.float32)],
        scalars=p.scalars(scale * math.log2(math.e)),
        grid=(p.B * p.N * -(-p.T // tile.block_m),),
        flops=p.flops(tile, 1, 1),
    )


def backward_launch(problem: Problem, *operands: Array, scale: float) -> Launch:
    """The launch that makes d_key, d_value and d_query / scale in float32, by atomics."""
    p = problem
    tile = p.tile("backward")
    return p.launch(
        kernels.attention_backward,
        tile,
        operands,
        [
            ((p.B, p.S, p.K, p.H), p.dtype),
            ((p.B, p.S, p.K, p.V), p.dtype),
            ((p.B, p.T, p.N, p.H), jnp.float32),
        ],
        scalars=p.scalars(scale, scale * math.log2(math.e)),
        grid=(p.B * p.K * -(-p.S // tile.block_n),),
        zeroed=(2,),
        flops=p.flops(tile, 3, 2),
    )


def backward_key_value_launch(problem: Problem, *operands: Array, scale: float) -> Launch:
    """The launch that makes d_key and d_value without atomics."""
    p = problem
    tile = p.tile("backward_key_value")
    return p.launch(
        kernels.attention_backward_key_value,
        tile,
        operands,
        [((p.B, p.S, p.K, p.H), p.dtype), ((p.B, p.S, p.K, p.V), p.dtype)],
        scalars=p.scalars(scale, scale * math.log2(math.e)),
        grid=(p.B * p.K * -(-p.S // tile.block_n),),
        flops=p.flops(tile, 2, 2),
    )


def backward_query_launch(problem: Problem, *operands: Array, scale: float) -> Launch:
    """The launch that makes d_query without atomics."""
    p = problem
    tile = p.tile("backward_query")
    return p.launch(
        kernels.attention_backward_query,
        tile,
        operands,
        [((p.B, p.T, p.N, p.H), p.dtype)],
        scalars=p.scalars(scale, scale * math.log2(math.e)),
        grid=(p.B * p.N * -(-p.T // tile.block_m),),
        flops=p.flops(tile, 2, 1),
    )
