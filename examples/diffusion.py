"""A diffusion model of two moons: `tjk.nn.diffusion`, trained by flow matching.

    python -m examples.diffusion

A sequence is 32 points of the plane, drawn independently. Between noise x_0 and data x_1 lies
x_t = (1 - t) x_0 + t x_1; the model learns the velocity x_1 - x_0 from x_t and t. Samples are what
noise becomes when it follows the velocity from t = 0 to t = 1 (Heun's method).

What it reaches is the energy distance of samples to data: 0 for equal distributions. That of data
to other data, and that of noise, stand beside it.

Lipman et al.: Flow Matching for Generative Modeling, https://arxiv.org/abs/2210.02747
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from matplotlib.figure import Figure
from scipy.spatial.distance import cdist

from examples import common
from tjk.nn import diffusion, transformer

POINTS = 32  # of a sequence


def moons(key: Array, shape: tuple[int, ...]) -> Array:
    """Points on two interleaved half circles, (*shape, 2), a little noisy."""
    key_angle, key_moon, key_noise = jax.random.split(key, 3)
    angle = jnp.pi * jax.random.uniform(key_angle, shape)
    upper = jnp.stack([jnp.cos(angle) - 0.5, jnp.sin(angle) - 0.25], -1)
    sign = jnp.where(jax.random.bernoulli(key_moon, shape=shape), 1.0, -1.0)
    return upper * sign[..., None] + 0.07 * jax.random.normal(key_noise, (*shape, 2))


def sample(velocity: Callable[[Array, Array], Array], noise: Array, steps: int) -> Array:
    """Where each of `steps` steps leads, (steps, *noise.shape)."""

    def step(x: Array, t: Array) -> tuple[Array, Array]:
        first = velocity(x, t)
        second = velocity(x + first / steps, t + 1 / steps)
        x = x + (first + second) / (2 * steps)
        return x, x

    return jax.lax.scan(step, noise, jnp.arange(steps) / steps)[1]


def energy_distance(x: np.ndarray, y: np.ndarray) -> float:
    """2 E|x - y| - E|x - x'| - E|y - y'| of points (N, 2)."""
    return float(2 * cdist(x, y).mean() - cdist(x, x).mean() - cdist(y, y).mean())


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Trains, samples and draws; returns what it reached."""
    parser = common.parser(
        __doc__.splitlines()[0], out="diffusion.png", steps=800, batch=64, learning_rate=2e-3
    )
    parser.add_argument("--width", type=int, default=64, help="of the residual stream")
    parser.add_argument("--blocks", type=int, default=3, help="of the transformer")
    parser.add_argument("--sampling-steps", type=int, default=40, help="from noise to a sample")
    options = parser.parse_args(arguments)
    core = transformer.Config(
        width=options.width, heads=2, blocks=options.blocks, mlp_width=4 * options.width
    )
    config = diffusion.Config(
        features=2, core=core, time_width=options.width, modulation_width=options.width
    )

    def loss(params: dict, key: Array) -> Array:
        key_noise, key_data, key_time = jax.random.split(key, 3)
        x_1 = moons(key_data, (options.batch, POINTS))
        x_0 = jax.random.normal(key_noise, x_1.shape)
        t = jax.random.uniform(key_time, (options.batch,))
        x_t = x_0 + t[:, None, None] * (x_1 - x_0)
        return jnp.square(diffusion.apply(params, config, x_t, t) - (x_1 - x_0)).mean()

    key_init, key_noise, key_data, key_other = jax.random.split(jax.random.key(options.seed), 4)
    params, curve = common.train(loss, diffusion.init(key_init, config), options)

    noise = jax.random.normal(key_noise, (64, POINTS, 2))

    @jax.jit
    def follow(params: dict, noise: Array) -> Array:
        def velocity(x: Array, t: Array) -> Array:
            return diffusion.apply(params, config, x, jnp.full(len(x), t))

        return sample(velocity, noise, options.sampling_steps)

    paths = np.asarray(follow(params, noise)).reshape(options.sampling_steps, -1, 2)
    start = np.asarray(noise).reshape(-1, 2)
    data, other = (np.asarray(moons(key, (len(start),))) for key in (key_data, key_other))

    figure = Figure(figsize=(13, 4), layout="constrained")
    axes = figure.subplots(1, 4, width_ratios=(1.2, 1, 1, 1))
    axes[0].plot(curve, linewidth=0.7)
    axes[0].set(xlabel="step", ylabel="mean squared error of the velocity", ylim=(0, None))
    for panel, points, title in (
        (axes[1], data, "data"),
        (axes[2], start, "noise and a few paths"),
        (axes[3], paths[-1], "samples"),
    ):
        panel.scatter(*points.T, s=2)
        panel.set(title=title, xlim=(-2.5, 2.5), ylim=(-2.5, 2.5), aspect="equal")
    axes[2].plot(*np.concatenate([start[None], paths])[:, :40].transpose(2, 0, 1), "gray", lw=0.5)
    reached = {
        "energy distance of noise": energy_distance(start, data),
        "energy distance of samples": energy_distance(paths[-1], data),
        "energy distance of other data": energy_distance(other, data),
    }
    return common.finish(figure, options.out, reached)


if __name__ == "__main__":
    main()
