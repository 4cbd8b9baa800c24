"""The moe suite: `tjk.nn.moe` with its expert layer by tjk or by the two baselines."""

import functools
from collections.abc import Iterator
from itertools import product

import jax
import jax.numpy as jnp
from jax import Array

from bench import moe_baselines
from bench.case import DTYPES, OPS, Case, Problem, Selection
from tjk.nn import moe
from tjk.ops.moe import reference
from tjk.ops.routing.reference import route_top_k

KEY = "impl"
FIELDS = ("impl", "dtype", "tokens", "experts", "top_k", "d_model", "d_hidden", "op")
IMPLEMENTATIONS = ("tjk", "blocked", "ragged_dot")

# Tokens and what is run at each: everything on a GPU, what takes minutes on two CPU cores.
FULL = {4096: OPS, 32768: OPS}
QUICK = {4096: OPS}
EXPERTS = 8
TOP_K = 2
D_MODEL = 512
CHUNK = 512  # tokens that the references take at a time

_LAYERS = {
    "tjk": None,
    "blocked": moe_baselines.blocked,
    "ragged_dot": moe_baselines.ragged_dot,
}


def cases(selection: Selection) -> Iterator[Case]:
    """The selected part of the matrix, in the order of the seed's file.

    d_hidden is twice d_model. A token has no neighbours, so there is no batch to select: a batch of
    B sequences is B T tokens.
    """
    if selection.batch:
        return
    tokens = dict.fromkeys(selection.tokens, OPS) or (FULL if selection.full else QUICK)
    for dtype, (count, ops), d_model, impl in product(
        selection.dtypes or DTYPES,
        tokens.items(),
        selection.model_dim or (D_MODEL,),
        [i for i in IMPLEMENTATIONS if i in (selection.implementations or IMPLEMENTATIONS)],
    ):
        for op in ops:
            yield {
                "suite": "moe",
                "impl": impl,
                "dtype": dtype,
                "tokens": count,
                "experts": EXPERTS,
                "top_k": TOP_K,
                "d_model": d_model,
                "d_hidden": 2 * d_model,
                "op": op,
            }


def unavailable(case: Case, platform: str) -> str | None:
    """Why the case cannot exist on that platform: all can."""
    return None


def problem(case: Case) -> Problem:
    """The case's model on random tokens."""
    config = moe.Config(case["d_model"], case["d_hidden"], case["experts"], case["top_k"])
    dtype = jnp.dtype(case["dtype"])
    key_params, key_x = jax.random.split(jax.random.key(0))
    x = jax.random.normal(key_x, (case["tokens"], config.d_model), jnp.bfloat16)

    def measured(params, x):
        layer = _LAYERS[case["impl"]]
        return moe.apply(params, config, x, dtype=dtype, implementation=layer)[0]

    return Problem(
        params=moe.init(key_params, config),
        inputs=(x.astype(dtype),),
        measured=measured,
        plain=functools.partial(_by_definition, config, dtype),
        exact=functools.partial(_by_definition, config, jnp.float64),
    )


def _by_definition(config: moe.Config, dtype: jnp.dtype, params: moe.Params, x: Array) -> Array:
    """The model as its docstring states it, some tokens at a time and rematerialised.

    Experts are chosen by float32 logits even where all else is float64: those of a token may lie so
    near to one another that float64 would choose another expert, and be right, too.
    """
    x = x.astype(dtype)
    logits = moe.router_logits(params, x)
    _, experts = route_top_k(
        moe.router_logits(
            jax.tree.map(lambda p: p.astype(jnp.float32), params), x.astype(jnp.float32)
        ),
        config.top_k,
        normalize="selected",
    )
    weights = jax.nn.softmax(jnp.take_along_axis(logits, experts, axis=1), axis=1)
    matrices = [params["experts"][name].astype(dtype) for name in ("gate", "up", "down")]

    @jax.checkpoint
    def some(operands: tuple[Array, Array, Array]) -> Array:
        tokens, *routing = operands
        return reference.moe_mlp(tokens, *matrices, *routing)

    count = next(n for n in range(min(CHUNK, len(x)), 0, -1) if len(x) % n == 0)
    parts = [a.reshape(-1, count, a.shape[1]) for a in (x, weights, experts)]
    return jax.lax.map(some, tuple(parts)).reshape(x.shape)
