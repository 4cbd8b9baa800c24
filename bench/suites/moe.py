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
from tjk.nn.layers import Params
from tjk.ops.moe import reference
from tjk.ops.routing.reference import route_top_k

KEY = "impl"
FIELDS = ("impl", "dtype", "tokens", "experts", "top_k", "d_model", "d_hidden", "op")
IMPLEMENTATIONS = ("tjk", "blocked", "ragged_dot")

# Numbers of tokens: everything on a GPU, what takes three minutes on two CPU cores.
FULL = (4096, 32768)
QUICK = (2048,)
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

    d_hidden is twice d_model. Tokens do not see each other, so the suite has no batch: B sequences
    of T are B T tokens. A selection by batch therefore takes none of its cases, nor one by cell or
    resolution.
    """
    if selection.batch or selection.cells or selection.resolutions:
        return
    for dtype, tokens, d_model, impl, op in product(
        selection.dtypes or DTYPES,
        selection.tokens or (FULL if selection.full else QUICK),
        selection.model_dim or (D_MODEL,),
        [i for i in IMPLEMENTATIONS if i in (selection.implementations or IMPLEMENTATIONS)],
        OPS,
    ):
        if not selection.takes(dtype, op):
            continue
        yield {
            "suite": "moe",
            "impl": impl,
            "dtype": dtype,
            "tokens": tokens,
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


def _by_definition(
    config: moe.Config, dtype: jnp.dtype, params: dict[str, Params], x: Array
) -> Array:
    """Every expert on every token, some tokens at a time and rematerialised.

    In whatever dtype the rest is, experts are chosen by the float32 logits that the model itself
    chooses by. Where two logits of a token nearly tie, float64 may choose another expert than
    float32: that is no error of either, and would yet be one as large as the output. For all tokens
    at once, as in the model, because a product of another shape may add up in another order.
    """
    router = {"weight": params["router"]["weight"].astype(jnp.float32)}
    choice = moe.router_logits({"router": router}, x.astype(jnp.float32))
    _, experts = route_top_k(choice, config.top_k, normalize="selected")
    x = x.astype(dtype)
    chosen = jnp.take_along_axis(moe.router_logits(params, x), experts, axis=1)
    weights = jax.nn.softmax(chosen, axis=1)
    matrices = [params[name]["weight"].astype(dtype) for name in ("gate", "up", "down")]

    @jax.checkpoint
    def one(token: tuple[Array, Array, Array]) -> Array:
        x, weights, experts = (a[None] for a in token)
        return reference.moe_mlp(x, *matrices, weights, experts)[0]

    return jax.lax.map(one, (x, weights, experts), batch_size=CHUNK)
