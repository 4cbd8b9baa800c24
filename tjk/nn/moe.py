"""Mixture of experts: a linear router and gated multilayer perceptrons, each token through k.

    x' = x rounded to `dtype`,   logits = x' W_router
    y = sum over the k experts e of the largest logits of   softmax(these logits)_e E_e(x')
    E_e(x') = (a(x' W_gate,e) * (x' W_up,e)) W_down,e

No projection has a bias, and no token is dropped.

Shapes: x (..., D) -> (..., D); E experts of hidden width F, k a token.
Dtypes: parameters float32; `dtype` is that of the activations and of the operands of the experts'
matrix products. The router's logits are float32 products of float32 operands whatever `dtype` is: a
rounding there would send tokens to other experts.

Shazeer et al.: Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts Layer,
https://arxiv.org/abs/1701.06538
Shazeer: GLU Variants Improve Transformer, https://arxiv.org/abs/2002.05202
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from tjk.checks import fail_value
from tjk.nn.layers import Params, at_least_float32
from tjk.ops import load_balance_loss, moe_mlp, route_top_k, router_z_loss

# Of x (M, D), w_gate, w_up, w_down, weights (M, k), experts (M, k).
Experts = Callable[[Array, Array, Array, Array, Array, Array], Array]
Implementation = Literal["triton", "xla"] | Experts | None


@dataclass(frozen=True)
class Config:
    """Sizes of the model; the defaults have 12,587,008 parameters.

    Attributes:
        d_model: D, the width of a token.
        d_hidden: F, the hidden width of an expert.
        experts: E, the number of experts.
        top_k: k, how many experts a token goes to.
        activation: a: "silu", "gelu" (tanh approximation) or "relu".

    Raises:
        ValueError: a size below 1, more experts a token than there are, or another activation.
    """

    d_model: int = 512
    d_hidden: int = 1024
    experts: int = 8
    top_k: int = 2
    activation: Literal["silu", "gelu", "relu"] = "silu"

    def __post_init__(self) -> None:
        for name in ("d_model", "d_hidden", "experts", "top_k"):
            if getattr(self, name) < 1:
                fail_value("moe.Config", f"{name} must be at least 1", self)
        if self.top_k > self.experts:
            fail_value("moe.Config", "top_k must be at most experts", self)
        if self.activation not in ("silu", "gelu", "relu"):
            fail_value("moe.Config", "activation must be 'silu', 'gelu' or 'relu'", self)


class Losses(NamedTuple):
    """The router's auxiliary losses, for the caller to weigh and add; scalars.

    Attributes:
        load_balance: `tjk.ops.load_balance_loss`, 1 if the experts are evenly loaded.
        router_z: `tjk.ops.router_z_loss`.
    """

    load_balance: Array
    router_z: Array


def init(key: Array, config: Config) -> dict[str, Params]:
    """Random parameters, LeCun normal (truncated, variance 1 / inputs), all float32.

    Args:
        key: random key.
        config: sizes.

    Returns:
        {"router", "gate", "up", "down"}, each {"weight"}: (D, E), (E, D, F), (E, D, F), (E, F, D).
    """
    D, F, E = config.d_model, config.d_hidden, config.experts
    one, each = (jax.nn.initializers.lecun_normal(batch_axis=axes) for axes in ((), (0,)))
    keys = jax.random.split(key, 4)
    return {
        "router": {"weight": one(keys[0], (D, E), jnp.float32)},
        "gate": {"weight": each(keys[1], (E, D, F), jnp.float32)},
        "up": {"weight": each(keys[2], (E, D, F), jnp.float32)},
        "down": {"weight": each(keys[3], (E, F, D), jnp.float32)},
    }


def apply(
    params: dict[str, Params],
    config: Config,
    x: Array,
    *,
    dtype: DTypeLike = jnp.float32,
    implementation: Implementation = None,
) -> tuple[Array, Losses]:
    """The layer's output for each token, and the router's losses.

    Differentiable in `params` and `x`; supports jit, grad, vmap and remat.

    Args:
        params: from `init` with the same config.
        config: sizes.
        x: (..., D), floating; cast to `dtype`.
        dtype: floating dtype of activations and of the operands of the experts' matrix products.
        implementation: None, "triton" or "xla": of `tjk.ops.moe_mlp` and `tjk.ops.route_top_k`;
            or, in moe_mlp's place, a function of its positional arguments, with an activation of
            its own; the routing is "xla" then.

    Returns:
        (..., D) in `dtype`, and the losses.

    Raises:
        TypeError: `dtype` or x is not floating.
        ValueError: x has the wrong shape, or the implementation is unknown.

    Example:
        >>> config = Config(d_model=8, d_hidden=16, experts=4)
        >>> params = init(jax.random.key(0), config)
        >>> y, losses = apply(params, config, jnp.ones((2, 16, 8)))
        >>> y.shape
        (2, 16, 8)
    """
    if x.ndim < 1 or x.shape[-1] != config.d_model:
        fail_value("moe.apply", f"x must have shape (..., D) with D={config.d_model}", x.shape)
    for name, given in (("x", x.dtype), ("dtype", dtype)):
        if not jnp.issubdtype(given, jnp.floating):
            raise TypeError(f"moe.apply: {name} must be floating, got {jnp.dtype(given)}")
    tokens = x.reshape(-1, config.d_model).astype(dtype)  # (M, D)
    logits = router_logits(params, tokens)  # (M, E)
    if callable(implementation):
        layer, routing = implementation, "xla"
    else:
        options = {"activation": config.activation, "implementation": implementation}
        layer, routing = functools.partial(moe_mlp, **options), implementation
    weights, experts = route_top_k(logits, config.top_k, implementation=routing)  # (M, k)
    matrices = (params[name]["weight"].astype(dtype) for name in ("gate", "up", "down"))
    y = layer(tokens, *matrices, weights, experts)  # (M, D)
    losses = Losses(load_balance_loss(logits, experts), router_z_loss(logits))
    return y.reshape(x.shape), losses


def router_logits(params: dict[str, Params], x: Array) -> Array:
    """The router's logits of tokens (M, D), (M, E): float32 (float64 for float64)."""
    x = at_least_float32(x)
    return jnp.dot(x, params["router"]["weight"].astype(x.dtype), precision="highest")
