"""`grouped_matmul`: contract, checks, choice of implementation, rule of differentiation."""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from tjk import checks, choice
from tjk.choice import Implementation
from tjk.manual_axes import vary_together
from tjk.ops.grouped import xla
from tjk.precision import Precision, resolve

_OP = "grouped_matmul"
_DTYPES = ("float32", "bfloat16", "float16")


def grouped_matmul(
    lhs: ArrayLike,
    rhs: ArrayLike,
    group_sizes: ArrayLike,
    *,
    precision: Precision = None,
    preferred_element_type: DTypeLike | None = None,
    implementation: Implementation = None,
) -> Array:
    r"""Multiplies each group of rows with a matrix of its own; a drop-in for `jax.lax.ragged_dot`.

    .. math::
        \mathrm{out}_r = \mathrm{lhs}_r\, \mathrm{rhs}_g \quad \text{for rows } r \text{ of group }
        g: \qquad \sum_{i < g} s_i \le r < \sum_{i \le g} s_i

    with group sizes s. Rows behind the last group are 0. The sizes are data, not shapes: nothing is
    padded, no other sizes compile again, and the host does not wait for them. Rows that sizes would
    put behind the last one do not exist, and a negative size counts as 0.

    Products accumulate in float32 (float64 for float64) and are rounded once. Differentiable in lhs
    and rhs; the cotangent is rounded to lhs's dtype first. Two runs give the same bits.

    ============== ================================== ========
    implementation dtypes                             widths
    ============== ================================== ========
    "triton"       float32, bfloat16, float16         any
    "xla"          those and float64                  any
    None           "triton" on a GPU, "xla" elsewhere
    ============== ================================== ========

    Source: Gale et al., MegaBlocks, https://arxiv.org/abs/2211.15841.

    Args:
        lhs: (M, K), the groups' rows one behind the other.
        rhs: (G, K, N), in lhs's dtype.
        group_sizes: (G,), integers: how many rows each group has.
        precision: of float32 products: None is JAX's default (TF32 on a GPU), "highest" IEEE
            float32.
        preferred_element_type: dtype of the output; that of lhs if None.
        implementation: "triton", "xla", or None to choose when the program is lowered. A name
            never falls back: it runs or raises.

    Returns:
        (M, N).

    Raises:
        TypeError: for a dtype outside the table or differing dtypes.
        ValueError: for a shape or value that does not fit; for "triton" lowered for a CPU without
            the interpreter.
        NotImplementedError: for "triton" with float64.

    Example:
        >>> import jax.numpy as jnp
        >>> from tjk.ops import grouped_matmul
        >>> sizes = jnp.array([3, 0, 5], jnp.int32)
        >>> grouped_matmul(jnp.ones((8, 4)), jnp.ones((3, 4, 2)), sizes).shape
        (8, 2)
    """
    lhs, rhs, group_sizes = jnp.asarray(lhs), jnp.asarray(rhs), jnp.asarray(group_sizes)
    checks.check_shape(_OP, "lhs", lhs, "MK", {})
    checks.check_shape(_OP, "rhs", rhs, "GKN", {"K": lhs.shape[1]})
    checks.check_shape(_OP, "group_sizes", group_sizes, "G", {"G": rhs.shape[0]})
    choice.check_implementation(_OP, implementation)
    checks.check_dtype(_OP, "lhs", lhs, (*_DTYPES, "float64"))
    checks.check_same_dtype(_OP, "rhs", rhs, "lhs", lhs)
    if not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise TypeError(f"{_OP}: group_sizes must be integers, got {group_sizes.dtype}")
    out_dtype = jnp.dtype(lhs.dtype if preferred_element_type is None else preferred_element_type)
    if str(out_dtype) not in (*_DTYPES, "float64"):
        rule = f"preferred_element_type must be one of {', '.join((*_DTYPES, 'float64'))}"
        raise TypeError(f"{_OP}: {rule}, got {out_dtype}")
    if jnp.float64 in (lhs.dtype, out_dtype):
        if implementation == "triton":
            raise NotImplementedError(
                f"{_OP}: implementation='triton' does not take float64; use implementation='xla' "
                "or None"
            )
        implementation = "xla"
    if 0 in (*lhs.shape, *rhs.shape):  # sums of nothing
        return jnp.zeros((lhs.shape[0], rhs.shape[2]), out_dtype)
    options = _Options(implementation, out_dtype, resolve(_OP, precision))
    operands = vary_together(lhs, rhs, group_sizes.astype(jnp.int32))
    return _grouped_matmul(*operands, options)


@dataclasses.dataclass(frozen=True)
class _Options:
    """What is fixed while a program is traced."""

    implementation: Implementation
    dtype: Any
    precision: str

    def call(self, direction: Literal["forward", "backward"], *operands: Any, **more: Any) -> Any:
        """Calls the chosen implementation's function of that name."""
        options = {"precision": self.precision} | more

        def triton(*operands: Any) -> Any:
            from tjk.ops.grouped import triton  # needs the package triton, which Linux alone has

            return getattr(triton, direction)(*operands, **options)

        def plain(*operands: Any) -> Any:
            return getattr(xla, direction)(*operands, **options)

        return choice.dispatch(self.implementation, triton, plain, *operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _grouped_matmul(lhs: Array, rhs: Array, group_sizes: Array, options: _Options) -> Array:
    return options.call("forward", lhs, rhs, group_sizes, dtype=options.dtype)


def _forward(lhs: Array, rhs: Array, group_sizes: Array, options: _Options) -> tuple[Array, Any]:
    return _grouped_matmul(lhs, rhs, group_sizes, options), (lhs, rhs, group_sizes)


def _backward(options: _Options, residuals: Any, d_out: Array) -> Any:
    return (*options.call("backward", *residuals, d_out), None)


_grouped_matmul.defvjp(_forward, _backward)
