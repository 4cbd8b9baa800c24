"""`causal_conv1d`: contract, checks, choice of implementation, rule of differentiation."""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from tjk import choice, segments
from tjk.choice import Implementation
from tjk.manual_axes import vary_together
from tjk.ops.convolution import xla
from tjk.ops.convolution.operands import Operands, accumulator, check

_OP = "causal_conv1d"


def causal_conv1d(
    x: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    activation: Literal["silu"] | None = None,
    initial_state: ArrayLike | None = None,
    return_final_state: bool = False,
    segment_ids: ArrayLike | None = None,
    reverse: bool = False,
    implementation: Implementation = None,
) -> Array | tuple[Array, Array]:
    r"""A short causal convolution along time, each channel by itself.

    .. math::
        y_t = a\Bigl(\sum_{j=0}^{W-1} w_j\, x_{t-(W-1)+j} + b\Bigr)

    w_{W-1} multiplies the current input. What stands before the first position is the initial
    state, or 0. The sum is float32 (float64 for float64), y is rounded once. Two runs give the same
    bits, forward and backward.

    Differentiable in x, weight, bias and the initial state, also through the final state. The
    backward pass keeps the inputs and makes the sum again.

    ============== ================================== ========
    implementation dtypes                             D
    ============== ================================== ========
    "triton"       float32, bfloat16, float16         any
    "xla"          those and float64                  any
    None           "triton" on a GPU, "xla" elsewhere
    ============== ================================== ========

    Source: Gu, Dao: Mamba, https://arxiv.org/abs/2312.00752 (the convolution before the scan).

    Args:
        x: (B, L, D).
        weight: (D, W), W from 2 to 4, in x's dtype or float32.
        bias: (D,), in x's dtype or float32.
        activation: a: None or "silu".
        initial_state: (B, W - 1, D) float32: the inputs before the first position, the most recent
            one last; None is zeros.
        return_final_state: whether the last W - 1 inputs are returned, too.
        segment_ids: (B, L) integers: where the id changes, inputs from before count as 0, in the
            final state, too.
        reverse: whether time runs from the last position to the first.
        implementation: "triton", "xla", or None to choose when the program is lowered. A name
            never falls back: it runs or raises.

    Returns:
        y (B, L, D) in x's dtype; with return_final_state (y, state), state (B, W - 1, D) float32.

    Raises:
        TypeError: for a dtype other than these (or float64 for all).
        ValueError: for a shape or value that does not fit, W = 1 included: that is a product; for
            "triton" lowered for a CPU without the interpreter.
        NotImplementedError: for "triton" with float64.

    Example:
        >>> import jax.numpy as jnp
        >>> from tjk.ops import causal_conv1d
        >>> causal_conv1d(jnp.ones((2, 100, 8)), jnp.ones((8, 4)), activation="silu").shape
        (2, 100, 8)
    """
    state = ("initial_state", initial_state)
    operands = check(_OP, "L", x, weight, bias, state, activation)
    x = operands.x
    runs = segments.runs(_OP, segment_ids, x.shape[:2], reverse)
    choice.check_implementation(_OP, implementation)
    if x.dtype == jnp.float64:
        if implementation == "triton":
            raise NotImplementedError(
                f"{_OP}: implementation='triton' does not take float64; use implementation='xla' "
                "or None"
            )
        implementation = "xla"
    operands = Operands(*vary_together(*operands._replace(runs=runs)))
    options = _Options(implementation, activation, reverse)
    y = _causal_conv1d(operands, options) if x.size else jnp.zeros_like(x)
    return (y, _final_state(operands, reverse)) if return_final_state else y


def _final_state(operands: Operands, reverse: bool) -> Array:
    """The last W - 1 inputs, 0 where they are of another segment than the last position."""
    x, weight, _, state, runs = operands
    B, L, D = x.shape
    kept = weight.shape[1] - 1
    exact = accumulator(x.dtype)
    if state is None:
        state = jnp.zeros((B, kept, D), exact)
    count = min(kept, L)

    def last(a: Array) -> Array:
        return jnp.flip(a[:, :count], 1) if reverse else a[:, L - count :]

    inputs = jnp.concatenate((state[:, count:], last(x).astype(exact)), axis=1)
    if runs is None or L == 0:
        return inputs
    runs = jnp.pad(last(runs), ((0, 0), (kept - count, 0)))  # the initial state's is 0
    return jnp.where((runs == runs[:, -1:])[:, :, None], inputs, jnp.zeros((), exact))


@dataclasses.dataclass(frozen=True)
class _Options:
    """What is fixed while a program is traced."""

    implementation: Implementation
    activation: str | None
    reverse: bool

    def call(self, direction: Literal["forward", "backward"], *operands: Any) -> Any:
        """Calls the chosen implementation's function of that name."""
        options = {"activation": self.activation, "reverse": self.reverse}

        def triton(*operands: Any) -> Any:
            from tjk.ops.convolution import (
                triton,
            )  # needs the package triton, which Linux alone has

            return getattr(triton, direction)(*operands, **options)

        def plain(*operands: Any) -> Any:
            return getattr(xla, direction)(*operands, **options)

        return choice.dispatch(self.implementation, triton, plain, *operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _causal_conv1d(operands: Operands, options: _Options) -> Array:
    return options.call("forward", operands)


def _forward(operands: Operands, options: _Options) -> tuple[Array, Operands]:
    return options.call("forward", operands), operands


def _backward(options: _Options, operands: Operands, d_y: Array) -> tuple[Operands]:
    d_x, d_weight, d_bias = options.call("backward", operands, d_y)
    return (Operands(d_x, d_weight, d_bias, _d_initial_state(options, operands, d_y), None),)


def _d_initial_state(options: _Options, operands: Operands, d_y: Array) -> Array | None:
    """Through the first W - 1 positions alone: too few for a kernel."""
    state = operands.initial_state
    if state is None:
        return None
    L = d_y.shape[1]
    count = min(state.shape[1], L)
    first = slice(L - count, L) if options.reverse else slice(0, count)
    runs = None if operands.runs is None else operands.runs[:, first]
    near = operands._replace(x=operands.x[:, first], runs=runs)

    def outputs(state: Array) -> Array:
        near_y = near._replace(initial_state=state)
        return xla.forward(near_y, activation=options.activation, reverse=options.reverse)

    (d_state,) = jax.vjp(outputs, state)[1](d_y[:, first])
    return d_state


_causal_conv1d.defvjp(_forward, _backward)
