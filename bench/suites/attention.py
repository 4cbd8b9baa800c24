"""The attention suite: the operation alone, masked and modified, by tjk, XLA or cuDNN.

The model is attention of queries, keys and values that are inputs, each times a gain of H
parameters, so that a train_step needs all three gradients.
"""

import functools
from collections.abc import Iterator
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bench.case import DTYPES, OPS, Case, Problem, Selection
from bench.step import one_by_one
from tjk.ops import flash_attention, flex_attention, masks
from tjk.ops.attention import reference

KEY = "impl"
FIELDS = ("variant", "impl", "dtype", "tokens", "batch", "model_dim", "op")
IMPLEMENTATIONS = ("tjk", "tjk_flex", "jax_xla", "jax_cudnn")
VARIANTS = ("causal", "window", "document", "alibi", "soft_cap")

# Lengths and what is run at each: everything on a GPU, what takes minutes on two CPU cores.
FULL = {1024: OPS, 4096: OPS, 16384: OPS}
QUICK = {1024: ("forward",)}
BATCH = 4
QUICK_BATCH = 1
MODEL_DIM = 256
HEAD_WIDTH = 64
WINDOW = 256
DOCUMENT = 300
CAP = 50.0


def cases(selection: Selection) -> Iterator[Case]:
    """The selected part of the matrix; none of it by cell or resolution."""
    if selection.cells or selection.resolutions:
        return
    lengths = dict.fromkeys(selection.tokens, OPS) or (FULL if selection.full else QUICK)
    batches = (BATCH,) if selection.full else (QUICK_BATCH,)
    for variant, dtype, (tokens, ops), batch, model_dim, impl in product(
        VARIANTS,
        selection.dtypes or DTYPES,
        lengths.items(),
        selection.batch or batches,
        selection.model_dim or (MODEL_DIM,),
        [i for i in IMPLEMENTATIONS if i in (selection.implementations or IMPLEMENTATIONS)],
    ):
        if impl == "jax_cudnn" and (dtype == "float32" or variant == "soft_cap"):
            continue  # cuDNN's attention takes 16-bit operands only, and has no soft cap
        if impl == "tjk" and variant == "alibi":
            continue  # a function of positions: flex_attention's
        for op in ops:
            yield {
                "suite": "attention",
                "variant": variant,
                "impl": impl,
                "dtype": dtype,
                "tokens": tokens,
                "batch": batch,
                "model_dim": model_dim,
                "op": op,
            }


def unavailable(case: Case, platform: str) -> str | None:
    """Why the case cannot exist on that platform, or None."""
    if case["impl"] == "jax_cudnn" and platform != "gpu":
        return f"cuDNN needs an NVIDIA GPU, the platform is {platform}"
    return None


