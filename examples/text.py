"""A language model of characters: causal attention in `tjk.nn.transformer`, trained on real text.

    python -m examples.text

The text is what Python's `help()` knows of the language, which ships with its standard library.
The transformer has neither embedding nor mask. Both are added here: an embedding, positions and an
output head around it, and `flash_attention` with `is_causal=True` in place of its attention.

What it reaches is the cross-entropy in bits a character, of text that it was trained on and of text
that it was not, below the entropy of the single characters.
"""

import functools
import math
from collections.abc import Sequence
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from matplotlib.figure import Figure

from examples import common
from tjk.nn import transformer
from tjk.ops import flash_attention

Params = dict[str, Array | dict]

causal_attention = functools.partial(flash_attention, is_causal=True)


def read_text() -> str:
    """The topics of `help()`, each paragraph once: some topics are excerpts of others."""
    return "\n\n".join(dict.fromkeys("\n\n".join(topics.values()).split("\n\n")))


def init(key: Array, config: transformer.Config, characters: int, length: int) -> Params:
    """{"embedding" (V, D), "positions" (T, D), "core", "head" (D, V)}."""
    keys = jax.random.split(key, 4)
    width = config.width
    return {
        "embedding": jax.random.normal(keys[0], (characters, width)),
        "positions": 0.1 * jax.random.normal(keys[1], (length, width)),
        "core": transformer.init(keys[2], config),
        "head": jax.random.normal(keys[3], (width, characters)) / width,
    }


def apply(params: Params, config: transformer.Config, tokens: Array) -> Array:
    """Logits of the next character, (B, T) -> (B, T, V) float32."""
    x = params["embedding"][tokens] + params["positions"]  # (B, T, D)
    y = transformer.apply(params["core"], config, x, implementation=causal_attention)
    return y @ params["head"]


def bits(params: Params, config: transformer.Config, windows: Array) -> Array:
    """Cross-entropy in bits of each character but the first, (B, T + 1) -> (B, T)."""
    logits = apply(params, config, windows[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]) / math.log(2)


def continuation(
    params: Params, config: transformer.Config, prompt: Array, key: Array, count: int
) -> Array:
    """`count` characters sampled one after the other, from a prompt (T,) on."""

    def next_character(window: Array, key: Array) -> tuple[Array, Array]:
        logits = apply(params, config, window[None])[0, -1]  # (V,)
        token = jax.random.categorical(key, logits / 0.8).astype(window.dtype)
        return jnp.append(window[1:], token), token

    return jax.lax.scan(next_character, prompt, jax.random.split(key, count))[1]


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Trains, samples and draws; returns what it reached."""
    parser = common.parser(
        __doc__.splitlines()[0], out="text.png", steps=600, batch=16, learning_rate=8e-3
    )
    parser.add_argument("--width", type=int, default=128, help="of the residual stream")
    parser.add_argument("--blocks", type=int, default=2, help="of the transformer")
    parser.add_argument("--length", type=int, default=128, help="characters of a sequence")
    parser.add_argument("--sample", type=int, default=300, help="characters to sample at the end")
    options = parser.parse_args(arguments)
    length = options.length
    config = transformer.Config(
        width=options.width, heads=4, blocks=options.blocks, mlp_width=4 * options.width
    )

    text = read_text()
    alphabet = sorted(set(text))
    tokens = np.searchsorted(alphabet, list(text)).astype(np.int32)
    frequencies = np.bincount(tokens) / tokens.size
    entropy = float(-(frequencies * np.log2(frequencies)).sum())
    train, test = jnp.split(jnp.asarray(tokens), [tokens.size * 9 // 10])
    count = min(128, test.size // (length + 1))
    windows = test[: count * (length + 1)].reshape(count, length + 1)

    def loss(params: Params, key: Array, text: Array) -> Array:
        starts = jax.random.randint(key, (options.batch, 1), 0, text.size - length)
        return bits(params, config, text[starts + jnp.arange(length + 1)]).mean()

    key_init, key_sample = jax.random.split(jax.random.key(options.seed))
    params = init(key_init, config, len(alphabet), length)
    params, curve = common.train(loss, params, options, (train,))
    held_out = jax.jit(functools.partial(bits, config=config))(params, windows=windows)

    write = functools.partial(continuation, config=config, count=options.sample)
    sampled = jax.jit(write)(params, prompt=windows[0, 1:], key=key_sample)
    print("".join(alphabet[token] for token in np.asarray(sampled)))

    figure = Figure(figsize=(10, 4), layout="constrained")
    over_steps, over_context = figure.subplots(1, 2, sharey=True)
    over_steps.plot(curve, label="training text")
    over_steps.set(xlabel="step", ylabel="cross-entropy (bits / character)")
    over_context.plot(range(1, length + 1), np.asarray(held_out.mean(0)), label="held-out text")
    over_context.set(xlabel="characters of context", xscale="log")
    for axes in (over_steps, over_context):
        axes.axhline(entropy, color="gray", linestyle="--", label="single characters")
        axes.legend()
    reached = {
        "entropy of single characters": entropy,
        "training bits": float(np.mean(curve[-20:])),
        "held-out bits": float(held_out.mean()),
    }
    return common.finish(figure, options.out, reached)


if __name__ == "__main__":
    main()
