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
from tjk.ops.attention.hooks import Body, Hooks
from tjk.ops.attention.operands import Operands, Options
from tjk.ops.attention.tiles import Kernel, Tile, forward_tile, hooked_tile, split_width, tile
from tjk.precision import Products, input_precision, products

Window = tuple[int | None, int | None]


def forward(operands: Operands, options: Options) -> tuple[Array, Array]:
    """Returns output (B, T, N, V) and logsumexp (B, N, T) float32."""
    sign, scale = _split_scale(options.scale)
    problem = Problem.of(operands, options)
    query, key, value = operands[:3]
    return executors.run(forward_launch(problem, _times(query, sign), key, value, scale=scale))


def backward(
    operands: Operands, logsumexp: Array, delta: Array, d_output: Array, options: Options
) -> Operands:
    """The gradients of all operands but the sinks, in their dtypes."""
    sign, scale = _split_scale(options.scale)
    problem = Problem.of(operands, options)
    query, key, value = operands[:3]
    arrays = (_times(query, sign), key, value, logsumexp, delta, d_output)
    d_arrays: tuple[Array, ...] = ()
    if options.deterministic:
        (d_query,) = executors.run(backward_query_launch(problem, *arrays, scale=scale))
        d_key, d_value = executors.run(backward_key_value_launch(problem, *arrays, scale=scale))
    else:
        d_key, d_value, d_query, *d_arrays = executors.run(
            backward_launch(problem, *arrays, scale=scale)
        )
        d_query = (d_query * jnp.float32(scale)).astype(query.dtype)
    return problem.hooks.gradients(operands, d_arrays)._replace(
        query=_times(d_query, sign), key=d_key, value=d_value
    )


def _split_scale(scale: float) -> tuple[int, float]:
    """Sign and size of the scale: the kernels take maxima before they multiply by it.

    A scale of 0 becomes a query of zeros, so that a masked logit is not -inf times 0.
    """
    return (0, 1.0) if scale == 0 else (1, scale) if scale > 0 else (-1, -scale)


def _times(x: Array, sign: int) -> Array:
    return x if sign == 1 else x * sign


@dataclasses.dataclass(frozen=True)
class Problem:
    """The sizes and flags that forward and backward share, lengths, and hooks."""

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
    hooks: Hooks
    products: Products
    arch: Arch | None

    @classmethod
    def of(cls, operands: Operands, options: Options) -> "Problem":
        B, T, N, H = operands.query.shape
        S, K, V = operands.value.shape[1:]
        arch = executors.architecture()
        lengths = (operands.query_lengths, operands.key_lengths)
        unused = jnp.zeros(B, jnp.int32)
        return cls(
            B=B,
            T=T,
            S=S,
            N=N,
            K=K,
            H=H,
            V=V,
            dtype=operands.query.dtype,
            lengths=tuple(unused if x is None else x for x in lengths),
            has_lengths=tuple(x is not None for x in lengths),
            window=options.window,
            hooks=Hooks.of(operands, options.modifiers),
            products=products(operands.query.dtype, options.precision, arch),
            arch=arch,
        )

    def launch(
        self,
        kernel: Any,
        body: Body,
        tile: Tile,
        operands: tuple[Array, ...],
        outputs: Any,
        *,
        scalars: tuple[float, ...],
        by_key: bool = False,
        **extra: Any,
    ) -> Launch:
        """A launch of one of the kernels: query, key, value and lengths come first in all.

        Args:
            kernel: without hooks.
            body: what it calls.
            tile: its sizes.
            operands: query, key, value, and what else the kernel takes.
            outputs: shapes and dtypes.
            scalars: scales.
            by_key: whether a program has a tile of keys, and goes through those of queries.
        """
        left, right = self.window
        h, v = split_width(self.H), split_width(self.V)
        inputs = (*operands[:3], *self.lengths, *operands[3:])
        scalars = (self.T, self.S, *scalars, left or 0, right or 0)
        constexprs = {
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
        }
        structs = tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in outputs)
        launch = Launch(
            kernel=kernel,
            inputs=inputs,
            outputs=structs,
            scalars=scalars,
            constexprs=constexprs,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            batched=True,
            bytes=sum(x.size * x.dtype.itemsize for x in (*inputs, *structs)),
            arch=self.arch,
            **extra,
        )
        return self.hooks.attach(
            launch, body, (self.T, self.S), (tile.block_m, tile.block_n), by_key
        )

    def tile(self, kernel: Kernel) -> Tile:
        problem = (self.products, (self.H, self.V), self.arch)
        if kernel == "forward" and self.hooks.is_empty:
            return forward_tile(*problem, self.B * self.N, self.T)
        whole = tile(kernel, *problem)
        if self.hooks.is_empty:
            return whole
        has_score = self.hooks.score is not None
        return hooked_tile(kernel, self.products, whole, has_score=has_score)

    def scale(self, scale: float) -> float:
        """What the kernels multiply products by: log2(e) is in it unless a hook wants logits."""
        return scale if self.hooks.score else scale * math.log2(math.e)

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
    tile = p.tile("forward")
    return p.launch(
        kernels.attention_forward,
        Body(kernels.forward),
        tile,
        (query, key, value),
        [((p.B, p.T, p.N, p.V), p.dtype), ((p.B, p.N, p.T), jnp.float32)],
        scalars=(p.scale(scale),),
        grid=(p.B * p.N * -(-p.T // tile.block_m),),
        flops=p.flops(tile, 1, 1),
    )


def backward_launch(problem: Problem, *operands: Array, scale: float) -> Launch:
    """The launch that makes d_key, d_value and d_query / scale in float32, by atomics."""
    p = problem
    tile = p.tile("backward")
    return p.launch(
        kernels.attention_backward,
        Body(kernels.backward, {"ADD_QUERY": "True"}),
        tile,
        operands,
        [
            ((p.B, p.S, p.K, p.H), p.dtype),
            ((p.B, p.S, p.K, p.V), p.dtype),
            ((p.B, p.T, p.N, p.H), jnp.float32),
        ],
        scalars=(scale, scale * math.log2(math.e)),
        grid=(p.B * p.K * -(-p.S // tile.block_n),),
        zeroed=(2,),
        by_key=True,
        flops=p.flops(tile, 3, 2),
    )


def backward_key_value_launch(problem: Problem, *operands: Array, scale: float) -> Launch:
    """The launch that makes d_key and d_value without atomics."""
    p = problem
    tile = p.tile("backward_key_value")
    return p.launch(
        kernels.attention_backward_key_value,
        Body(kernels.backward, {"ADD_QUERY": "False", "d_query_ptr": "d_key_ptr"}),
        tile,
        operands,
        [((p.B, p.S, p.K, p.H), p.dtype), ((p.B, p.S, p.K, p.V), p.dtype)],
        scalars=(scale, scale * math.log2(math.e)),
        grid=(p.B * p.K * -(-p.S // tile.block_n),),
        by_key=True,
        flops=p.flops(tile, 2, 2),
    )


def backward_query_launch(problem: Problem, *operands: Array, scale: float) -> Launch:
    """The launch that makes d_query without atomics."""
    p = problem
    tile = p.tile("backward_query")
    return p.launch(
        kernels.attention_backward_query,
        Body(kernels.backward_query),
        tile,
        operands,
        [((p.B, p.T, p.N, p.H), p.dtype)],
        scalars=(scale, scale * math.log2(math.e)),
        grid=(p.B * p.N * -(-p.T // tile.block_m),),
        flops=p.flops(tile, 2, 1),
    )