def problem(case: Case) -> Problem:
    """The case's attention, heads of 64, on random arrays."""
    T, N, dtype = case["tokens"], max(1, case["model_dim"] // HEAD_WIDTH), jnp.dtype(case["dtype"])
    H = case["model_dim"] // N
    attend = {"tjk": _flash, "tjk_flex": _flex, "jax_xla": _xla, "jax_cudnn": _cudnn}
    keys = jax.random.split(jax.random.key(0), 3)
    shape = (case["batch"], T, N, H)
    inputs = [jax.random.normal(key, shape, jnp.bfloat16) for key in keys]

    def model(params, *inputs, attend=attend["jax_xla"]):
        gained = (x * params[name].astype(x.dtype) for name, x in zip(_NAMES, inputs))
        return attend(case["variant"], *gained)

    return Problem(
        params={name: jnp.ones(H) for name in _NAMES},
        inputs=tuple(x.astype(dtype) for x in inputs),
        measured=functools.partial(model, attend=attend[case["impl"]]),
        plain=one_by_one(model),
        exact=one_by_one(functools.partial(model, attend=_definition)),
    )


_NAMES = ("query", "key", "value")


def _slopes(heads: int) -> np.ndarray:
    """ALiBi's: 2^(-8 n / N) for head n from 1."""
    return np.float32(2.0 ** (-8 * np.arange(1, heads + 1) / heads))


def _ids(tokens: int) -> np.ndarray:
    """Documents of 300 tokens, the last one shorter."""
    return np.arange(tokens, dtype=np.int32) // DOCUMENT


def _alibi(tokens: int, heads: int) -> Array:
    """The bias (1, N, T, T), zero on the diagonal."""
    t = np.arange(tokens, dtype=np.float32)
    return jnp.asarray(-_slopes(heads)[None, :, None, None] * (t[:, None] - t))


def _flash(variant: str, query: Array, key: Array, value: Array) -> Array:
    ids = jnp.broadcast_to(_ids(query.shape[1]), query.shape[:2])
    options: dict[str, Any] = {
        "causal": {},
        "window": {"local_window_size": (WINDOW, 0)},
        "document": {"segment_ids": ids},
        "soft_cap": {"logits_soft_cap": CAP},
    }[variant]
    return flash_attention(query, key, value, is_causal=True, **options)


def _flex(variant: str, query: Array, key: Array, value: Array) -> Array:
    slopes, ids = jnp.asarray(_slopes(query.shape[2])), jnp.asarray(_ids(query.shape[1]))

    def alibi(score, b, h, q_idx, kv_idx):
        return score - slopes[h] * (q_idx - kv_idx).astype(score.dtype)

    def soft_cap(score, b, h, q_idx, kv_idx):
        return CAP * jnp.tanh(score / CAP)

    options: dict[str, Any] = {
        "causal": {"mask_mod": masks.causal},
        "window": {"mask_mod": masks.sliding_window(WINDOW, 0)},
        "document": {"mask_mod": masks.causal & masks.document(ids)},
        "alibi": {"mask_mod": masks.causal, "score_mod": alibi},
        "soft_cap": {"mask_mod": masks.causal, "score_mod": soft_cap},
    }[variant]
    return flex_attention(query, key, value, **options)


def _visible(variant: str, tokens: int) -> np.ndarray:
    """The causal mask (T, T), and what the variant hides besides."""
    t, s = np.ogrid[:tokens, :tokens]
    visible = s <= t
    if variant == "window":
        visible &= s >= t - WINDOW
    if variant == "document":
        visible &= _ids(tokens)[:, None] == _ids(tokens)
    return visible


def _jax(variant: str, query: Array, key: Array, value: Array, implementation: str) -> Array:
    T, N = query.shape[1:3]
    options: dict[str, Any] = {"is_causal": True, "implementation": implementation}
    if variant == "window":
        options["local_window_size"] = (WINDOW, 0)
    if variant == "document":
        options["mask"] = jnp.asarray(_visible(variant, T))[None, None]
    if variant == "alibi":
        bias = _alibi(T, N)
        options["bias"] = bias if implementation == "xla" else bias.astype(query.dtype)
    return jax.nn.dot_product_attention(query, key, value, **options)


def _cudnn(variant: str, query: Array, key: Array, value: Array) -> Array:
    return _jax(variant, query, key, value, "cudnn")


def _xla(variant: str, query: Array, key: Array, value: Array) -> Array:
    """As JAX has it; a soft cap it has not: its own steps, with that between."""
    if variant != "soft_cap":
        return _jax(variant, query, key, value, "xla")
    logits = jnp.einsum("btnh,bsnh->bnts", query, key, preferred_element_type=jnp.float32)
    logits = CAP * jnp.tanh(logits * (query.shape[-1] ** -0.5 / CAP))
    logits = jnp.where(_visible(variant, query.shape[1]), logits, -1e30)
    weights = jax.nn.softmax(logits, axis=-1).astype(value.dtype)
    return jnp.einsum("bnts,bsnv->btnv", weights, value)


def _definition(variant: str, query: Array, key: Array, value: Array) -> Array:
    T, N, H = query.shape[1:]
    return reference.attention(
        *(query, key, value),
        _alibi(T, N) if variant == "alibi" else None,
        jnp.asarray(_visible(variant, T))[None, None],
        *(None, None),
        scale=H**-0.5,
        window=(None, None),
        score=(lambda x, *at: CAP * jnp.tanh(x / CAP)) if variant == "soft_cap" else None,
    )[0]
