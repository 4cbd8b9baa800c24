"""`flash_attention` inside a Flax NNX module, which learns to sort.

    python -m examples.flax_nnx

A sequence of numbers goes through two pre-norm layers of attention in both directions; for each
place the model says which of the values 0 to 15 stands there once they are sorted.

What it reaches is the share of right values; the right answer is known only from all numbers.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array
from matplotlib.figure import Figure

from examples import common
from tjk.ops import flash_attention

VALUES = 16


class Layer(nnx.Module):
    """Pre-norm attention and a perceptron, (B, T, D) -> (B, T, D)."""

    def __init__(self, width: int, heads: int, *, rngs: nnx.Rngs):
        self.heads = heads
        self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(2)])
        self.qkv = nnx.Linear(width, 3 * width, rngs=rngs)
        self.out = nnx.Linear(width, width, rngs=rngs)
        self.mlp = nnx.Sequential(
            nnx.Linear(width, 4 * width, rngs=rngs), jax.nn.gelu,
            nnx.Linear(4 * width, width, rngs=rngs),
        )  # fmt: skip

    def __call__(self, x: Array) -> Array:
        B, T, D = x.shape
        qkv = self.qkv(self.norms[0](x)).reshape(B, T, 3, self.heads, D // self.heads)
        attended = flash_attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2])  # (B, T, N, H)
        x = x + self.out(attended.reshape(B, T, D))
        return x + self.mlp(self.norms[1](x))


class Sorter(nnx.Module):
    """Numbers (B, T) to logits of the sorted ones, (B, T, VALUES)."""

    def __init__(self, length: int, width: int, *, rngs: nnx.Rngs):
        self.values = nnx.Embed(VALUES, width, rngs=rngs)
        self.positions = nnx.Embed(length, width, rngs=rngs)
        self.layers = nnx.List([Layer(width, 4, rngs=rngs) for _ in range(2)])
        self.head = nnx.Linear(width, VALUES, rngs=rngs)

    def __call__(self, numbers: Array) -> Array:
        x = self.values(numbers) + self.positions(jnp.arange(numbers.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Trains, sorts and draws; returns what it reached."""
    parser = common.parser(
        __doc__.splitlines()[0], out="flax_nnx.png", steps=600, batch=64, learning_rate=3e-3
    )
    parser.add_argument("--length", type=int, default=24, help="numbers of a sequence")
    parser.add_argument("--width", type=int, default=64, help="of the residual stream")
    options = parser.parse_args(arguments)
    sorter = Sorter(options.length, options.width, rngs=nnx.Rngs(options.seed))
    graph, params = nnx.split(sorter)

    def draw(key: Array, batch: int) -> Array:
        return jax.random.randint(key, (batch, options.length), 0, VALUES)

    def loss(params: nnx.State, key: Array) -> Array:
        numbers = draw(key, options.batch)
        logits, expected = nnx.merge(graph, params)(numbers), jnp.sort(numbers)
        return optax.softmax_cross_entropy_with_integer_labels(logits, expected).mean()

    params, curve = common.train(loss, params, options)
    numbers = draw(jax.random.key(options.seed + 2), 256)
    answers = nnx.jit(lambda model, x: model(x).argmax(-1))(nnx.merge(graph, params), numbers)
    right = np.asarray(answers == jnp.sort(numbers))

    figure = Figure(figsize=(10, 4), layout="constrained")
    over_steps, one = figure.subplots(1, 2)
    over_steps.plot(curve)
    over_steps.set(xlabel="step", ylabel="loss (nats / number)", ylim=(0, None))
    one.plot(np.asarray(numbers[0]), "o", color="gray", label="given")
    one.step(range(options.length), np.asarray(jnp.sort(numbers[0])), where="mid", label="sorted")
    one.plot(np.asarray(answers[0]), "x", label="answer")
    one.set(xlabel="place", ylabel="number")
    one.legend()
    reached = {"loss": float(np.mean(curve[-20:])), "right values": float(right.mean())}
    return common.finish(figure, options.out, reached)


if __name__ == "__main__":
    main()
