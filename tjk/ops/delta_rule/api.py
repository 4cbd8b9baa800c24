"""`gated_delta_rule`: contract, checks, choice of implementation, rule of differentiation."""

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
from tjk.ops.delta_rule import xla
from tjk.ops.delta_rule.operands import Operands, check
from tjk.precision import Precision, accumulator, resolve

_OP = "gated_delta_rule"
_WIDEST = 128  # K in Triton
_LONGEST = 64  # chunk in Triton


def gated_delta_rule(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    g: ArrayLike,
    beta: ArrayLike,
    *,
    scale: float | None = None,
    l2_normalize: bool = False,
    initial_state: ArrayLike | None = None,
    return_final_state: bool = False,
    chunk_size: int = 64,
    segment_ids: ArrayLike | None = None,
    reverse: bool = False,
    precision: Precision = None,
    implementation: Implementation = None,
) -> Array | tuple[Array, Array]:
    r"""Gated delta rule: a memory that forgets, and that each key overwrites in its own direction.

    .. math::
        S_t = e^{g_t} S_{t-1} (I - \beta_t k_t k_t^\top) + \beta_t v_t k_t^\top, \qquad
        o_t = \mathrm{scale}\; S_t q_t

    The state is stored as S^T, (B, H, K, V). It stays bounded where g <= 0, 0 <= beta <= 2 and
    |k| <= 1, as `l2_normalize` makes it: x / sqrt(sum(x^2) + 1e-6) of queries and keys. Decays are
    handled in logarithms, and no exponent is positive where g <= 0.

    Time is cut into chunks, which are computed at the same time: each is an affine map of the
    state. Only the states between chunks are kept, (B, L / chunk_size, H, K, V) float32, in the
    order of the scan and with the checkpoint name "gated_delta_rule_states"; the backward pass
    makes the rest again. Decays, the triangular inverse of a chunk and all sums are float32
    (float64 for float64), o is rounded once. Operands of products of 16-bit inputs are rounded to
    their dtype, the state among them; a chunk's effect on the state multiplies in float32 (TF32
    unless `precision` is "highest"). Two runs give the same bits, forward and backward.

    Differentiable in q, k, v, g, beta and the initial state, also through the final state.

    ============== ======================================================= =====================
    implementation dtypes of q, k, v                                       widths
    ============== ======================================================= =====================
    "triton"       float32, bfloat16, float16                              K up to 128, V any
    "xla"          those and float64                                       any
    None           "triton" on a GPU where it takes dtype and widths, else "xla"
    ============== ======================================================= =====================

    Source: Yang, Kautz, Hatamizadeh, Gated Delta Networks, https://arxiv.org/abs/2412.06464; the
    chunked form: Yang et al., https://arxiv.org/abs/2406.06484.

    Args:
        q: (B, L, H, K) queries.
        k: (B, L, H, K) keys, in q's dtype.
        v: (B, L, H, V) values, in q's dtype.
        g: (B, L, H) logarithms of decays, in q's dtype or float32.
        beta: (B, L, H) step sizes, in q's dtype or float32.
        scale: of the queries; None is K^-0.5.
        l2_normalize: whether queries and keys are divided by their norms first.
        initial_state: (B, H, K, V) float32 (float64 with float64); None is zero.
        return_final_state: whether the state after the last token is returned, too.
        chunk_size: 16, 32, 64 or 128: how many tokens a chunk has at most (Triton takes 64 for
            128); it need not divide L.
        segment_ids: (B, L) integers: the state restarts at zero where the id changes; the initial
            state reaches the first segment only.
        reverse: whether the scan runs from the last position to the first.
        precision: of float32 products: None is JAX's default (TF32 on a GPU), "highest" IEEE
            float32.
        implementation: "triton", "xla", or None to choose when the program is lowered. A name
            never falls back: it runs or raises.

    Returns:
        o (B, L, H, V) in q's dtype; with `return_final_state` (o, final state (B, H, K, V)).

    Raises:
        TypeError: for a dtype outside the table or differing dtypes.
        ValueError: for a shape or value that does not fit; for "triton" lowered for a CPU without
            the interpreter.
        NotImplementedError: for "triton" with float64 or K above 128.

    Example:
        >>> import jax
        >>> from tjk.ops import gated_delta_rule
        >>> k = jax.random.normal(jax.random.key(0), (2, 100, 4, 32))
        >>> gate = jax.random.uniform(jax.random.key(1), (2, 100, 4))
        >>> gated_delta_rule(k, k, k, -gate, gate, l2_normalize=True).shape
        (2, 100, 4, 32)
    """
    operands = check(_OP, "L", q, k, v, g, beta, ("initial_state", initial_state))
    q, v = operands.q, operands.v
    runs = segments.runs(_OP, segment_ids, q.shape[:2], reverse)
    choice.check_implementation(_OP, implementation)
    if chunk_size not in (16, 32, 64, 128):
        checks.fail_value(_OP, "chunk_size must be 16, 32, 64 or 128", chunk_size)
    implementation = _supported(implementation, q)
    options = _Options(
        implementation,
        chunk_size if implementation == "xla" else min(chunk_size, _LONGEST),
        q.shape[-1] ** -0.5 if scale is None else float(scale),
        l2_normalize,
        reverse,
        resolve(_OP, precision),
    )
    if q.size == 0:  # no batch, no time or no head
        o, state = jnp.zeros_like(v), operands.initial_state
        if state is None:
            state = jnp.zeros((q.shape[0], *q.shape[2:], v.shape[-1]), accumulator(q.dtype))
    else:
        operands = Operands(*vary_together(*operands._replace(runs=runs)))
        o, state = _delta_rule(operands, options)
    return (o, state) if return_final_state else o


