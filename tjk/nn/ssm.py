"""State-space model: layers of a scan over time and a multilayer perceptron.

    h = W_in x + b_in
    h <- h + (W_1 c + b_1) * sigmoid(W_2 c + b_2)         c = gelu(cell(LayerNorm(LayerNorm(h))))
    h <- h + gelu(W_4 gelu(W_3 n + b_3) + b_4)            n = LayerNorm(h)
    y = W_out LayerNorm(h) + b_out

The cell is one of five (`tjk.nn.cells`). Every second layer runs its cell from the last position to
the first. gelu is the tanh approximation (`jax.nn.gelu`'s default).

Shapes: x (B, L, I) -> (B, L, I); inside D channels, hidden width F.
Dtypes: parameters float32; `dtype` is that of the activations and of the operands of every matrix
product; LayerNorm's statistics, the states and their decays are float32.

Smith, Warrington, Linderman: Simplified State Space Layers for Sequence Modeling (the layer around
the cell), https://arxiv.org/abs/2208.04933
"""

import functools
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from tjk import ops
from tjk.checks import check_shape, fail_value
from tjk.choice import check_implementation
from tjk.nn.cells import CELLS, CellParams, Scans
from tjk.nn.layers import Params, init_layer_norm, init_linear, layer_norm, linear

Cell = Literal["lru", "mamba", "ssd", "mamba2", "gdn"]
Implementation = Literal["triton", "xla"] | Scans | None
LayerParams = dict[str, Params | CellParams]

# What a rematerialised layer keeps besides its input: what costs more to make again than its bytes.
_SAVED = (
    "ssm_cell",
    "ssm_mlp",
    "selective_scan_states",
    "ssd_scan_states",
    "gated_delta_rule_states",
)


@dataclass(frozen=True)
class Config:
    """Sizes of the model. By default it has 995,728 (lru), 930,704 (mamba), 863,644 (ssd),
    1,136,064 (mamba2) or 1,006,144 (gdn) parameters.

    Attributes:
        cell: what mixes the positions.
        features: I, the width of input and output.
        width: D, the width of the residual stream.
        layers: number of layers.
        mlp_width: F, the hidden width of the multilayer perceptron.
        state: size of the state: lru's number of complex states, R of mamba, ssd and mamba2. None
            is 64 for mamba2, else D. gdn's state is its head width.
        head_width: channels of a head, P: must divide what is cut in heads. None is D for ssd, 64
            for mamba2, 32 for gdn. lru and mamba have no heads.
        expand: mamba2's inner width / D.
        conv_width: W of the causal convolutions of mamba2 and gdn.
        epsilon: added to the variance of the norms.

    Raises:
        ValueError: an unknown cell, a size below 1, or heads that do not divide the width.
    """

    cell: Cell = "mamba2"
    features: int = 16
    width: int = 128
    layers: int = 4
    mlp_width: int = 512
    state: int | None = None
    head_width: int | None = None
    expand: int = 2
    conv_width: int = 4
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        if self.cell not in CELLS:
            fail_value("ssm.Config", f"cell must be one of {', '.join(CELLS)}", repr(self.cell))
        state = {"mamba2": 64}.get(self.cell, self.width)
        head_width = {"mamba2": 64, "gdn": 32}.get(self.cell, self.width)
        object.__setattr__(self, "state", state if self.state is None else self.state)
        chosen = head_width if self.head_width is None else self.head_width
        object.__setattr__(self, "head_width", chosen)
        sizes = ("features", "width", "layers", "mlp_width", "state", "head_width", "expand")
        for name in (*sizes, "conv_width"):
            if getattr(self, name) < 1:
                fail_value("ssm.Config", f"{name} must be at least 1", self)
        if self.inner % self.head_width:
            fail_value("ssm.Config", "head_width must divide what is cut in heads", self)

    @property
    def inner(self) -> int:
        """The width that is cut in heads."""
        return self.width * (self.expand if self.cell == "mamba2" else 1)

    @property
    def heads(self) -> int:
        """H, the number of heads."""
        return self.inner // self.head_width


def init(key: Array, config: Config) -> dict[str, Params | LayerParams]:
    """Random parameters, all float32: weights LeCun normal, biases zero, norm scales one.

    Decays and steps are spread as in the cells' papers: see `tjk.nn.cells`.

    Args:
        key: random key.
        config: sizes.

    Returns:
        {"in", "layer_0": {"norm", "norm_cell", "cell", "value", "gate", "norm_mlp", "mlp_in",
        "mlp_out"}, "layer_1": ..., "norm", "out"}; norms have "scale" and "bias", the others
        "weight" (in, out) and "bias", the cell what `tjk.nn.cells` says.
    """
    key_in, key_out, *keys = jax.random.split(key, 2 + config.layers)
    return {
        "in": init_linear(key_in, config.features, config.width),
        **{f"layer_{i}": _init_layer(key, config) for i, key in enumerate(keys)},
        "norm": init_layer_norm(config.width),
        "out": init_linear(key_out, config.width, config.features),
    }


