"""The ssm suite: `tjk.nn.ssm` with each of its cells, the scans by tjk or by plain JAX."""

import functools
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from bench.case import DTYPES, OPS, Case, Problem, Selection
from bench.ssm_baselines import SCANS
from bench.step import one_by_one
from tjk.nn import ssm
from tjk.nn.cells import Scans
from tjk.ops.convolution import reference as convolution
from tjk.ops.delta_rule import reference as delta_rule
from tjk.ops.linear import reference as linear
from tjk.ops.selective import reference as selective
from tjk.ops.ssd import reference as ssd

KEY = "impl"
FIELDS = ("cell", "impl", "dtype", "tokens", "batch", "model_dim", "op")
IMPLEMENTATIONS = ("tjk", "jax_xla")
CELLS = ("mamba", "ssd", "mamba2", "gdn", "lru")

# Lengths and batches: everything on a GPU, what takes minutes on two CPU cores.
FULL = (1024, 4096)
QUICK = (512,)
BATCH = 8
QUICK_BATCH = 1
MODEL_DIM = 128


def _first(scan: Callable[..., tuple[Array, Array]], *operands: Array, **options: Any) -> Array:
    """y of (y, final state)."""
    return scan(*operands, **options)[0]


DEFINITION = Scans(
    *(
        functools.partial(_first, scan)
        for scan in (
            linear.linear_scan,
            selective.selective_scan,
            ssd.ssd_scan,
            delta_rule.gated_delta_rule,
            convolution.causal_conv1d,
        )
    )
)


def cases(selection: Selection) -> Iterator[Case]:
    """The selected part of the matrix, in the seed's order; none of it by resolution."""
    if selection.resolutions:
        return
    batches = (BATCH,) if selection.full else (QUICK_BATCH,)
    for dtype, tokens, batch, model_dim, cell, impl, op in product(
        selection.dtypes or DTYPES,
        selection.tokens or (FULL if selection.full else QUICK),
        selection.batch or batches,
        selection.model_dim or (MODEL_DIM,),
        [c for c in CELLS if c in (selection.cells or CELLS)],
        [i for i in IMPLEMENTATIONS if i in (selection.implementations or IMPLEMENTATIONS)],
        OPS,
    ):
        if not selection.takes(dtype, op):
            continue
        yield {
            "suite": "ssm",
            "cell": cell,
            "impl": impl,
            "dtype": dtype,
            "tokens": tokens,
            "batch": batch,
            "model_dim": model_dim,
            "op": op,
        }


def unavailable(case: Case, platform: str) -> str | None:
    """Why the case cannot exist on that platform: all can."""
    return None


def problem(case: Case) -> Problem:
    """The case's model, `model_dim` wide, on random sequences."""
    width, dtype = case["model_dim"], jnp.dtype(case["dtype"])
    config = ssm.Config(case["cell"], width=width, mlp_width=4 * width)
    key_params, key_x = jax.random.split(jax.random.key(0))
    shape = (case["batch"], case["tokens"], config.features)
    x = jax.random.normal(key_x, shape, jnp.bfloat16)

    def model(params, x, dtype=dtype, implementation=DEFINITION):
        return ssm.apply(params, config, x, dtype=dtype, implementation=implementation)

    def measured(params, x):
        ours = case["impl"] == "tjk"
        scans = None if ours else SCANS
        return ssm.apply(params, config, x, dtype=dtype, remat=ours, implementation=scans)

    def exact(params, x):
        return model(params, x, dtype=x.dtype)

    return Problem(
        params=ssm.init(key_params, config),
        inputs=(x.astype(dtype),),
        measured=measured,
        plain=one_by_one(model),
        exact=one_by_one(exact),
    )
