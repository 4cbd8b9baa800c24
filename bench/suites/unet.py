"""The unet suite: `tjk.nn.unet` on images, convolved along rows, with GroupNorm by tjk or JAX."""

from collections.abc import Iterator
from itertools import product

import jax
import jax.numpy as jnp
from jax import Array

from bench.case import DTYPES, OPS, Case, Problem, Selection
from bench.step import disturbed, one_by_one
from tjk.nn import unet
from tjk.nn.layers import at_least_float32

KEY = "impl"
FIELDS = ("impl", "dtype", "resolution", "batch", "op")
IMPLEMENTATIONS = ("tjk", "jax_xla")

# Everything on a GPU, what takes minutes on two CPU cores.
FULL = (32, 64)
QUICK = (32,)
BATCH = 8
KERNEL = (1, 3)


def cases(selection: Selection) -> Iterator[Case]:
    """The selected part of the matrix, in the order of the seed's file; none of it by what only
    models of sequences have."""
    if selection.tokens or selection.model_dim or selection.cells:
        return
    for dtype, resolution, batch, impl, op in product(
        selection.dtypes or DTYPES,
        selection.resolutions or (FULL if selection.full else QUICK),
        selection.batch or (BATCH,),
        [i for i in IMPLEMENTATIONS if i in (selection.implementations or IMPLEMENTATIONS)],
        OPS,
    ):
        if not selection.takes(dtype, op):
            continue
        yield {
            "suite": "unet",
            "impl": impl,
            "dtype": dtype,
            "resolution": resolution,
            "batch": batch,
            "op": op,
        }


def unavailable(case: Case, platform: str) -> str | None:
    """Why the case cannot exist on that platform: all can."""
    return None


def problem(case: Case) -> Problem:
    """The case's model on random square images."""
    dtype = jnp.dtype(case["dtype"])
    config = unet.Config(kernel=KERNEL)
    key_params, key_noise, key_x = jax.random.split(jax.random.key(0), 3)
    shape = (case["batch"], case["resolution"], case["resolution"], config.features)
    x = jax.random.normal(key_x, shape, jnp.bfloat16)

    def model(params, x, dtype=dtype, implementation=group_norm):
        return unet.apply(params, config, x, dtype=dtype, implementation=implementation)

    def measured(params, x):
        implementation = None if case["impl"] == "tjk" else group_norm
        return model(params, x, implementation=implementation)

    def exact(params, x):
        return model(params, x, dtype=x.dtype)

    return Problem(
        params=disturbed(key_noise, unet.init(key_params, config)),
        inputs=(x.astype(dtype),),
        measured=measured,
        plain=one_by_one(model),
        exact=one_by_one(exact),
    )


def group_norm(
    x: Array, scale: Array, bias: Array, *, groups: int, epsilon: float, activation: str
) -> Array:
    """GroupNorm and silu as one writes them in JAX: the baseline, and in float64 the definition."""
    y = at_least_float32(x).reshape(x.shape[0], -1, groups, x.shape[-1] // groups)
    mean = y.mean(axis=(1, 3), keepdims=True)
    variance = jnp.square(y - mean).mean(axis=(1, 3), keepdims=True)
    y = ((y - mean) * jax.lax.rsqrt(variance + epsilon)).reshape(x.shape)
    y = y * scale.astype(y.dtype) + bias.astype(y.dtype)
    return {"silu": jax.nn.silu}[activation](y).astype(x.dtype)
