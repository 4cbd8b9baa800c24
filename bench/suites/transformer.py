"""The transformer suite: `tjk.nn.transformer` with attention by tjk, XLA or cuDNN."""

from collections.abc import Iterator
from itertools import product

import jax
import jax.numpy as jnp
from jax import Array

from bench.case import DTYPES, OPS, Case, Problem, Selection
from bench.step import one_by_one
from tjk.nn import transformer
from tjk.ops import flex_attention
from tjk.ops.attention import reference

KEY = "attention"
FIELDS = ("attention", "dtype", "tokens", "batch", "model_dim", "op")
IMPLEMENTATIONS = ("tjk", "tjk_flex", "jax_xla", "jax_cudnn")

# Lengths and what is run at each: everything on a GPU, what takes minutes on two CPU cores.
FULL = {256: OPS, 1024: OPS, 4096: OPS}
QUICK = {256: OPS, 1024: ("forward",)}
BATCH = 8
MODEL_DIM = 256
HEAD_WIDTH = 64


def cases(selection: Selection) -> Iterator[Case]:
    """The selected part of the matrix, in the order of the seed's file; none of it by cell."""
    if selection.cells:
        return
    lengths = dict.fromkeys(selection.tokens, OPS) or (FULL if selection.full else QUICK)
    for dtype, (tokens, ops), batch, model_dim, attention in product(
        selection.dtypes or DTYPES,
        lengths.items(),
        selection.batch or (BATCH,),
        selection.model_dim or (MODEL_DIM,),
        [i for i in IMPLEMENTATIONS if i in (selection.implementations or IMPLEMENTATIONS)],
    ):
        if attention == "jax_cudnn" and dtype == "float32":
            continue  # cuDNN's attention takes 16-bit operands only
        for op in ops:
            yield {
                "suite": "transformer",
                "attention": attention,
                "dtype": dtype,
                "tokens": tokens,
                "batch": batch,
                "model_dim": model_dim,
                "op": op,
            }


def unavailable(case: Case, platform: str) -> str | None:
    """Why the case cannot exist on that platform, or None."""
    if case["attention"] == "jax_cudnn" and platform != "gpu":
        return f"cuDNN needs an NVIDIA GPU, the platform is {platform}"
    return None


def problem(case: Case) -> Problem:
    """The case's model: `model_dim` wide, in heads of 64 where that divides it."""
    width, dtype = case["model_dim"], jnp.dtype(case["dtype"])
    config = transformer.Config(width=width, heads=_heads(width), mlp_width=4 * width)
    key_params, key_x = jax.random.split(jax.random.key(0))
    x = jax.random.normal(key_x, (case["batch"], case["tokens"], width), jnp.bfloat16)

    def model(params, x, dtype=dtype, implementation="jax_xla"):
        return transformer.apply(params, config, x, dtype=dtype, implementation=implementation)

    def measured(params, x):
        ours = {"tjk": None, "tjk_flex": _flex}
        return model(params, x, implementation=ours.get(case["attention"], case["attention"]))

    def exact(params, x):
        return model(params, x, dtype=x.dtype, implementation=_definition)

    return Problem(
        params=transformer.init(key_params, config),
        inputs=(x.astype(dtype),),
        measured=measured,
        plain=one_by_one(model),
        exact=one_by_one(exact),
    )


def _flex(query: Array, key: Array, value: Array) -> Array:
    """A score and a mask that change nothing, of which the kernel does not know that."""

    def score_mod(score, b, h, q_idx, kv_idx):
        return score

    def mask_mod(b, h, q_idx, kv_idx):
        return kv_idx >= 0

    return flex_attention(query, key, value, score_mod=score_mod, mask_mod=mask_mod)


def _definition(query: Array, key: Array, value: Array) -> Array:
    scale = query.shape[-1] ** -0.5
    everything = (None, None, None, None)  # no bias, no mask, no lengths
    window = (None, None)
    return reference.attention(query, key, value, *everything, scale=scale, window=window)[0]


def _heads(width: int) -> int:
    """As many heads of at least 64 as divide the width: 4 for 256, 1 for 32."""
    return next(n for n in range(max(1, width // HEAD_WIDTH), 0, -1) if width % n == 0)
