"""Diffusion transformer: the transformer's blocks, conditioned on a time by modulated norms.

    h = W_in x + b_in + positions
    h <- block(h), with LayerNorm(h) (1 + scale) + shift in place of every LayerNorm(h)
    y = W_out h + b_out

    scale, shift = W_b gelu(W_a e + b_a) + b_b            a pair of its own for every norm
    e = W_2 silu(W_1 f + b_1) + b_2                       f = (cos 2 pi w t, sin 2 pi w t)

The frequencies w are learned. The second layer of every modulation starts at zero, so the model
starts as one that does not know the time. Positions are sinusoidal, without parameters. There is no
gate and no final norm. gelu is the tanh approximation (`jax.nn.gelu`'s default).

Shapes: x (B, T, I), t (B,) -> (B, T, I); inside D channels.
Dtypes: parameters float32; `dtype` is that of the activations and of the operands of every matrix
product; t and its features, LayerNorm's statistics and the softmax are float32.

Peebles, Xie: Scalable Diffusion Models with Transformers, https://arxiv.org/abs/2212.09748
Tancik et al.: Fourier Features Let Networks Learn High Frequency Functions in Low Dimensional
Domains, https://arxiv.org/abs/2006.10739
"""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from tjk.checks import check_shape, fail_value
from tjk.nn import transformer
from tjk.nn.layers import Implementation, Params, at_least_float32, init_linear, linear

NORMS = ("norm_attention", "norm_mlp")
# The longest of the positions' wavelengths is 2 pi times this (Vaswani et al.).
_LONGEST = 10_000


@dataclass(frozen=True)
class Config:
    """Sizes of the model; the defaults have 5,817,896 parameters.

    Attributes:
        features: I, the width of input and output.
        core: sizes of the blocks; D is `core.width`.
        frequencies: number of learned frequencies of the time; its features are twice as many.
        frequency_scale: standard deviation of the frequencies at the start, in periods per unit of
            time.
        time_width: width of the time's embedding e.
        modulation_width: hidden width of each modulation.

    Raises:
        ValueError: a size below 1.
    """

    features: int = 8
    core: transformer.Config = field(default_factory=transformer.Config)
    frequencies: int = 32
    frequency_scale: float = 1.0
    time_width: int = 128
    modulation_width: int = 512

    def __post_init__(self) -> None:
        for name in ("features", "frequencies", "time_width", "modulation_width"):
            if getattr(self, name) < 1:
                fail_value("diffusion.Config", f"{name} must be at least 1", self)


def init(key: Array, config: Config) -> dict[str, Params | dict[str, Params]]:
    """Random parameters, all float32: weights LeCun normal, but zero where a modulation ends;
    biases zero, norm scales one, frequencies normal.

    Args:
        key: random key.
        config: sizes.

    Returns:
        {"in", "time": {"frequencies"}, "time_hidden", "time_out", "block_0": {the transformer's,
        and "norm_attention_hidden", "norm_attention_modulation", "norm_mlp_hidden",
        "norm_mlp_modulation"}, "block_1": ..., "out"}. But for the frequencies (F,) and the norms
        all have "weight" (in, out) and "bias" (out,); a modulation's columns are first those of the
        scale, then those of the shift.
    """
    key_in, key_out, key_time, *keys = jax.random.split(key, 3 + config.core.blocks)
    key_frequencies, key_hidden, key_embedding = jax.random.split(key_time, 3)
    frequencies = jax.random.normal(key_frequencies, (config.frequencies,), jnp.float32)
    return {
        "in": init_linear(key_in, config.features, config.core.width),
        "time": {"frequencies": config.frequency_scale * frequencies},
        "time_hidden": init_linear(key_hidden, 2 * config.frequencies, config.time_width),
        "time_out": init_linear(key_embedding, config.time_width, config.time_width),
        **{f"block_{i}": _init_block(key, config) for i, key in enumerate(keys)},
        "out": init_linear(key_out, config.core.width, config.features),
    }


