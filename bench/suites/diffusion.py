"""The diffusion suite: `tjk.nn.diffusion` with attention by tjk, XLA or cuDNN."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from bench import attention_rows
from bench.attention_rows import FIELDS, IMPLEMENTATIONS, KEY, unavailable
from bench.case import OPS, Case, Problem, Selection
from bench.step import disturbed, one_by_one
from tjk.nn import diffusion, transformer

__all__ = ["FIELDS", "IMPLEMENTATIONS", "KEY", "cases", "problem", "unavailable"]

QUICK = {256: OPS}


def cases(selection: Selection) -> Iterator[Case]:
    """The selected part of the matrix, in the order of the seed's file."""
    return attention_rows.cases("diffusion", selection, QUICK)


def problem(case: Case) -> Problem:
    """The case's model, `model_dim` wide, on random sequences at random times."""
    dtype = jnp.dtype(case["dtype"])
    core = transformer.Config(**attention_rows.core(case["model_dim"]))
    config = diffusion.Config(core=core)
    key_params, key_noise, key_x, key_t = jax.random.split(jax.random.key(0), 4)
    shape = (case["batch"], case["tokens"], config.features)
    x = jax.random.normal(key_x, shape, jnp.bfloat16)
    t = jax.random.uniform(key_t, shape[:1], jnp.float32)

    def model(params, x, t, dtype=dtype, implementation="jax_xla"):
        return diffusion.apply(params, config, x, t, dtype=dtype, implementation=implementation)

    def measured(params, x, t):
        return model(params, x, t, implementation=attention_rows.implementation(case))

    def exact(params, x, t):
        return model(params, x, t, dtype=x.dtype, implementation=attention_rows.definition)

    return Problem(
        params=disturbed(key_noise, diffusion.init(key_params, config)),
        inputs=(x.astype(dtype), t),
        measured=measured,
        plain=one_by_one(model),
        exact=one_by_one(exact),
        learning_rate=1e-3,
    )
