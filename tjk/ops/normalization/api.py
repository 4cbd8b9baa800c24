"""`group_norm`: contract, checks, choice of implementation, rule of differentiation."""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike

from tjk import checks, choice
from tjk.choice import Implementation
from tjk.manual_axes import vary_together
from tjk.ops.normalization import xla
from tjk.precision import accumulator

_OP = "group_norm"


def group_norm(
    x: ArrayLike,
    scale: ArrayLike,
    bias: ArrayLike,
    *,
    groups: int,
    epsilon: float = 1e-5,
    activation: Literal["silu"] | None = None,
    implementation: Implementation = None,
) -> Array:
    r"""Normalizes each example over all positions and a group of neighbouring channels.

    .. math::
        y = a\Bigl(\frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}}\, s + b\Bigr)

    with mean and (biased) variance of the example's group. All arithmetic is float32 (float64 for
    float64), y is rounded once. The variance is the mean of squared deviations, so a mean far from
    0 takes no digits from it. Two runs give the same bits, forward and backward.

    Differentiable in x, scale and bias. The backward pass keeps x, scale and bias, and mean and
    1 / sqrt(variance + epsilon) of each group, the latter two under the checkpoint name
    "group_norm_statistics".

    ============== ================================== ========
    implementation dtypes of x                        shapes
    ============== ================================== ========
    "triton"       float32, bfloat16, float16         any
    "xla"          those and float64                  any
    None           "triton" on a GPU, "xla" elsewhere
    ============== ================================== ========

    Source: Wu, He: Group Normalization, https://arxiv.org/abs/1803.08494.

    Args:
        x: (B, *spatial, C), any number of spatial axes, also none.
        scale: (C,), any floating dtype.
        bias: (C,), any floating dtype.
        groups: of C / groups channels each; with C of them this is instance norm.
        epsilon: added to the variance.
        activation: a: None or "silu".
        implementation: "triton", "xla", or None to choose when the program is lowered. A name
            never falls back: it runs or raises.

    Returns:
        y (B, *spatial, C) in x's dtype.

    Raises:
        TypeError: for a dtype other than these.
        ValueError: for a shape or value that does not fit; for "triton" lowered for a CPU without
            the interpreter.
        NotImplementedError: for "triton" with float64.

    Example:
        >>> import jax.numpy as jnp
        >>> from tjk.ops import group_norm
        >>> x = jnp.ones((2, 16, 16, 64))
        >>> group_norm(x, jnp.ones(64), jnp.zeros(64), groups=32, activation="silu").shape
        (2, 16, 16, 64)
    """
    x, scale, bias = (jnp.asarray(a) for a in (x, scale, bias))
    _check(x, scale, bias, groups, epsilon, activation)
    choice.check_implementation(_OP, implementation)
    if x.dtype == jnp.float64:
        if implementation == "triton":
            raise NotImplementedError(
                f"{_OP}: implementation='triton' does not take float64; use implementation='xla' "
                "or None"
            )
        implementation = "xla"
    if x.size == 0:
        return x
    exact = accumulator(x.dtype)
    operands = vary_together(
        x.reshape(len(x), -1, x.shape[-1]), scale.astype(exact), bias.astype(exact)
    )
    options = _Options(implementation, groups, float(epsilon), activation)
    return _group_norm(*operands, options).reshape(x.shape)


def _check(
    x: Array, scale: Array, bias: Array, groups: int, epsilon: float, activation: str | None
) -> None:
    if x.ndim < 2:
        checks.fail_value(_OP, "x must have shape (B, *spatial, C)", x.shape)
    checks.check_dtype(_OP, "x", x, ("float32", "bfloat16", "float16", "float64"))
    C = x.shape[-1]
    for name, a in (("scale", scale), ("bias", bias)):
        checks.check_shape(_OP, name, a, "C", {"C": C})
        if not jnp.issubdtype(a.dtype, jnp.floating):
            raise TypeError(f"{_OP}: {name} must have a floating dtype, got {a.dtype}")
    if not isinstance(groups, int) or groups < 1 or C % groups:
        checks.fail_value(_OP, f"groups must be a positive integer that divides C={C}", groups)
    if not epsilon >= 0:
        checks.fail_value(_OP, "epsilon must not be negative", epsilon)
    if activation not in (None, "silu"):
        checks.fail_value(_OP, "activation must be None or 'silu'", repr(activation))


@dataclasses.dataclass(frozen=True)
class _Options:
    """What is fixed while a program is traced."""

    implementation: Implementation
    groups: int
    epsilon: float
    activation: str | None

    def forward(self, *operands: Array) -> tuple[Array, Array, Array]:
        """y, and of each group mean and 1 / sqrt(variance + epsilon)."""
        return self._call("forward", *operands, epsilon=self.epsilon)

    def backward(self, *operands: Array) -> tuple[Array, Array, Array]:
        """The gradients of x, scale and bias."""
        return self._call("backward", *operands)

    def _call(
        self, direction: Literal["forward", "backward"], *operands: Array, **options: Any
    ) -> Any:
        options = {"groups": self.groups, "activation": self.activation} | options

        def triton(*operands: Array) -> Any:
            from tjk.ops.normalization import (
                triton,
            )  # needs the package triton, which Linux alone has

            return getattr(triton, direction)(*operands, **options)

        def plain(*operands: Array) -> Any:
            return getattr(xla, direction)(*operands, **options)

        return choice.dispatch(self.implementation, triton, plain, *operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _group_norm(x: Array, scale: Array, bias: Array, options: _Options) -> Array:
    return options.forward(x, scale, bias)[0]


def _forward(x: Array, scale: Array, bias: Array, options: _Options) -> Any:
    y, *statistics = options.forward(x, scale, bias)
    return y, (x, scale, bias, *(checkpoint_name(a, "group_norm_statistics") for a in statistics))


def _backward(options: _Options, residuals: Any, d_y: Array) -> tuple[Array, Array, Array]:
    return options.backward(*residuals, d_y)


_group_norm.defvjp(_forward, _backward)
