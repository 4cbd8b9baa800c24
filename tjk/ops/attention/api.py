"""`flash_attention`: contract, checks, choice of implementation, rule of differentiation."""

import dataclasses
import functools
import math
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike

from tjk import checks, choice
from tjk.choice import Implementation
from tjk.manual_axes import vary_together
from tjk.ops.attention import xla
from tjk.precision import Precision, resolve

_OP = "flash_attention"
_DTYPES = ("float32", "bfloat16", "float16")


@overload
def flash_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = ...,
    mask: ArrayLike | None = ...,
    *,
    scale: float | None = ...,
    is_causal: bool = ...,
    query_seq_lengths: ArrayLike | None = ...,
    key_value_seq_lengths: ArrayLike | None = ...,
    implementation: Implementation = ...,
    local_window_size: int | tuple[int, int] | None = ...,
    return_residual: Literal[False] = ...,
    precision: Precision = ...,
    deterministic: bool = ...,
) -> Array: ...
@overload
def flash_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = ...,
    mask: ArrayLike | None = ...,
    *,
    scale: float | None = ...,
    is_causal: bool = ...,
    query_seq_lengths: ArrayLike | None = ...,
    key_value_seq_lengths: ArrayLike | None = ...,
    implementation: Implementation = ...,
    local_window_size: int | tuple[int, int] | None = ...,
    return_residual: Literal[True],
    precision: Precision = ...,
    deterministic: bool = ...,
) -> tuple[Array, Array]: ...
def flash_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    implementation: Implementation = None,
    local_window_size: int | tuple[int, int] | None = None,
    return_residual: bool = False,
    precision: Precision = None,
    deterministic: bool = False,
) -> Array | tuple[Array, Array]:
    r"""Attention without an array of T x S elements; a drop-in for `jax.nn.dot_product_attention`.

    .. math::
        o_t = \sum_s p_{ts} v_s, \qquad p_{ts} = \exp(x_{ts} - \ell_t), \qquad
        x_{ts} = \mathrm{scale}\; q_t \cdot k_s + b_{ts}, \qquad
        \ell_t = \log \sum_s \exp x_{ts}

    with sums over the keys that the query sees. It sees key s if all of these hold:
    `s <= t` with is_causal (counted from the first position, also where T != S);
    `t - left <= s <= t + right` with local_window_size; `t < query_seq_lengths[b]` and
    `s < key_value_seq_lengths[b]`; `mask` is True there. A query that sees nothing gives 0 (where
    JAX gives the mean of the values), logsumexp -inf, and gradients 0.

    Products accumulate in float32 and the softmax is float32. For bfloat16 and float16 the weights
    are rounded to value's dtype before their product with it; the output is rounded once.

    Differentiable in query, key, value and bias, through the output and the logsumexp. Gradients
    of query add up in float32 atomics in Triton, in an order that varies between runs by
    roundings, unless deterministic. The output and the logsumexp carry the checkpoint names
    "flash_attention_output" and "flash_attention_logsumexp": a policy of `jax.checkpoint` that
    saves both runs the forward kernel once.

    ============== ========================================== =================================
    implementation dtypes, widths                             bias, mask
    ============== ========================================== =================================
    "triton"       float32, bfloat16, float16; H, V to 256    NotImplementedError
    "xla"          those and float64; any width               yes
    None           "triton" on a GPU where it can, else "xla"
    ============== ========================================== =================================

    Source: Dao, FlashAttention-2, https://arxiv.org/abs/2307.08691.

    Args:
        query: (B, T, N, H), or (T, N, H).
        key: (B, S, K, H), or (S, K, H), in query's dtype. N must be a multiple of K: query head n
            uses key head n // (N / K).
        value: (B, S, K, V), or (S, K, V), in query's dtype.
        bias: added to the scaled logits; each axis that of (B, N, T, S) or 1, or without the first.
        mask: bool, True where a key may be seen; shape as for bias.
        scale: of the logits; 1 / sqrt(H) if None.
        is_causal: whether a query sees only keys up to its own position.
        query_seq_lengths: (B,) int32: the queries from there on see nothing.
        key_value_seq_lengths: (B,) int32: the keys from there on are not seen.
        implementation: "triton", "xla", or None to choose when the program is lowered. A name
            never falls back: it runs or raises.
        local_window_size: (left, right) positions that a query sees beside its own; one int for
            both.
        return_residual: whether to return the logsumexp, too.
        precision: of float32 products: None is JAX's default (TF32 on a GPU), "highest" IEEE
            float32.
        deterministic: whether two runs must give the same bits in the gradients. In Triton this
            costs seven products a tile where five would do.

    Returns:
        The output, (B, T, N, V) or (T, N, V) in query's dtype. With return_residual a pair of it
        and the logsumexp, (B, T, N) or (T, N) float32, natural logarithm.

    Raises:
        TypeError: for a dtype outside the table or differing dtypes.
        ValueError: for a shape or value that does not fit; for "triton" lowered for a CPU without
            the interpreter.
        NotImplementedError: for "triton" with bias, mask, or a width above 256.

    Example:
        >>> import jax
        >>> from tjk.ops import flash_attention
        >>> x = jax.random.normal(jax.random.key(0), (2, 128, 4, 64))
        >>> flash_attention(x, x, x, is_causal=True).shape
        (2, 128, 4, 64)
    """
    query, key, value = jnp.asarray(query), jnp.asarray(key), jnp.asarray(value)
    if query.ndim not in (3, 4):
        checks.fail_value(_OP, "query must have shape (B, T, N, H) or (T, N, H)", query.shape)
    batched = query.ndim == 4
    lead = "B" if batched else ""
    sizes = {"H": query.shape[-1]} | ({"B": query.shape[0]} if batched else {})
    checks.check_shape(_OP, "key", key, lead + "SKH", sizes)
    S, K, _ = key.shape[-3:]
    checks.check_shape(_OP, "value", value, lead + "SKV", sizes | {"S": S, "K": K})
    _check_dtypes(query, key, value, implementation)
    if not batched:
        query, key, value = query[None], key[None], value[None]
    B, T, N, H = query.shape
    if 0 in (N, K, H, value.shape[-1]) or N % K:
        rule = "query's heads N must be a positive multiple of key's heads K, and widths positive"
        checks.fail_value(_OP, rule, f"N={N}, K={K}, H={H}, V={value.shape[-1]}")
    if bias is not None:
        bias = _broadcastable("bias", bias, (B, N, T, S))
        checks.check_dtype(_OP, "bias", bias, (*_DTYPES, "float64"))
    if mask is not None:
        mask = _broadcastable("mask", mask, (B, N, T, S))
        checks.check_dtype(_OP, "mask", mask, ("bool",))
    lengths = []
    names = ("query_seq_lengths", "key_value_seq_lengths")
    for name, x in zip(names, (query_seq_lengths, key_value_seq_lengths)):
        if x is not None:
            x = jnp.asarray(x)
            checks.check_shape(_OP, name, x, "B", {"B": B})
            checks.check_dtype(_OP, name, x, ("int32",))
        lengths.append(x)

    options = _Options(
        implementation=_choose(implementation, query, value, bias, mask),
        scale=1 / math.sqrt(H) if scale is None else float(scale),
        window=_window(is_causal, local_window_size),
        precision=resolve(_OP, precision),
        deterministic=bool(deterministic),
    )
    operands = vary_together(query, key, value, bias, mask, *lengths)
    output, logsumexp = _attention(*operands, options)
    logsumexp = jnp.moveaxis(logsumexp, 1, 2)  # (B, T, N)
    if not batched:
        output, logsumexp = output[0], logsumexp[0]
    return (output, logsumexp) if return_residual else output


