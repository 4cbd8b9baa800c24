"""`selective_scan`: contract, checks, choice of implementation, rule of differentiation."""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike

from tjk import choice
from tjk.choice import Implementation
from tjk.manual_axes import vary_together
from tjk.ops.selective import xla
from tjk.ops.selective.operands import Operands, check
from tjk.precision import accumulator
from tjk.segments import runs as count_runs

_OP = "selective_scan"


def selective_scan(
    x: ArrayLike,
    delta: ArrayLike,
    A: ArrayLike,
    B: ArrayLike,
    C: ArrayLike,
    D: ArrayLike | None = None,
    z: ArrayLike | None = None,
    *,
    delta_bias: ArrayLike | None = None,
    delta_softplus: bool = False,
    initial_state: ArrayLike | None = None,
    return_final_state: bool = False,
    segment_ids: ArrayLike | None = None,
    reverse: bool = False,
    implementation: Implementation = None,
) -> Array | tuple[Array, Array]:
    r"""The scan of Mamba: a diagonal linear recurrence whose step sizes and matrices vary in time.

    .. math::
        h_t = e^{\delta_t A} h_{t-1} + \delta_t x_t B_t, \qquad
        y_t = (C_t \cdot h_t + D x_t) \operatorname{silu}(z_t)

    for every channel on its own, h_t being R numbers per channel, with delta + delta_bias, or
    softplus(delta + delta_bias) if asked for, in place of delta. States and all arithmetic are
    float32 (float64 for float64); y is rounded once.

    No array of (B, L, D, R) exists: for a backward pass the state is kept every 256 steps, under
    the checkpoint name "selective_scan_states", and what lies between is computed again. Where the
    batch and the channels alone do not fill the card, time is cut into parts that run side by side.
    Two runs give the same bits, forward and backward.

    With A <= 0 and delta >= 0 no exponent is positive: long sequences stay finite, whatever delta.
    Other signs are legal; what then overflows becomes infinite.

    Differentiable in all floating-point arguments.

    ============== ================================== ===========
    implementation dtypes                             states
    ============== ================================== ===========
    "triton"       float32, bfloat16, float16         R to 256
    "xla"          those and float64                  R to 256
    None           "triton" on a GPU, "xla" elsewhere
    ============== ================================== ===========

    Source: Gu, Dao: Mamba: Linear-Time Sequence Modeling with Selective State Spaces,
    https://arxiv.org/abs/2312.00752.

    Args:
        x: (B, L, D).
        delta: (B, L, D), the step sizes, in x's dtype or float32.
        A: (D, R), in x's dtype or float32; usually negative.
        B: (B, L, R), in x's dtype.
        C: (B, L, R), in x's dtype.
        D: (D,), in x's dtype or float32, or None for 0.
        z: (B, L, D), in x's dtype, or None for no gate.
        delta_bias: (D,), in x's dtype or float32, or None for 0.
        delta_softplus: whether delta passes through softplus.
        initial_state: (B, D, R) float32 (float64 with float64), h before the first step, or None
            for 0.
        return_final_state: whether to return h after the last step, too.
        segment_ids: (B, L) integers, or None: the state restarts from 0 where the id changes.
        reverse: whether time runs from the last position to the first; the initial state then
            enters at the last position, and the final state is that after the first.
        implementation: "triton", "xla", or None to choose when the program is lowered. A name
            never falls back: it runs or raises.

    Returns:
        y (B, L, D) in x's dtype; with return_final_state the pair of y and the state (B, D, R)
        float32 (float64 with float64).

    Raises:
        TypeError: for a dtype outside the table or one that does not fit x's.
        ValueError: for a shape or value that does not fit; for "triton" lowered for a CPU without
            the interpreter.
        NotImplementedError: for "triton" with float64.

    Example:
        >>> import jax.numpy as jnp
        >>> from tjk.ops import selective_scan
        >>> x, A, B = jnp.ones((2, 64, 8)), -jnp.ones((8, 4)), jnp.ones((2, 64, 4))
        >>> y, state = selective_scan(x, 0.1 * x, A, B, B, return_final_state=True)
        >>> y.shape, state.shape
        ((2, 64, 8), (2, 8, 4))
    """
    operands = Operands(
        *(
            a if a is None else jnp.asarray(a)
            for a in (x, delta, A, B, C, D, z, delta_bias, initial_state)
        )
    )
    check(_OP, operands, "L", "initial_state")
    runs = count_runs(_OP, segment_ids, operands.x.shape[:2], reverse)
    choice.check_implementation(_OP, implementation)
    exact = accumulator(operands.x.dtype)
    if exact == jnp.float64:
        if implementation == "triton":
            raise NotImplementedError(
                f"{_OP}: implementation='triton' does not take float64; use implementation='xla' "
                "or None"
            )
        implementation = "xla"
    if operands.x.size == 0:  # nothing happens to the state
        state = operands.state
        if state is None:
            state = jnp.zeros((len(operands.x), *operands.A.shape), exact)
        return (operands.x, state) if return_final_state else operands.x
    operands = operands._replace(
        **{
            name: a.astype(exact)
            for name in ("A", "D", "delta_bias")
            if (a := getattr(operands, name)) is not None
        }
    )
    *operands, runs = vary_together(*operands, runs)
    y, state = _selective_scan(
        Operands(*operands), runs, _Options(implementation, delta_softplus, reverse)
    )
    return (y, state) if return_final_state else y


@dataclasses.dataclass(frozen=True)
class _Options:
    """What is fixed while a program is traced."""

    implementation: Implementation
    softplus: bool
    reverse: bool

    def call(self, direction: Literal["forward", "backward"], *operands: Any, **more: Any) -> Any:
        """Calls the chosen implementation's function of that name."""
        options = {"softplus": self.softplus, "reverse": self.reverse} | more

        def triton(*operands: Any) -> Any:
            from tjk.ops.selective import triton  # needs the package triton, which Linux alone has

            return getattr(triton, direction)(*operands, **options)

        def plain(*operands: Any) -> Any:
            return getattr(xla, direction)(*operands, **options)

        return choice.dispatch(self.implementation, triton, plain, *operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _selective_scan(
    operands: Operands, runs: Array | None, options: _Options
) -> tuple[Array, Array]:
    return options.call("forward", operands, runs, keep=False)[:2]


def _forward(operands: Operands, runs: Array | None, options: _Options) -> Any:
    y, final, states = options.call("forward", operands, runs, keep=True)
    return (y, final), (operands, runs, checkpoint_name(states, "selective_scan_states"))


def _backward(options: _Options, residuals: Any, cotangents: tuple[Array, Array]) -> Any:
    return options.call("backward", *residuals, *cotangents), None


_selective_scan.defvjp(_forward, _backward)
