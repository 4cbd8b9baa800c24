"""Copying: symbols are read, later asked for, in order; by a mixture of experts or a scan.

    python -m examples.copying --model moe
    python -m examples.copying --model ssm --cell gdn

A sequence is N random symbols and then N times "what was next?", and the answer to the i-th is
the i-th symbol. `ssm` is `tjk.nn.ssm`, whose state has to hold all of them. `moe` is causal
attention, which can look them up, and behind it `tjk.nn.moe` in the place of a perceptron, with
the loss that keeps the experts evenly loaded.

What it reaches is the share of right answers; guessing gives 1 / symbols.
"""

import argparse
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from matplotlib.figure import Figure

from examples import common
from tjk.nn import moe, ssm
from tjk.ops import flash_attention, route_top_k

SYMBOLS = 8
HEADS = 4

# Of parameters and tokens (B, T): logits (B, T, SYMBOLS), and a loss to add.
Model = Callable[[dict, Array], tuple[Array, Array]]


def problem(key: Array, batch: int, count: int) -> tuple[Array, Array]:
    """Tokens (B, 2 N), SYMBOLS being the question, and the answers (B, N)."""
    symbols = jax.random.randint(key, (batch, count), 0, SYMBOLS)
    return jnp.concatenate([symbols, jnp.full_like(symbols, SYMBOLS)], 1), symbols


def state_space(key: Array, options: argparse.Namespace) -> tuple[dict, Model]:
    """The model of scans: its parameters, and its function."""
    config = ssm.Config(
        options.cell,
        features=SYMBOLS + 1,
        width=options.width,
        layers=2,
        mlp_width=2 * options.width,
    )

    def model(params: dict, tokens: Array) -> tuple[Array, Array]:
        x = jax.nn.one_hot(tokens, SYMBOLS + 1)
        return ssm.apply(params, config, x)[..., :SYMBOLS], jnp.float32(0)

    return ssm.init(key, config), model


def experts_config(options: argparse.Namespace) -> moe.Config:
    """Sizes of each layer of experts."""
    return moe.Config(d_model=options.width, d_hidden=options.width, experts=4, top_k=2)


def normalized(x: Array) -> Array:
    """RMSNorm without a scale."""
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)


def mixture(key: Array, options: argparse.Namespace) -> tuple[dict, Model]:
    """Two layers of attention and experts: their parameters, and their function."""
    width, length = options.width, 2 * options.count
    linear = jax.nn.initializers.lecun_normal()
    keys = jax.random.split(key, 7)
    params = {
        "embedding": jax.random.normal(keys[0], (SYMBOLS + 1, width)),
        "positions": jax.random.normal(keys[1], (length, width)),
        "head": linear(keys[2], (width, SYMBOLS), jnp.float32),
    }
    for i in range(2):
        params[f"layer_{i}"] = {
            "qkv": linear(keys[3 + i], (width, 3 * width), jnp.float32),
            "out": linear(keys[5 + i], (width, width), jnp.float32),
            "experts": moe.init(jax.random.fold_in(key, i), experts_config(options)),
        }

    def model(params: dict, tokens: Array) -> tuple[Array, Array]:
        h, balance = params["embedding"][tokens] + params["positions"], 0.0
        for i in range(2):
            h, losses, _ = mixture_layer(params[f"layer_{i}"], options, h)
            balance = balance + losses.load_balance
        return normalized(h) @ params["head"], 0.01 * balance

    return params, model


def mixture_layer(
    p: dict, options: argparse.Namespace, h: Array
) -> tuple[Array, moe.Losses, Array]:
    """(B, T, D) -> (B, T, D), the router's losses, and what the experts were given."""
    q, k, v = jnp.split(normalized(h) @ p["qkv"], 3, -1)
    q, k, v = (x.reshape(*x.shape[:2], HEADS, -1) for x in (q, k, v))
    h = h + flash_attention(q, k, v, is_causal=True).reshape(h.shape) @ p["out"]
    given = normalized(h)
    y, losses = moe.apply(p["experts"], experts_config(options), given)
    return h + y, losses, given


def loads(params: dict, options: argparse.Namespace, tokens: Array) -> np.ndarray:
    """How often each expert of the first layer is chosen for each position, (E, T)."""
    p = params["layer_0"]
    h = params["embedding"][tokens] + params["positions"]
    given = mixture_layer(p, options, h)[2]
    logits = moe.router_logits(p["experts"], given)  # (B, T, E)
    B, T, E = logits.shape
    chosen = route_top_k(logits.reshape(-1, E), experts_config(options).top_k)[1]
    return np.asarray(jax.nn.one_hot(chosen, E).sum(1).reshape(B, T, E).mean(0).T)


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Trains, asks and draws; returns what it reached."""
    parser = common.parser(
        __doc__.splitlines()[0], out="copying.png", steps=600, batch=64, learning_rate=1e-2
    )
    parser.add_argument("--model", choices=("moe", "ssm"), default="ssm")
    parser.add_argument("--cell", choices=ssm.CELLS, default="gdn", help="of ssm")
    parser.add_argument("--count", type=int, default=8, help="symbols to copy")
    parser.add_argument("--width", type=int, default=64, help="of the residual stream")
    options = parser.parse_args(arguments)
    count = options.count
    key_init, key_test = jax.random.split(jax.random.key(options.seed))
    params, model = {"moe": mixture, "ssm": state_space}[options.model](key_init, options)

    def loss(params: dict, key: Array) -> Array:
        tokens, answers = problem(key, options.batch, count)
        logits, further = model(params, tokens)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, count:], answers)
        return losses.mean() + further

    params, curve = common.train(loss, params, options)
    tokens, answers = problem(key_test, 256, count)
    right = np.asarray(jax.jit(model)(params, tokens)[0][:, count:].argmax(-1) == answers)

    figure = Figure(figsize=(11, 4), layout="constrained")
    panels = figure.subplots(1, 3 if options.model == "moe" else 2)
    panels[0].plot(curve)
    panels[0].axhline(np.log(SYMBOLS), color="gray", linestyle="--", label="guessing")
    panels[0].set(xlabel="step", ylabel="loss (nats / symbol)")
    panels[0].legend()
    panels[1].plot(range(1, count + 1), right.mean(0), "o-")
    panels[1].axhline(1 / SYMBOLS, color="gray", linestyle="--")
    panels[1].set(xlabel="symbol", ylabel="share of right answers", ylim=(0, 1.05))
    if options.model == "moe":
        image = panels[2].imshow(loads(params, options, tokens), aspect="auto", vmin=0, vmax=1)
        panels[2].set(xlabel="position", ylabel="expert of the first layer", yticks=range(4))
        figure.colorbar(image, label="share of tokens")
    reached = {"loss": float(np.mean(curve[-20:])), "right answers": float(right.mean())}
    return common.finish(figure, options.out, reached)


if __name__ == "__main__":
    main()
