"""What the examples share: their options, the training loop, and how a picture is saved."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import optax
from jax import Array
from matplotlib.figure import Figure
from tqdm import trange

# Of parameters, a random key that draws the batch, and data.
Loss = Callable[..., Array]


def parser(
    description: str, *, out: str, steps: int, batch: int, learning_rate: float
) -> argparse.ArgumentParser:
    """The options of every example; the arguments are defaults."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=steps, help="training steps")
    parser.add_argument("--batch", type=int, default=batch, help="sequences a step")
    parser.add_argument("--learning-rate", type=float, default=learning_rate, help="at its peak")
    parser.add_argument("--seed", type=int, default=0, help="of parameters and data")
    parser.add_argument("--out", type=Path, default=Path(out), help="the picture")
    return parser


def optimizer(options: argparse.Namespace) -> optax.GradientTransformation:
    """AdamW after clipping; the learning rate rises over a tenth of the steps, then falls to 0."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, options.learning_rate, max(1, options.steps // 10), max(2, options.steps)
    )
    return optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.01)
    )


def train(
    loss: Loss, params: Any, options: argparse.Namespace, data: tuple[Array, ...] = ()
) -> tuple[Any, list[float]]:
    """Minimizes `loss(params, key, *data)`, with a key of its own for every step.

    Returns:
        The trained parameters, and the loss before each step.
    """
    adamw = optimizer(options)

    @jax.jit
    def step(state: tuple, key: Array, *data: Array) -> tuple[tuple, Array]:
        params, moments = state
        value, gradients = jax.value_and_grad(loss)(params, key, *data)
        updates, moments = adamw.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    state = params, adamw.init(params)
    key, curve = jax.random.key(options.seed + 1), []
    progress = trange(options.steps, unit="step")
    for i in progress:
        state, value = step(state, jax.random.fold_in(key, i), *data)
        curve.append(float(value))
        progress.set_postfix(loss=f"{curve[-1]:.3f}")
    return state[0], curve


def finish(figure: Figure, out: Path, reached: dict[str, float]) -> dict[str, float]:
    """Prints what was reached, writes the picture and says where."""
    for name, value in reached.items():
        print(f"{name}: {value:.3g}")
    figure.savefig(out, dpi=120)
    print(f"picture: {out}")
    return reached
