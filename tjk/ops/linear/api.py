"""`linear_scan`: contract, checks, choice of implementation, rule of differentiation."""

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
from tjk.ops.linear import xla
from tjk.ops.linear.operands import Operands, accumulator, check

_OP = "linear_scan"


def linear_scan(
    a: ArrayLike,
    x: ArrayLike,
    *,
    initial_state: ArrayLike | None = None,
    return_final_state: bool = False,
    segment_ids: ArrayLike | None = None,
    reverse: bool = False,
    implementation: Implementation = None,
) -> Array | tuple[Array, Array]:
    r"""The diagonal linear recurrence, real or complex.

    .. math::
        h_t = a_t h_{t-1} + x_t

    for each channel, from the initial state or 0. Time is cut into parts that run in parallel.
    Arithmetic and states are float32 (complex64, float64, complex128 for these), the output is
    rounded once. Two runs give the same bits, forward and backward.

    Differentiable in a, x and the initial state, also through the final state. The backward pass
    keeps a, x and the output, or makes the output again in float32 where it was rounded.

    ============== ============================================ =====
    implementation dtypes                                       D
    ============== ============================================ =====
    "triton"       float32, bfloat16, float16, complex64        any
    "xla"          those, float64 and complex128                any
    None           "triton" on a GPU, "xla" elsewhere
    ============== ============================================ =====

    Source: Orvieto et al.: Resurrecting Recurrent Neural Networks for Long Sequences (the LRU),
    https://arxiv.org/abs/2303.06349; Blelloch: Prefix Sums and Their Applications, CMU-CS-90-190.

    Args:
        a: (B, L, D), or (D,) for all positions; in x's dtype or float32. |a| <= 1, or states grow.
        x: (B, L, D).
        initial_state: (B, D) float32 (x's dtype where that is complex or float64).
        return_final_state: whether the state behind the last position is returned, too.
        segment_ids: (B, L) integers: the state restarts where the id changes.
        reverse: whether time runs from the last position to the first.
        implementation: "triton", "xla", or None to choose when the program is lowered. A name
            never falls back: it runs or raises.

    Returns:
        h (B, L, D) in x's dtype; with return_final_state (h, state), state (B, D). The final state
        is that of the last position in the order of the scan.

    Raises:
        TypeError: for a dtype outside the table, or dtypes that do not go together.
        ValueError: for a shape or value that does not fit; for "triton" lowered for a CPU without
            the interpreter.
        NotImplementedError: for "triton" with float64 or complex128.

    Example:
        >>> import jax.numpy as jnp
        >>> from tjk.ops import linear_scan
        >>> h = linear_scan(0.5 * jnp.ones(8), jnp.ones((2, 100, 8)))
        >>> float(h[0, 1, 0])
        1.5
    """
    operands = check(_OP, "L", a, x, ("initial_state", initial_state))
    x = operands.x
    runs = segments.runs(_OP, segment_ids, x.shape[:2], reverse)
    choice.check_implementation(_OP, implementation)
    if x.dtype in (jnp.float64, jnp.complex128):
        if implementation == "triton":
            raise NotImplementedError(
                f"{_OP}: implementation='triton' does not take {x.dtype}; use "
                "implementation='xla' or None"
            )
        implementation = "xla"
    if x.size:
        operands = Operands(*vary_together(*operands._replace(runs=runs)))
        y, state = _linear_scan(operands, _Options(implementation, reverse))
    else:
        zeros = jnp.zeros(x.shape[::2], accumulator(x.dtype))
        y, state = x, zeros if operands.initial_state is None else operands.initial_state
    return (y, state) if return_final_state else y


@dataclasses.dataclass(frozen=True)
class _Options:
    """What is fixed while a program is traced."""

    implementation: Implementation
    reverse: bool

    def call(
        self, direction: Literal["forward", "backward"], *operands: Any, **options: Any
    ) -> Any:
        """Calls the chosen implementation's function of that name."""
        options |= {"reverse": self.reverse}

        def triton(*operands: Any) -> Any:
            from tjk.ops.linear import triton  # needs the package triton, which Linux alone has

            return getattr(triton, direction)(*operands, **options)

        def plain(*operands: Any) -> Any:
            return getattr(xla, direction)(*operands, **options)

        return choice.dispatch(self.implementation, triton, plain, *operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _linear_scan(operands: Operands, options: _Options) -> tuple[Array, Array]:
    return options.call("forward", operands, dtype=operands.x.dtype)


def _forward(operands: Operands, options: _Options) -> tuple[tuple[Array, Array], Any]:
    h, final = _linear_scan(operands, options)
    exact = h.dtype == accumulator(h.dtype)
    return (h, final), (operands, h if exact else None)


def _backward(options: _Options, residuals: Any, cotangents: tuple[Array, Array]) -> Any:
    operands, h = residuals
    if h is None:
        h, _ = options.call("forward", operands, dtype=accumulator(operands.x.dtype))
    d_a, d_x, d_first = options.call("backward", operands, h, *cotangents)
    d_first = None if operands.initial_state is None else d_first
    return (Operands(d_a, d_x, d_first),)


_linear_scan.defvjp(_forward, _backward)
