"""`moe_mlp`: contract, checks, choice of implementation, rule of differentiation."""

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
from tjk.ops.moe import xla
from tjk.ops.moe.activations import ACTIVATIONS
from tjk.ops.moe.residuals import Residuals
from tjk.precision import Precision, resolve

_OP = "moe_mlp"
_DTYPES = ("float32", "bfloat16", "float16")


def moe_mlp(
    x: ArrayLike,
    w_gate: ArrayLike,
    w_up: ArrayLike,
    w_down: ArrayLike,
    weights: ArrayLike,
    experts: ArrayLike,
    *,
    activation: Literal["silu", "gelu", "relu"] = "silu",
    precision: Precision = None,
    implementation: Implementation = None,
) -> Array:
    r"""The expert layer of a mixture of experts: each token through its k gated experts. Dropless.

    .. math::
        y_m = \sum_j w_{mj}\, E_{e_{mj}}(x_m), \qquad
        E_e(x) = \bigl(a(x W^\mathrm{gate}_e) \odot x W^\mathrm{up}_e\bigr) W^\mathrm{down}_e

    with weights w and experts e, for instance from `route_top_k`. An expert outside [0, E) adds
    nothing and has gradient 0, whatever its weight: so callers drop tokens, or keep those of other
    devices out. An expert named twice by a token counts twice.

    Rows are sorted by expert and gathered while they are loaded: no array of (M k, D) holds copies
    of x, and nothing is padded. Products accumulate in float32 (float64 for float64); gate, up,
    hidden units and each expert's output are rounded to x's dtype once each, and the weighted sum
    once. Two runs give the same bits, forward and backward.

    Differentiable in x, the expert weights and the routing weights. The backward pass keeps x, the
    pre-activations gate and up, (M k, F) each, and the order of the rows; they carry the checkpoint
    names "moe_mlp_gate", "moe_mlp_up" and "moe_mlp_order": a policy of `jax.checkpoint` that does
    not save them has them made again.

    ============== ================================== ========
    implementation dtypes                             widths
    ============== ================================== ========
    "triton"       float32, bfloat16, float16         any
    "xla"          those and float64                  any
    None           "triton" on a GPU, "xla" elsewhere
    ============== ================================== ========

    Source: Shazeer et al., https://arxiv.org/abs/1701.06538 (mixture of experts); Shazeer,
    https://arxiv.org/abs/2002.05202 (gated units); Gale et al., MegaBlocks,
    https://arxiv.org/abs/2211.15841 (without dropped tokens).

    Args:
        x: (M, D), one row a token.
        w_gate: (E, D, F), in x's dtype.
        w_up: (E, D, F), in x's dtype.
        w_down: (E, F, D), in x's dtype.
        weights: (M, k) float32 (float64 with float64): how much each expert counts.
        experts: (M, k) int32: which experts a token goes to.
        activation: a, one of "silu", "gelu" (the tanh approximation) and "relu".
        precision: of float32 products: None is JAX's default (TF32 on a GPU), "highest" IEEE
            float32.
        implementation: "triton", "xla", or None to choose when the program is lowered. A name
            never falls back: it runs or raises.

    Returns:
        (M, D) in x's dtype.

    Raises:
        TypeError: for a dtype outside the table or differing dtypes.
        ValueError: for a shape or value that does not fit; for "triton" lowered for a CPU without
            the interpreter.
        NotImplementedError: for "triton" with float64.

    Example:
        >>> import jax
        >>> from tjk.ops import moe_mlp, route_top_k
        >>> x = jax.random.normal(jax.random.key(0), (16, 8))
        >>> gate, down = jax.numpy.ones((4, 8, 32)), jax.numpy.ones((4, 32, 8))
        >>> moe_mlp(x, gate, gate, down, *route_top_k(x[:, :4], 2)).shape
        (16, 8)
    """
    x, w_gate, w_up, w_down = (jnp.asarray(a) for a in (x, w_gate, w_up, w_down))
    weights, experts = jnp.asarray(weights), jnp.asarray(experts)
    checks.check_shape(_OP, "x", x, "MD", {})
    checks.check_shape(_OP, "w_gate", w_gate, "EDF", {"D": x.shape[1]})
    sizes = dict(zip("EDF", w_gate.shape)) | {"M": x.shape[0]}
    checks.check_shape(_OP, "w_up", w_up, "EDF", sizes)
    checks.check_shape(_OP, "w_down", w_down, "EFD", sizes)
    checks.check_shape(_OP, "weights", weights, "Mk", sizes)
    checks.check_shape(_OP, "experts", experts, "Mk", sizes | {"k": weights.shape[1]})
    choice.check_implementation(_OP, implementation)
    checks.check_dtype(_OP, "x", x, (*_DTYPES, "float64"))
    for name, w in (("w_gate", w_gate), ("w_up", w_up), ("w_down", w_down)):
        checks.check_same_dtype(_OP, name, w, "x", x)
    exact = x.dtype == jnp.float64
    checks.check_dtype(_OP, "weights", weights, ("float64",) if exact else ("float32",))
    checks.check_dtype(_OP, "experts", experts, ("int32",))
    if activation not in ACTIVATIONS:
        names = ", ".join(map(repr, ACTIVATIONS))
        checks.fail_value(_OP, f"activation must be one of {names}", repr(activation))
    if experts.size >= 2**31:
        checks.fail_value(_OP, "M k must be below 2^31", experts.shape)
    if exact:
        if implementation == "triton":
            raise NotImplementedError(
                f"{_OP}: implementation='triton' does not take float64; use implementation='xla' "
                "or None"
            )
        implementation = "xla"
    if 0 in (*w_gate.shape, *weights.shape):  # sums of nothing
        return jnp.zeros_like(x)
    options = _Options(implementation, activation, resolve(_OP, precision))
    operands = vary_together(x, w_gate, w_up, w_down, weights, experts)
    return _moe_mlp(*operands, options)


@dataclasses.dataclass(frozen=True)
class _Options:
    """What is fixed while a program is traced."""

    implementation: Implementation
    activation: str
    precision: str

    def call(self, direction: Literal["forward", "backward"], *operands: Any, **more: Any) -> Any:
        """Calls the chosen implementation's function of that name."""
        options = {"activation": self.activation, "precision": self.precision} | more

        def triton(*operands: Any) -> Any:
            from tjk.ops.moe import triton  # needs the package triton, which Linux alone has

            return getattr(triton, direction)(*operands, **options)

        def plain(*operands: Any) -> Any:
            return getattr(xla, direction)(*operands, **options)

        return choice.dispatch(self.implementation, triton, plain, *operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _moe_mlp(
    x: Array,
    w_gate: Array,
    w_up: Array,
    w_down: Array,
    weights: Array,
    experts: Array,
    options: _Options,
) -> Array:
    operands = (x, w_gate, w_up, w_down, weights, experts)
    return options.call("forward", *operands, keep=False)[0]


def _forward(*arguments: Any) -> tuple[Array, Any]:
    *operands, options = arguments
    y, residuals = options.call("forward", *operands, keep=True)
    gate, up, *order = residuals
    named = Residuals(
        checkpoint_name(gate, "moe_mlp_gate"),
        checkpoint_name(up, "moe_mlp_up"),
        *(checkpoint_name(x, "moe_mlp_order") for x in order),
    )
    return y, (*operands, named)


def _backward(options: _Options, residuals: Any, d_y: Array) -> Any:
    return (*options.call("backward", *residuals, d_y), None)


_moe_mlp.defvjp(_forward, _backward)
