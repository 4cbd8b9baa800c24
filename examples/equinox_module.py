"""`selective_scan` inside an Equinox module, which learns when to remember.

    python -m examples.equinox_module

A signal comes with a flag now and then. The output is the signal where the last flag stood: the
scan's step size must be large there, so that the state takes the value, and near 0 elsewhere.

What it reaches is the mean squared error, beside that of the best constant.
"""

from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from matplotlib.figure import Figure

from examples import common
from tjk.ops import selective_scan

FLAGS = 0.05  # share of the positions


class Layer(eqx.Module):
    """A gated selective scan with a residual, (B, L, D) -> (B, L, D)."""

    norm: eqx.nn.LayerNorm
    inputs: eqx.nn.Linear
    steps: eqx.nn.Linear
    states: eqx.nn.Linear
    out: eqx.nn.Linear
    log_decay: Array

    def __init__(self, width: int, state: int, *, key: Array):
        keys = jax.random.split(key, 4)
        self.norm = eqx.nn.LayerNorm(width)
        self.inputs = eqx.nn.Linear(width, 2 * width, key=keys[0])
        self.steps = eqx.nn.Linear(width, width, key=keys[1])
        self.states = eqx.nn.Linear(width, 2 * state, key=keys[2])
        self.out = eqx.nn.Linear(width, width, key=keys[3])
        self.log_decay = jnp.log(jnp.tile(jnp.arange(1.0, state + 1), (width, 1)))

    def __call__(self, x: Array) -> Array:
        def each(layer: eqx.Module, x: Array) -> Array:
            return jax.vmap(jax.vmap(layer))(x)

        h, gate = jnp.split(each(self.inputs, each(self.norm, x)), 2, -1)
        B, C = jnp.split(each(self.states, h), 2, -1)  # (B, L, R) each
        delta, A = each(self.steps, h), -jnp.exp(self.log_decay)  # (B, L, D), (D, R)
        y = selective_scan(h, delta, A, B, C, delta_softplus=True)
        return x + each(self.out, y * jax.nn.silu(gate))


class Model(eqx.Module):
    """Two layers between a projection of (signal, flag) and one of the output."""

    into: eqx.nn.Linear
    layers: list[Layer]
    out: eqx.nn.Linear

    def __init__(self, width: int, *, key: Array):
        keys = jax.random.split(key, 4)
        self.into = eqx.nn.Linear(2, width, key=keys[0])
        self.layers = [Layer(width, 8, key=k) for k in keys[1:3]]
        self.out = eqx.nn.Linear(width, 1, key=keys[3])

    def __call__(self, x: Array) -> Array:
        """(B, L, 2) -> (B, L)."""
        h = jax.vmap(jax.vmap(self.into))(x)
        for layer in self.layers:
            h = layer(h)
        return jax.vmap(jax.vmap(self.out))(h)[..., 0]


def problem(key: Array, batch: int, length: int) -> tuple[Array, Array]:
    """Signal and flag (B, L, 2), the first position always flagged; and what to remember (B, L)."""
    key_signal, key_flag = jax.random.split(key)
    signal = jax.random.uniform(key_signal, (batch, length), minval=-1.0)
    flag = jax.random.bernoulli(key_flag, FLAGS, (batch, length)).at[:, 0].set(True)
    last = jax.lax.cummax(jnp.where(flag, jnp.arange(length), 0), axis=1)
    return jnp.stack([signal, flag.astype(signal.dtype)], -1), jnp.take_along_axis(signal, last, 1)


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Trains, remembers and draws; returns what it reached."""
    parser = common.parser(
        __doc__.splitlines()[0], out="equinox_module.png", steps=300, batch=16, learning_rate=5e-3
    )
    parser.add_argument("--length", type=int, default=128, help="positions of a sequence")
    parser.add_argument("--width", type=int, default=32, help="of the residual stream")
    options = parser.parse_args(arguments)
    model = Model(options.width, key=jax.random.key(options.seed))
    params, static = eqx.partition(model, eqx.is_array)

    def loss(params: Model, key: Array) -> Array:
        x, expected = problem(key, options.batch, options.length)
        return jnp.square(eqx.combine(params, static)(x) - expected).mean()

    params, curve = common.train(loss, params, options)
    model = eqx.combine(params, static)
    x, expected = problem(jax.random.key(options.seed + 2), 64, options.length)
    output = eqx.filter_jit(model)(x)

    figure = Figure(figsize=(11, 4), layout="constrained")
    over_steps, one = figure.subplots(1, 2, width_ratios=(1, 2))
    over_steps.semilogy(curve)
    over_steps.set(xlabel="step", ylabel="mean squared error")
    flagged = np.flatnonzero(np.asarray(x[0, :, 1]))
    one.plot(np.asarray(x[0, :, 0]), ".", color="lightgray", label="signal")
    one.plot(flagged, np.asarray(x[0, flagged, 0]), "o", label="flagged")
    one.plot(np.asarray(expected[0]), color="gray", linestyle="--", label="to remember")
    one.plot(np.asarray(output[0]), label="output")
    one.set(xlabel="position")
    one.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=4)
    reached = {
        "error of the best constant": float(jnp.var(expected)),
        "error": float(jnp.square(output - expected).mean()),
    }
    return common.finish(figure, options.out, reached)


if __name__ == "__main__":
    main()