def _check_dtypes(query: Array, key: Array, value: Array, implementation: Implementation) -> None:
    choice.check_implementation(_OP, implementation)
    allowed = _DTYPES if implementation == "triton" else (*_DTYPES, "float64")
    checks.check_dtype(_OP, "query", query, allowed)
    checks.check_same_dtype(_OP, "key", key, "query", query)
    checks.check_same_dtype(_OP, "value", value, "query", query)


def _broadcastable(name: str, x: ArrayLike, shape: tuple[int, ...]) -> Array:
    """x with four axes, each 1 or that of (B, N, T, S)."""
    x = jnp.asarray(x)
    full = x[None] if x.ndim == 3 else x
    if full.ndim != 4 or any(size not in (1, whole) for size, whole in zip(full.shape, shape)):
        rule = f"{name} must have three or four axes that broadcast to (B, N, T, S)={shape}"
        checks.fail_value(_OP, rule, x.shape)
    return full


def _window(
    is_causal: bool, local_window_size: int | tuple[int, int] | None
) -> tuple[int | None, int | None]:
    """(left, right) of the visible positions, None where there is no bound; causal is right 0."""
    left, right = None, None
    if isinstance(local_window_size, int):
        left, right = local_window_size, local_window_size
    elif local_window_size is not None:
        try:
            left, right = map(int, local_window_size)
        except (TypeError, ValueError):
            rule = "local_window_size must be an int or a pair of ints"
            checks.fail_value(_OP, rule, repr(local_window_size))
    if is_causal:
        right = 0 if right is None else min(right, 0)
    return left, right