def _init_block(key: Array, config: Config) -> dict[str, Params]:
    key_block, *keys = jax.random.split(key, 1 + len(NORMS))
    params = transformer.init_block(key_block, config.core)
    for norm, key_norm in zip(NORMS, keys, strict=True):
        hidden = init_linear(key_norm, config.time_width, config.modulation_width)
        params[f"{norm}_hidden"] = hidden
        params[f"{norm}_modulation"] = {
            "weight": jnp.zeros((config.modulation_width, 2 * config.core.width), jnp.float32),
            "bias": jnp.zeros((2 * config.core.width,), jnp.float32),
        }
    return params


def apply(
    params: dict[str, Params | dict[str, Params]],
    config: Config,
    x: Array,
    t: Array,
    *,
    dtype: DTypeLike = jnp.float32,
    implementation: Implementation = None,
) -> Array:
    """The model's output for a batch of sequences, each at a time of its own.

    Differentiable in `params`, `x` and `t`; supports jit, grad, vmap and remat.

    Args:
        params: from `init` with the same config.
        config: sizes.
        x: (B, T, I), floating; cast to `dtype`.
        t: (B,), floating: times, usually between 0 and 1; cast to float32 at least.
        dtype: floating dtype of activations and of the operands of matrix products.
        implementation: of the attention, as in `tjk.nn.transformer.apply`.

    Returns:
        (B, T, I) in `dtype`.

    Raises:
        TypeError: `dtype`, x or t is not floating, or "jax_cudnn" with a dtype other than bfloat16
            and float16.
        ValueError: x or t has the wrong shape, or the implementation is unknown.

    Example:
        >>> core = transformer.Config(width=64, heads=1, blocks=2, mlp_width=128)
        >>> config = Config(features=2, core=core)
        >>> params = init(jax.random.key(0), config)
        >>> apply(params, config, jnp.ones((3, 16, 2)), jnp.linspace(0.0, 1.0, 3)).shape
        (3, 16, 2)
    """
    check_shape("diffusion.apply", "x", x, "BTI", {"I": config.features})
    check_shape("diffusion.apply", "t", t, "B", {"B": x.shape[0]})
    for name, given in (("x", x.dtype), ("t", t.dtype), ("dtype", dtype)):
        if not jnp.issubdtype(given, jnp.floating):
            raise TypeError(f"diffusion.apply: {name} must be floating, got {jnp.dtype(given)}")
    embedding = _embed_time(params, t, dtype)  # (B, E)
    h = linear(params["in"], x.astype(dtype))  # (B, T, D)
    h = h + _positions(*h.shape[1:]).astype(dtype)
    for i in range(config.core.blocks):
        h = _block(params[f"block_{i}"], config, h, embedding, implementation)
    return linear(params["out"], h)  # (B, T, I)


def _embed_time(params: dict[str, Params], t: Array, dtype: DTypeLike) -> Array:
    t = at_least_float32(t)
    angles = 2 * jnp.pi * t[:, None] * params["time"]["frequencies"].astype(t.dtype)  # (B, F)
    features = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)  # (B, 2 F)
    hidden = jax.nn.silu(linear(params["time_hidden"], features.astype(dtype)))  # (B, E)
    return linear(params["time_out"], hidden)  # (B, E)


def _positions(length: int, width: int) -> Array:
    """(T, D): sines in the first half of the channels, cosines of the same angles in the second."""
    wavelengths = _LONGEST ** jnp.linspace(0.0, 1.0, -(-width // 2), endpoint=False)
    angles = jnp.arange(length, dtype=wavelengths.dtype)[:, None] / wavelengths  # (T, D / 2)
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)[:, :width]


def _block(
    params: dict[str, Params],
    config: Config,
    h: Array,
    embedding: Array,
    implementation: Implementation,
) -> Array:
    def modulate(norm: str, n: Array) -> Array:
        hidden = jax.nn.gelu(linear(params[f"{norm}_hidden"], embedding))  # (B, M)
        scale, shift = jnp.split(linear(params[f"{norm}_modulation"], hidden), 2, axis=-1)
        return n * (1 + scale[:, None]) + shift[:, None]  # (B, T, D)

    return transformer.block(
        params, config.core, h, implementation=implementation, modulate=modulate
    )
