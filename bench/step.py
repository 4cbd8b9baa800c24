"""The two timed functions, built from a model: `forward` and `train_step`."""

from typing import Any

import jax
import jax.numpy as jnp

from bench.case import Model
from tjk.nn.layers import at_least_float32


def jitted_step(model: Model, op: str, learning_rate: float) -> jax.stages.Wrapped:
    """One jitted function of (params, *inputs).

    forward: the model's output. train_step: loss = mean(output^2), taken in float32, and the
    parameters after one step of plain gradient descent; the given ones are donated.

    Returns:
        The output, or (loss, updated parameters).
    """
    if op == "forward":
        return jax.jit(model)

    def train_step(params, *inputs):
        def loss(params):
            return jnp.square(at_least_float32(model(params, *inputs))).mean()

        value, gradients = jax.value_and_grad(loss)(params)
        return value, jax.tree.map(lambda p, g: p - learning_rate * g, params, gradients)

    return jax.jit(train_step, donate_argnums=0)


def disturbed(key: jax.Array, params: Any) -> Any:
    """The parameters plus noise: one that starts at zero hides from a check what is before it."""
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(key, len(leaves))
    noisy = [x + 0.02 * jax.random.normal(k, x.shape, x.dtype) for x, k in zip(leaves, keys)]
    return jax.tree.unflatten(tree, noisy)


def next_params(op: str, params: Any, outcome: Any) -> Any:
    """The parameters for the next call: a train_step has donated the ones it was given."""
    return outcome[1] if op == "train_step" else params


def one_by_one(model: Model) -> Model:
    """The same function of a batch, one example at a time and rematerialised.

    The plain-JAX references of a whole batch need more memory than the models they judge.
    """

    @jax.checkpoint
    def one(params, *example):
        return model(params, *(x[None] for x in example))[0]

    return lambda params, *inputs: jax.lax.map(lambda example: one(params, *example), inputs)