def _choose(
    implementation: Implementation, query: Array, value: Array, bias: Any, mask: Any
) -> Implementation:
    """Turns None into "xla" where the kernels lack something, and "triton" into an error there."""
    width = max(query.shape[-1], value.shape[-1])
    lacks = {
        "bias": bias is not None,
        "mask": mask is not None,
        f"a width above 256 ({width})": width > 256,
        "float64": query.dtype == jnp.float64,
    }
    missing = [name for name, is_used in lacks.items() if is_used]
    if implementation == "triton" and missing:
        raise NotImplementedError(
            f"{_OP}: implementation='triton' does not take {' or '.join(missing)}; "
            "use implementation='xla' or None"
        )
    return "xla" if missing else implementation


@dataclasses.dataclass(frozen=True)
class _Options:
    """What is fixed while a program is traced."""

    implementation: Implementation
    scale: float
    window: tuple[int | None, int | None]
    precision: str
    deterministic: bool

    def call(self, direction: Literal["forward", "backward"], *operands: Any, **more: Any) -> Any:
        """Calls the chosen implementation's function of that name."""
        options = {"scale": self.scale, "window": self.window, "precision": self.precision} | more

        def triton(*operands: Any) -> Any:
            from tjk.ops.attention import triton  # needs the package triton, which Linux alone has

            return getattr(triton, direction)(*operands, **options)

        def plain(*operands: Any) -> Any:
            return getattr(xla, direction)(*operands, **options)

        return choice.dispatch(self.implementation, triton, plain, *operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(7,))
def _attention(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None,
    mask: Array | None,
    query_lengths: Array | None,
    key_lengths: Array | None,
    options: _Options,
) -> tuple[Array, Array]:
    """Output (B, T, N, V) and logsumexp (B, N, T) float32."""
    operands = (query, key, value, bias, mask, query_lengths, key_lengths)
    return _forward(*operands, options)[0]


def _forward(*arguments: Any) -> tuple[tuple[Array, Array], Any]:
    *operands, options = arguments
    output, logsumexp = options.call("forward", *operands)
    output = checkpoint_name(output, "flash_attention_output")
    logsumexp = checkpoint_name(logsumexp, "flash_attention_logsumexp")
    return (output, logsumexp), (*operands, output, logsumexp)


def _backward(options: _Options, residuals: Any, cotangents: tuple[Array, Array]) -> Any:
    gradients = options.call(
        "backward", *residuals, *cotangents, deterministic=options.deterministic
    )
    return (*gradients, None, None, None)


_attention.defvjp(_forward, _backward)