def _init_layer(key: Array, config: Config) -> LayerParams:
    keys = jax.random.split(key, 5)
    D, F = config.width, config.mlp_width
    init_cell, _ = CELLS[config.cell]
    return {
        "norm": init_layer_norm(D),
        "norm_cell": init_layer_norm(D),
        "cell": init_cell(keys[0], config),
        "value": init_linear(keys[1], D, D),
        "gate": init_linear(keys[2], D, D),
        "norm_mlp": init_layer_norm(D),
        "mlp_in": init_linear(keys[3], D, F),
        "mlp_out": init_linear(keys[4], F, D),
    }


def apply(
    params: dict[str, Params | LayerParams],
    config: Config,
    x: Array,
    *,
    dtype: DTypeLike = jnp.float32,
    remat: bool = False,
    implementation: Implementation = None,
) -> Array:
    """The model's output for a batch of sequences.

    Differentiable in `params` and `x`; supports jit, grad, vmap and remat.

    Args:
        params: from `init` with the same config.
        config: sizes.
        x: (B, L, I), floating; cast to `dtype`.
        dtype: floating dtype of activations and of the operands of matrix products.
        remat: whether each layer's activations are made again in the backward pass, but for the
            outputs of cell and perceptron and the scans' states. A training step of the default
            sizes then needs a third of the memory, and some more arithmetic.
        implementation: of the scans and convolutions. None, "triton" or "xla": those of `tjk.ops`;
            or the functions to call in their place.

    Returns:
        (B, L, I) in `dtype`.

    Raises:
        TypeError: `dtype` or x is not floating.
        ValueError: x has the wrong shape, or the implementation is unknown.

    Example:
        >>> config = Config("gdn", features=3, width=32, layers=2, mlp_width=64)
        >>> params = init(jax.random.key(0), config)
        >>> apply(params, config, jnp.ones((2, 16, 3))).shape
        (2, 16, 3)
    """
    check_shape("ssm.apply", "x", x, "BLI", {"I": config.features})
    for name, given in (("x", x.dtype), ("dtype", dtype)):
        if not jnp.issubdtype(given, jnp.floating):
            raise TypeError(f"ssm.apply: {name} must be floating, got {jnp.dtype(given)}")
    scans = implementation if isinstance(implementation, Scans) else _scans(implementation)
    layer = functools.partial(_layer, config, scans)
    if remat:
        policy = jax.checkpoint_policies.save_only_these_names(*_SAVED)
        layer = jax.checkpoint(layer, policy=policy, static_argnums=(2,))
    h = linear(params["in"], x.astype(dtype))  # (B, L, D)
    for i in range(config.layers):
        h = layer(params[f"layer_{i}"], h, i % 2 == 1)
    h = layer_norm(params["norm"], h, epsilon=config.epsilon)
    return linear(params["out"], h)  # (B, L, I)


def _scans(implementation: Literal["triton", "xla"] | None) -> Scans:
    """The operations of `tjk.ops` in one implementation."""
    check_implementation("ssm.apply", implementation)
    functions = (getattr(ops, name) for name in Scans._fields)
    return Scans(*(functools.partial(f, implementation=implementation) for f in functions))


def _layer(config: Config, scans: Scans, params: LayerParams, h: Array, reverse: bool) -> Array:
    _, cell = CELLS[config.cell]
    n = layer_norm(params["norm"], h, epsilon=config.epsilon)  # (B, L, D)
    n = layer_norm(params["norm_cell"], n, epsilon=config.epsilon)  # (B, L, D)
    mixed = checkpoint_name(cell(params["cell"], config, n, scans, reverse), "ssm_cell")
    c = jax.nn.gelu(mixed)  # (B, L, D)
    h = h + linear(params["value"], c) * jax.nn.sigmoid(linear(params["gate"], c))  # (B, L, D)

    n = layer_norm(params["norm_mlp"], h, epsilon=config.epsilon)  # (B, L, D)
    hidden = jax.nn.gelu(linear(params["mlp_in"], n))  # (B, L, F)
    out = checkpoint_name(linear(params["mlp_out"], hidden), "ssm_mlp")
    return h + jax.nn.gelu(out)  # (B, L, D)
