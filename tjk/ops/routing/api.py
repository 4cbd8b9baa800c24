"""`route_top_k` and `sort_by_expert`: contracts, checks, choice of implementation, derivative."""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from tjk import checks, choice
from tjk.choice import Implementation
from tjk.ops.routing import xla
from tjk.ops.routing.order import ExpertOrder

_DTYPES = ("float32", "bfloat16", "float16", "float64")
_MAX_EXPERTS = 1024  # one program of the kernel holds a row of logits


def route_top_k(
    logits: ArrayLike,
    k: int,
    *,
    normalize: Literal["selected", "all"] = "selected",
    implementation: Implementation = None,
) -> tuple[Array, Array]:
    r"""Chooses each token's k experts of the largest logits, and their weights.

    .. math::
        w_{mj} = \frac{\exp x_{m e_{mj}}}{\sum_{e \in N} \exp x_{me}}

    with N the k chosen experts for "selected", all of them for "all". Experts come in descending
    order of their logits, of equal logits the lower number first; -0.0 equals 0.0, and NaN is
    larger than all. A row's experts are always k different ones, also where logits are infinite or
    NaN; its weights are then those of `jax.nn.softmax`: NaN if a logit of N is inf or NaN or if all
    are -inf.

    Computed in float32 (float64 for float64). Differentiable in the logits, through the weights.

    ============== ================================== =============
    implementation dtypes                             experts
    ============== ================================== =============
    "triton"       float32, bfloat16, float16         up to 1024
    "xla"          those and float64                  any number
    None           "triton" on a GPU where it can, else "xla"
    ============== ================================== =============

    Source: Shazeer et al., https://arxiv.org/abs/1701.06538.

    Args:
        logits: (M, E), a router's.
        k: how many experts a token goes to, 1 to E.
        normalize: over which experts the softmax is taken, "selected" or "all".
        implementation: "triton", "xla", or None to choose when the program is lowered. A name
            never falls back: it runs or raises.

    Returns:
        weights, (M, k) float32 (float64 for float64), and experts, (M, k) int32.

    Raises:
        TypeError: for a dtype outside the table.
        ValueError: for a shape or value that does not fit; for "triton" lowered for a CPU without
            the interpreter.
        NotImplementedError: for "triton" with float64 or more than 1024 experts.

    Example:
        >>> import jax.numpy as jnp
        >>> from tjk.ops import route_top_k
        >>> weights, experts = route_top_k(jnp.array([[0.0, 2.0, 2.0]]), 2)
        >>> experts.tolist(), weights.tolist()
        ([[1, 2]], [[0.5, 0.5]])
    """
    op = "route_top_k"
    logits = jnp.asarray(logits)
    checks.check_shape(op, "logits", logits, "ME", {})
    checks.check_dtype(op, "logits", logits, _DTYPES)
    choice.check_implementation(op, implementation)
    E = logits.shape[1]
    if not (isinstance(k, int) and 1 <= k <= E):
        checks.fail_value(op, f"k must be an int from 1 to the number of experts, {E}", repr(k))
    if normalize not in ("selected", "all"):
        checks.fail_value(op, "normalize must be 'selected' or 'all'", repr(normalize))
    lacks = {
        "float64": logits.dtype == jnp.float64,
        f"{E} experts (at most 1024)": E > _MAX_EXPERTS,
    }
    if any(lacks.values()):
        if implementation == "triton":
            missing = " or ".join(name for name, is_used in lacks.items() if is_used)
            raise NotImplementedError(
                f"{op}: implementation='triton' does not take {missing}; use implementation='xla' "
                "or None"
            )
        implementation = "xla"
    return _route(logits, k, normalize, implementation)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _route(
    logits: Array, k: int, normalize: str, implementation: Implementation
) -> tuple[Array, Array]:
    return _call(implementation, "top_k_forward", logits, k=k, normalize=normalize)


def _forward(
    logits: Array, k: int, normalize: str, implementation: Implementation
) -> tuple[tuple[Array, Array], Any]:
    weights, experts = _route(logits, k, normalize, implementation)
    return (weights, experts), (logits, weights, experts)


def _backward(
    k: int,
    normalize: str,
    implementation: Implementation,
    residuals: Any,
    cotangents: tuple[Array, Any],
) -> tuple[Array]:
    operands = (*residuals, cotangents[0])
    return (_call(implementation, "top_k_backward", *operands, k=k, normalize=normalize),)


_route.defvjp(_forward, _backward)


def sort_by_expert(
    experts: ArrayLike, num_experts: int, *, implementation: Implementation = None
) -> ExpertOrder:
    """Sorts slots by expert, stably: what `grouped_matmul` needs to take rows expert by expert.

    A counting sort, block of slots by block: only slots of one block are compared. Slots with an
    expert outside [0, E) come last and count in no group, so that a grouped product gives them 0.
    Integers alone: two runs give the same result.

    Source: Cormen et al., Introduction to Algorithms, counting sort.

    Args:
        experts: (M, k) or (M,) int32: slot m k + j is token m's j-th expert.
        num_experts: E.
        implementation: "triton", "xla", or None to choose when the program is lowered. A name
            never falls back: it runs or raises.

    Returns:
        ExpertOrder(order (M k,), position (M k,), group_sizes (E,)), all int32. Row r of the
        sorted slots is slot order[r], that of token order[r] // k; slot s is row position[s].

    Raises:
        TypeError: for another dtype than int32.
        ValueError: for a shape or value that does not fit; for "triton" lowered for a CPU without
            the interpreter.

    Example:
        >>> import jax.numpy as jnp
        >>> from tjk.ops import sort_by_expert
        >>> sort_by_expert(jnp.array([[1, 0], [2, 0]], jnp.int32), 3).order.tolist()
        [1, 3, 0, 2]
    """
    op = "sort_by_expert"
    experts = jnp.asarray(experts)
    if experts.ndim not in (1, 2):
        checks.fail_value(op, "experts must have shape (M, k) or (M,)", experts.shape)
    checks.check_dtype(op, "experts", experts, ("int32",))
    choice.check_implementation(op, implementation)
    if not (isinstance(num_experts, int) and num_experts >= 1):
        checks.fail_value(op, "num_experts must be an int of at least 1", repr(num_experts))
    if experts.size >= 2**31:
        checks.fail_value(op, "there must be fewer than 2^31 slots", experts.shape)

    return _call(implementation, "sort", experts.reshape(-1), num_experts=num_experts)


def _call(
    implementation: Implementation,
    name: Literal["top_k_forward", "top_k_backward", "sort"],
    *operands: Array,
    **options: Any,
) -> Any:
    """Calls the chosen implementation's function of that name."""

    def triton(*operands: Array) -> Any:
        from tjk.ops.routing import triton  # needs the package triton, which Linux alone has

        return getattr(triton, name)(*operands, **options)

    def plain(*operands: Array) -> Any:
        return getattr(xla, name)(*operands, **options)

    return choice.dispatch(implementation, triton, plain, *operands)
