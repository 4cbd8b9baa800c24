"""U-Net: residual convolution blocks on ever coarser grids and back, with skip connections.

    block(x) = W x + conv(silu(GroupNorm(conv(silu(GroupNorm(x)))))         W from I to O channels

    h_0 = W_in x
    s_i = block(h_i),  h_{i+1} = conv_stride_2(s_i)                         downwards, level i
    u = block(block(s)) at the coarsest level
    u <- block(concat(u, s_i)), then conv_transposed_stride_2(u)            upwards
    y = W_out concat(u, h_0)

No attention and no time. The second convolution of a block starts at zero and W as the identity, so
a block starts as one. Axes on which the kernel has width 1 are not coarsened.

Shapes: x (B, *S, I) -> (B, *S, I), channels last, with as many spatial axes S as the kernel has.
Dtypes: parameters float32; `dtype` is that of the activations and of the operands of every
convolution; GroupNorm's statistics are float32, biases are added in float32.

Ronneberger, Fischer, Brox: U-Net: Convolutional Networks for Biomedical Image Segmentation,
https://arxiv.org/abs/1505.04597
Ho, Jain, Abbeel: Denoising Diffusion Probabilistic Models (the residual block),
https://arxiv.org/abs/2006.11239
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from tjk.checks import fail_value
from tjk.choice import check_implementation
from tjk.nn.layers import Params, at_least_float32, init_layer_norm
from tjk.ops import group_norm

GroupNorm = Callable[..., Array]  # (x, scale, bias, *, groups, epsilon, activation)
Implementation = Literal["triton", "xla"] | GroupNorm | None
BlockParams = dict[str, Params]

_SPATIAL = "DHW"


@dataclass(frozen=True)
class Config:
    """Sizes of the model; with `kernel=(1, 3)` the defaults have 2,803,968 parameters.

    Attributes:
        features: I, channels of input and output.
        widths: channels of each level, the finest first.
        kernel: width of the convolutions along each spatial axis, at most three; each odd. Between
            levels an axis of width k > 1 is halved, or doubled, by a kernel of width k + 1.
        groups: of GroupNorm; must divide every width.
        epsilon: added to GroupNorm's variance.

    Raises:
        ValueError: a size below 1, no level, an even kernel, or groups that do not divide a width.
    """

    features: int = 3
    widths: tuple[int, ...] = (64, 128, 256)
    kernel: tuple[int, ...] = (3, 3)
    groups: int = 32
    epsilon: float = 1e-5

    def __post_init__(self) -> None:
        if not self.widths or min(self.features, self.groups, *self.widths, *self.kernel) < 1:
            fail_value("unet.Config", "all sizes must be at least 1", self)
        if not 1 <= len(self.kernel) <= len(_SPATIAL) or not all(k % 2 for k in self.kernel):
            fail_value("unet.Config", "kernel must be one to three odd numbers", self.kernel)
        if any(width % self.groups for width in self.widths):
            fail_value("unet.Config", "groups must divide every width", self)

    @property
    def levels(self) -> range:
        """The levels' numbers, 0 for the finest."""
        return range(len(self.widths))

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides from one level to the next."""
        return tuple(2 if k > 1 else 1 for k in self.kernel)


def init(key: Array, config: Config) -> dict[str, Params | BlockParams]:
    """Random parameters, all float32: kernels LeCun normal, but the second of each block zero and
    its skip the identity; biases zero, norm scales one.

    Args:
        key: random key.
        config: sizes.

    Returns:
        {"in", "down_0": block, "coarsen_0", "down_1": ..., "middle_0": block, "middle_1": block,
        ..., "refine_0", "up_0": block, "out"}; "coarsen_i" leads from level i to i + 1, "refine_i"
        back. A block is {"norm_in", "conv_in", "norm_out", "conv_out", "skip"}; norms have "scale"
        (C,) and "bias" (C,), convolutions "weight" (*kernel, in, out) and, but for "in", "out" and
        "skip", "bias" (out,).
    """
    widths, kernel = config.widths, config.kernel
    pointwise = (1,) * len(kernel)
    resampling = tuple(k + 1 if k > 1 else 1 for k in kernel)
    keys = iter(jax.random.split(key, 5 * len(widths) + 2))
    params = {"in": _init_conv(next(keys), pointwise, config.features, widths[0], bias=False)}
    for i in config.levels:
        params[f"down_{i}"] = _init_block(next(keys), kernel, widths[i], widths[i])
        if i + 1 in config.levels:
            params[f"coarsen_{i}"] = _init_conv(next(keys), resampling, widths[i], widths[i + 1])
    for name in ("middle_0", "middle_1"):
        params[name] = _init_block(next(keys), kernel, widths[-1], widths[-1])
    for i in reversed(config.levels):
        params[f"up_{i}"] = _init_block(next(keys), kernel, 2 * widths[i], widths[i])
        if i:
            params[f"refine_{i - 1}"] = _init_conv(next(keys), resampling, widths[i], widths[i - 1])
    params["out"] = _init_conv(next(keys), pointwise, 2 * widths[0], config.features, bias=False)
    return params


def _init_block(
    key: Array, kernel: tuple[int, ...], features_in: int, features_out: int
) -> BlockParams:
    conv_out = {
        "weight": jnp.zeros((*kernel, features_out, features_out), jnp.float32),
        "bias": jnp.zeros((features_out,), jnp.float32),
    }
    identity = jnp.eye(features_in, features_out, dtype=jnp.float32)
    return {
        "norm_in": init_layer_norm(features_in),
        "conv_in": _init_conv(key, kernel, features_in, features_out),
        "norm_out": init_layer_norm(features_out),
        "conv_out": conv_out,
        "skip": {"weight": identity.reshape((1,) * len(kernel) + identity.shape)},
    }


def _init_conv(
    key: Array, kernel: tuple[int, ...], features_in: int, features_out: int, *, bias: bool = True
) -> Params:
    shape = (*kernel, features_in, features_out)
    weight = jax.nn.initializers.lecun_normal()(key, shape, jnp.float32)
    return {"weight": weight} | ({"bias": jnp.zeros((features_out,), jnp.float32)} if bias else {})


def apply(
    params: dict[str, Params | BlockParams],
    config: Config,
    x: Array,
    *,
    dtype: DTypeLike = jnp.float32,
    implementation: Implementation = None,
) -> Array:
    """The model's output for a batch of images, or of signals or volumes.

    Differentiable in `params` and `x`; supports jit, grad, vmap and remat.

    Args:
        params: from `init` with the same config.
        config: sizes.
        x: (B, *S, I), floating; cast to `dtype`. A coarsened axis must be divisible by two as often
            as there are steps between levels.
        dtype: floating dtype of activations and of the operands of convolutions.
        implementation: of GroupNorm. None, "triton" or "xla": `tjk.ops.group_norm`; or a function
            to call in its place, with the same arguments.

    Returns:
        (B, *S, I) in `dtype`.

    Raises:
        TypeError: `dtype` or x is not floating.
        ValueError: x has the wrong shape, or the implementation is unknown.

    Example:
        >>> config = Config(widths=(8, 16), groups=4)
        >>> params = init(jax.random.key(0), config)
        >>> apply(params, config, jnp.ones((2, 8, 8, 3))).shape
        (2, 8, 8, 3)
    """
    _check_input(config, x)
    for name, given in (("x", x.dtype), ("dtype", dtype)):
        if not jnp.issubdtype(given, jnp.floating):
            raise TypeError(f"unet.apply: {name} must be floating, got {jnp.dtype(given)}")
    norm = implementation
    if not callable(norm):
        check_implementation("unet.apply", norm)
        norm = functools.partial(group_norm, implementation=norm)
    block = functools.partial(_block, config, norm)

    first = h = _conv(params["in"], x.astype(dtype))
    skips = []
    for i in config.levels:
        h = block(params[f"down_{i}"], h)
        skips.append(h)
        if i + 1 in config.levels:
            h = _conv(params[f"coarsen_{i}"], h, strides=config.strides)
    h = block(params["middle_0"], h)
    h = block(params["middle_1"], h)
    for i in reversed(config.levels):
        h = block(params[f"up_{i}"], jnp.concatenate([h, skips[i]], axis=-1))
        if i:
            h = _conv_transposed(params[f"refine_{i - 1}"], h, strides=config.strides)
    return _conv(params["out"], jnp.concatenate([first, h], axis=-1))


def _check_input(config: Config, x: Array) -> None:
    steps = len(config.widths) - 1
    multiples = tuple(stride**steps for stride in config.strides)
    shape = jnp.shape(x)
    if len(shape) != len(multiples) + 2 or shape[-1] != config.features:
        axes = ", ".join(["B", *_SPATIAL[-len(multiples) :], "I"])
        rule = f"x must have shape ({axes}) with I={config.features}"
        fail_value("unet.apply", rule, shape)
    if any(size % multiple for size, multiple in zip(shape[1:-1], multiples, strict=True)):
        fail_value("unet.apply", f"x's spatial axes must be multiples of {multiples}", shape)


def _block(config: Config, norm: GroupNorm, params: BlockParams, x: Array) -> Array:
    def normalized(params: Params, x: Array) -> Array:
        options = {"groups": config.groups, "epsilon": config.epsilon, "activation": "silu"}
        return norm(x, params["scale"], params["bias"], **options)

    h = _conv(params["conv_in"], normalized(params["norm_in"], x))  # (B, *S, O)
    h = _conv(params["conv_out"], normalized(params["norm_out"], h))  # (B, *S, O)
    return _conv(params["skip"], x) + h


def _conv(params: Params, x: Array, *, strides: tuple[int, ...] | None = None) -> Array:
    """(B, *S, I) -> (B, *S / strides, O), zeros around the image."""
    weight = params["weight"].astype(x.dtype)
    y = jax.lax.conv_general_dilated(
        x,
        weight,
        window_strides=strides or (1,) * (x.ndim - 2),
        padding="SAME",
        dimension_numbers=_dimension_numbers(x),
    )
    return _add_bias(params, y)


def _conv_transposed(params: Params, x: Array, *, strides: tuple[int, ...]) -> Array:
    """(B, *S, I) -> (B, *S * strides, O)."""
    weight = params["weight"].astype(x.dtype)
    y = jax.lax.conv_transpose(x, weight, strides, "SAME", dimension_numbers=_dimension_numbers(x))
    return _add_bias(params, y)


def _dimension_numbers(x: Array) -> tuple[str, str, str]:
    spatial = _SPATIAL[len(_SPATIAL) - (x.ndim - 2) :]
    return f"N{spatial}C", f"{spatial}IO", f"N{spatial}C"


def _add_bias(params: Params, y: Array) -> Array:
    if "bias" not in params:
        return y
    total = at_least_float32(y)  # so that the bias's gradient is added up in it, as in `linear`
    return (total + params["bias"].astype(total.dtype)).astype(y.dtype)
