"""`ssd_scan`: contract, checks, choice of implementation, rule of differentiation."""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike

from tjk import checks, choice, segments
from tjk.choice import Implementation
from tjk.manual_axes import vary_together
from tjk.ops.ssd import reference, xla
from tjk.ops.ssd.operands import Operands, check
from tjk.precision import Precision, resolve

_OP = "ssd_scan"


def ssd_scan(
    x: ArrayLike,
    dt: ArrayLike,
    A: ArrayLike,
    B: ArrayLike,
    C: ArrayLike,
    D: ArrayLike | None = None,
    z: ArrayLike | None = None,
    *,
    dt_bias: ArrayLike | None = None,
    dt_softplus: bool = False,
    initial_state: ArrayLike | None = None,
    return_final_state: bool = False,
    chunk_size: int | None = None,
    segment_ids: ArrayLike | None = None,
    reverse: bool = False,
    precision: Precision = None,
    implementation: Implementation = None,
) -> Array | tuple[Array, Array]:
    r"""The scan of Mamba-2: a linear recurrence of matrix states with one decay a head and token.

    .. math::
        h_t = e^{\Delta_t A} h_{t-1} + \Delta_t\, x_t B_t^\top, \qquad
        y_t = (h_t C_t + D x_t) \odot \operatorname{silu}(z_t), \qquad
        \Delta_t = dt_t + dt_\mathrm{bias}

    for each head, with softplus applied to the step if asked; D and z may be missing. It is linear
    attention with queries C, keys B, values x and decays, and computed so, by matrix products in
    chunks of `chunk_size` tokens:

    .. math::
        y_i = \sum_{j \le i} e^{a_i - a_j}\, (C_i \cdot B_j)\, \Delta_j x_j
              + e^{a_i}\, h_\mathrm{in} C_i, \qquad a_i = \sum_{s \le i} \Delta_s A

    over the tokens of a chunk, whose state at the start, h_in, comes from a pass over all chunks.
    No array has a state for every token. Chunks run in parallel, and so does one long sequence.

    Decays stay in logarithms and no exponent is positive (for A <= 0 and steps >= 0), so steps of
    100, and states that vanish, are finite, forward and backward. Sums of logarithms are kept in
    two parts that add up to more digits than float32 has: a step that wipes the state out takes no
    digits from the small ones beside it.

    Arithmetic and states are float32 (float64 for float64), y is rounded once. "triton" with 16-bit
    inputs rounds operands of products to x's dtype: scores times decays and steps, states, inputs
    times decays and steps, and (backward, with z) the gradient before the gate. Two runs give the
    same bits, forward and backward.

    Differentiable in all arrays but segment_ids. The backward pass keeps the inputs and the states
    at the starts of chunks, (B, chunks, H, P, R), which carry the checkpoint name
    "ssd_scan_states", and computes everything else again.

    ============== ================================== ====================== ===================
    implementation dtypes                             widths                 else
    ============== ================================== ====================== ===================
    "triton"       float32, bfloat16, float16         P, R to 256            NotImplementedError
    "xla"          those and float64                  any
    None           "triton" on a GPU where it can, else "xla"
    ============== ================================== ====================== ===================

    Source: Dao, Gu: Transformers are SSMs, https://arxiv.org/abs/2405.21060.

    Args:
        x: (B, L, H, P): batch, length, heads, head width.
        dt: (B, L, H), the step before bias and softplus; in x's dtype or float32.
        A: (H,) float32, negative.
        B: (B, L, G, R) in x's dtype; head h takes group h // (H / G).
        C: (B, L, G, R) in x's dtype.
        D: (H,) float32.
        z: (B, L, H, P) in x's dtype.
        dt_bias: (H,) float32.
        dt_softplus: whether softplus is applied to the step, after the bias.
        initial_state: (B, H, P, R) float32; None is zeros.
        return_final_state: whether the state behind the last token is returned, too.
        chunk_size: tokens of a chunk, a power of two from 16 to 256; it need not divide L. None
            chooses by shape. Results differ by roundings only.
        segment_ids: (B, L) integers: the state restarts where the id changes.
        reverse: whether time runs from the last token to the first.
        precision: of float32 products: None is JAX's default (TF32 on a GPU), "highest" IEEE
            float32.
        implementation: "triton", "xla", or None to choose when the program is lowered. A name
            never falls back: it runs or raises.

    Returns:
        y (B, L, H, P) in x's dtype; with return_final_state (y, state), state (B, H, P, R) float32.
        The final state is that of the last token in the order of the scan.

    Raises:
        TypeError: for a dtype other than these (or float64 for all).
        ValueError: for a shape or value that does not fit; for "triton" lowered for a CPU without
            the interpreter.
        NotImplementedError: for "triton" with float64 or a width above 256.

    Example:
        >>> import jax.numpy as jnp
        >>> from tjk.ops import ssd_scan
        >>> x, dt, B = jnp.ones((2, 100, 4, 8)), jnp.ones((2, 100, 4)), jnp.ones((2, 100, 1, 16))
        >>> y, state = ssd_scan(x, dt, -jnp.ones(4), B, B, return_final_state=True)
        >>> y.shape, state.shape
        ((2, 100, 4, 8), (2, 4, 8, 16))
    """
    operands = check(_OP, "L", x, dt, A, B, C, D, z, dt_bias, initial_state)
    x, R = operands.x, operands.B.shape[-1]
    runs = segments.runs(_OP, segment_ids, x.shape[:2], reverse)
    choice.check_implementation(_OP, implementation)
    if chunk_size is not None and chunk_size not in (16, 32, 64, 128, 256):
        rule = "chunk_size must be None or a power of two from 16 to 256"
        checks.fail_value(_OP, rule, repr(chunk_size))
    refused = {
        "float64": x.dtype == jnp.float64,
        f"a head width above 256 ({x.shape[3]})": x.shape[3] > 256,
        f"a state above 256 ({R})": R > 256,
    }
    if any(refused.values()):
        if implementation == "triton":
            what = " and ".join(name for name, present in refused.items() if present)
            raise NotImplementedError(
                f"{_OP}: implementation='triton' does not take {what}; use implementation='xla' "
                "or None"
            )
        implementation = "xla"
    options = _Options(
        implementation,
        chunk_size or _chunk_size(x.shape[1], x.shape[3], R, x.dtype.itemsize),
        dt_softplus,
        reverse,
        resolve(_OP, precision),
    )
    if 0 in (*x.shape, R):  # no token, or nothing to remember
        flags = {"dt_softplus": dt_softplus, "reverse": reverse}
        flags |= {"dt_bias": operands.dt_bias, "initial_state": operands.initial_state}
        y, state = reference.ssd_scan(*operands[:7], **flags)
    else:
        operands = Operands(*vary_together(*operands._replace(runs=runs)))
        y, state = _ssd_scan(operands, options)
    return (y, state) if return_final_state else y