def _supported(implementation: Implementation, q: Array) -> Implementation:
    """The implementation asked for, but "xla" in place of None where Triton has no kernel."""
    if q.dtype == jnp.float64:
        what = "float64"
    elif q.shape[-1] > _WIDEST:
        what = f"K above {_WIDEST} (K={q.shape[-1]})"
    else:
        return implementation
    if implementation == "triton":
        raise NotImplementedError(
            f"{_OP}: implementation='triton' does not take {what}; use implementation='xla' or None"
        )
    return "xla"


@dataclasses.dataclass(frozen=True)
class _Options:
    """What is fixed while a program is traced."""

    implementation: Implementation
    chunk_size: int
    scale: float
    l2_normalize: bool
    reverse: bool
    precision: str

    def call(self, direction: Literal["forward", "backward"], *operands: Any, **more: Any) -> Any:
        """Calls the chosen implementation's function of that name."""
        options = {x.name: getattr(self, x.name) for x in dataclasses.fields(self)}
        implementation = options.pop("implementation")
        options |= more

        def triton(*operands: Any) -> Any:
            from tjk.ops.delta_rule import triton  # needs the package triton, which Linux has

            return getattr(triton, direction)(*operands, **options)

        def plain(*operands: Any) -> Any:
            return getattr(xla, direction)(*operands, **options)

        return choice.dispatch(implementation, triton, plain, *operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _delta_rule(operands: Operands, options: _Options) -> tuple[Array, Array]:
    o, final_state, _ = options.call("forward", operands, keep=False)
    return o, final_state


def _forward(operands: Operands, options: _Options) -> tuple[tuple[Array, Array], Any]:
    o, final_state, states = options.call("forward", operands, keep=True)
    return (o, final_state), (operands, checkpoint_name(states, "gated_delta_rule_states"))


def _backward(options: _Options, residuals: Any, cotangents: tuple[Array, Array]) -> Any:
    operands, states = residuals
    return (options.call("backward", operands, states, *cotangents),)


_delta_rule.defvjp(_forward, _backward)
