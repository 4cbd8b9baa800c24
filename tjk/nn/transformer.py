"""Pre-norm transformer: blocks of unmasked self-attention and a GELU multilayer perceptron.

    x <- x + W_o attention(W_q n, W_k n, W_v n) + b_o     n = LayerNorm(x)
    x <- x + W_2 gelu(W_1 n + b_1) + b_2                  n = LayerNorm(x)

All projections have a bias; there is no embedding, no input or output projection, no position
encoding and no final norm. gelu is the tanh approximation (`jax.nn.gelu`'s default).

Shapes: x (B, T, D) -> (B, T, D); D = N H for N heads of width H; hidden width F.
Dtypes: parameters float32; `dtype` is that of the activations and of the operands of every matrix
product; LayerNorm's statistics and the softmax are float32.

Vaswani et al.: Attention Is All You Need, https://arxiv.org/abs/1706.03762
Xiong et al.: On Layer Normalization in the Transformer Architecture (pre-norm),
https://arxiv.org/abs/2002.04745
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from tjk.checks import check_shape, fail_value
from tjk.nn.layers import (
    Implementation,
    Params,
    attention,
    init_layer_norm,
    init_linear,
    layer_norm,
    linear,
)


@dataclass(frozen=True)
class Config:
    """Sizes of the model; the defaults have 3,159,040 parameters.

    Attributes:
        width: D, the width of the residual stream.
        heads: N, the number of attention heads; must divide D.
        blocks: number of blocks.
        mlp_width: F, the hidden width of the multilayer perceptron.
        epsilon: added to LayerNorm's variance.

    Raises:
        ValueError: a size below 1, or heads that do not divide width.
    """

    width: int = 256
    heads: int = 4
    blocks: int = 4
    mlp_width: int = 1024
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        for name in ("width", "heads", "blocks", "mlp_width"):
            if getattr(self, name) < 1:
                fail_value("transformer.Config", f"{name} must be at least 1", self)
        if self.width % self.heads:
            fail_value("transformer.Config", "heads must divide width", self)


def init(key: Array, config: Config) -> dict[str, dict[str, Params]]:
    """Random parameters: weights LeCun normal, biases zero, norm scales one; all float32.

    Args:
        key: random key.
        config: sizes.

    Returns:
        {"block_0": {"norm_attention", "query", "key", "value", "output", "norm_mlp", "mlp_in",
        "mlp_out"}, "block_1": ...}; norms have "scale" (D,) and "bias" (D,), the others "weight"
        (in, out) and "bias" (out,).
    """
    keys = jax.random.split(key, config.blocks)
    return {f"block_{i}": init_block(keys[i], config) for i in range(config.blocks)}


def init_block(key: Array, config: Config) -> dict[str, Params]:
    """Random parameters of one block: see `init`."""
    keys = iter(jax.random.split(key, 6))
    width, mlp_width = config.width, config.mlp_width
    return {
        "norm_attention": init_layer_norm(width),
        "query": init_linear(next(keys), width, width),
        "key": init_linear(next(keys), width, width),
        "value": init_linear(next(keys), width, width),
        "output": init_linear(next(keys), width, width),
        "norm_mlp": init_layer_norm(width),
        "mlp_in": init_linear(next(keys), width, mlp_width),
        "mlp_out": init_linear(next(keys), mlp_width, width),
    }


def apply(
    params: dict[str, dict[str, Params]],
    config: Config,
    x: Array,
    *,
    dtype: DTypeLike = jnp.float32,
    implementation: Implementation = None,
) -> Array:
    """The model's output for a batch of sequences.

    Differentiable in `params` and `x`; supports jit, grad, vmap and remat.

    Args:
        params: from `init` with the same config.
        config: sizes.
        x: (B, T, D), floating; cast to `dtype`.
        dtype: floating dtype of activations and of the operands of matrix products.
        implementation: of the attention. None, "triton" or "xla": `tjk.ops.flash_attention`;
            "jax_xla" or "jax_cudnn": the baselines of `jax.nn.dot_product_attention`; or a
            function of query, key and value, each (B, T, N, H), that returns (B, T, N, H).

    Returns:
        (B, T, D) in `dtype`.

    Raises:
        TypeError: `dtype` or x is not floating, or "jax_cudnn" with a dtype other than bfloat16
            and float16.
        ValueError: x has the wrong shape, or the implementation is unknown.

    Example:
        >>> config = Config(width=64, heads=1, blocks=2, mlp_width=128)
        >>> params = init(jax.random.key(0), config)
        >>> apply(params, config, jnp.ones((2, 16, 64))).shape
        (2, 16, 64)
    """
    check_shape("transformer.apply", "x", x, "BTD", {"D": config.width})
    for name, given in (("x", x.dtype), ("dtype", dtype)):
        if not jnp.issubdtype(given, jnp.floating):
            raise TypeError(f"transformer.apply: {name} must be floating, got {jnp.dtype(given)}")
    x = x.astype(dtype)
    for i in range(config.blocks):
        x = block(params[f"block_{i}"], config, x, implementation=implementation)
    return x


def block(
    params: dict[str, Params],
    config: Config,
    x: Array,
    *,
    implementation: Implementation,
    modulate: Callable[[str, Array], Array] = lambda name, n: n,
) -> Array:
    """One block, (B, T, D) -> (B, T, D).

    `modulate` is a function of a norm's name ("norm_attention", "norm_mlp") and output, (B, T, D),
    whose result takes the output's place.
    """
    # Three projections, not one fused: each output is contiguous, as a kernel wants its operand.
    heads = (*x.shape[:2], config.heads, config.width // config.heads)
    n = layer_norm(params["norm_attention"], x, epsilon=config.epsilon)  # (B, T, D)
    n = modulate("norm_attention", n)
    query = linear(params["query"], n).reshape(heads)  # (B, T, N, H)
    key = linear(params["key"], n).reshape(heads)  # (B, T, N, H)
    value = linear(params["value"], n).reshape(heads)  # (B, T, N, H)
    attended = attention(query, key, value, implementation=implementation)  # (B, T, N, H)
    x = x + linear(params["output"], attended.reshape(x.shape))  # (B, T, D)

    n = layer_norm(params["norm_mlp"], x, epsilon=config.epsilon)  # (B, T, D)
    n = modulate("norm_mlp", n)
    hidden = jax.nn.gelu(linear(params["mlp_in"], n))  # (B, T, F)
    return x + linear(params["mlp_out"], hidden)  # (B, T, D)