def _chunk_size(L: int, P: int, R: int, itemsize: int) -> int:
    """Twice the width of the states: products inside a chunk then cost what those with states do.

    Longer chunks would compute more, shorter ones move more states, P R / chunk_size a token; these
    are float32, so for 16-bit inputs, which multiply twice as fast, chunks are twice as long.
    """
    balanced = 4 * P * R // max(1, P + R) * 4 // itemsize
    return max(64, min(256, 1 << (max(1, balanced) - 1).bit_length(), 1 << (L - 1).bit_length()))


@dataclasses.dataclass(frozen=True)
class _Options:
    """What is fixed while a program is traced."""

    implementation: Implementation
    chunk_size: int
    dt_softplus: bool
    reverse: bool
    precision: str

    def call(self, direction: Literal["forward", "backward"], *operands: Any) -> Any:
        """Calls the chosen implementation's function of that name."""
        options = dataclasses.asdict(self)
        del options["implementation"]

        def triton(*operands: Any) -> Any:
            from tjk.ops.ssd import triton  # needs the package triton, which Linux alone has

            return getattr(triton, direction)(*operands, **options)

        def plain(*operands: Any) -> Any:
            return getattr(xla, direction)(*operands, **options)

        return choice.dispatch(self.implementation, triton, plain, *operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _ssd_scan(operands: Operands, options: _Options) -> tuple[Array, Array]:
    y, final_state, _ = options.call("forward", operands)
    return y, final_state


def _forward(operands: Operands, options: _Options) -> tuple[tuple[Array, Array], Any]:
    y, final_state, states = options.call("forward", operands)
    return (y, final_state), (operands, checkpoint_name(states, "ssd_scan_states"))


def _backward(options: _Options, residuals: Any, cotangents: tuple[Array, Array]) -> Any:
    operands, states = residuals
    return (options.call("backward", operands, states, *cotangents),)


_ssd_scan.defvjp(_forward, _backward)
