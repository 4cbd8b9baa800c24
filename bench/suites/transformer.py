"""The transformer suite: `tjk.nn.transformer` with attention by tjk, XLA or cuDNN."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from bench import attention_rows
from bench.attention_rows import FIELDS, IMPLEMENTATIONS, KEY, unavailable
from bench.case import OPS, Case, Problem, Selection
from bench.step import one_by_one
from tjk.nn import transformer

__all__ = ["FIELDS", "IMPLEMENTATIONS", "KEY", "cases", "problem", "unavailable"]

QUICK = {256: OPS, 1024: ("forward",)}


def cases(selection: Selection) -> Iterator[Case]:
    """The selected part of the matrix, in the order of the seed's file."""
    return attention_rows.cases("transformer", selection, QUICK)


def problem(case: Case) -> Problem:
    """The case's model, `model_dim` wide, on random sequences."""
    dtype = jnp.dtype(case["dtype"])
    config = transformer.Config(**attention_rows.core(case["model_dim"]))
    key_params, key_x = jax.random.split(jax.random.key(0))
    shape = (case["batch"], case["tokens"], config.width)
    x = jax.random.normal(key_x, shape, jnp.bfloat16)

    def model(params, x, dtype=dtype, implementation="jax_xla"):
        return transformer.apply(params, config, x, dtype=dtype, implementation=implementation)

    def measured(params, x):
        return model(params, x, implementation=attention_rows.implementation(case))

    def exact(params, x):
        return model(params, x, dtype=x.dtype, implementation=attention_rows.definition)

    return Problem(
        params=transformer.init(key_params, config),
        inputs=(x.astype(dtype),),
        measured=measured,
        plain=one_by_one(model),
        exact=one_by_one(exact),
    )
