"""Attention's value and gradients three ways: as asked for, in float64, and in plain JAX."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.numerics import assert_within_budget
from tjk import elementwise
from tjk.ops import flash_attention
from tjk.ops.attention import modifiers, reference

TF32_EPSILON = 2.0**-10  # truncation, not rounding
NAMES = ("output", "logsumexp", "d_query", "d_key", "d_value", "d_bias", "d_sinks")


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of one problem: batch, lengths, heads, widths."""

    B: int = 2
    T: int = 65
    S: int = 70
    N: int = 2
    K: int = 2
    H: int = 16
    V: int = 16


@functools.cache
def inputs(shape: Shape, seed: int = 0) -> tuple[np.ndarray, ...]:
    """query, key, value, and cotangents of output and logsumexp (B, T, N), in float64."""
    s = shape
    draw = np.random.default_rng(seed).standard_normal
    return (
        draw((s.B, s.T, s.N, s.H)),
        draw((s.B, s.S, s.K, s.H)),
        draw((s.B, s.S, s.K, s.V)),
        draw((s.B, s.T, s.N, s.V)),
        draw((s.B, s.T, s.N)),
    )


def gradients(attend: Any, operands: Any, d_output: Any, d_logsumexp: Any) -> tuple[Any, ...]:
    """Output, logsumexp and the gradients of all operands, each as named in NAMES."""

    @jax.jit  # one compilation costs less than one for each operation
    def run(operands: Any, d_output: Any, d_logsumexp: Any) -> tuple[Any, ...]:
        (output, logsumexp), vjp = jax.vjp(attend, *operands)
        return output, logsumexp, *vjp((d_output, d_logsumexp.astype(logsumexp.dtype)))

    return run(tuple(operands), d_output, d_logsumexp)


def check(
    shape: Shape,
    dtype: str,
    implementation: str | None,
    *,
    scale: float | None = None,
    precision: str | None = None,
    bias: Any = None,
    sinks: Any = None,
    seed: int = 0,
    **options: Any,
) -> None:
    """Fails unless output, logsumexp and all gradients are within the budget.

    Where float32 products are TF32, as by default in Triton, the plain computation is of operands
    with TF32's bits.
    """
    operands = [jnp.asarray(x, dtype) for x in inputs(shape, seed)[:3]]
    operands += [bias, sinks][: 2 if sinks is not None else bias is not None]
    cotangents = [jnp.asarray(inputs(shape, seed)[3], dtype), jnp.float32(inputs(shape, seed)[4])]
    tf32 = dtype == "float32" and implementation == "triton" and precision != "highest"

    def attend(query: Any, key: Any, value: Any, bias: Any = None, sinks: Any = None) -> Any:
        return flash_attention(
            *(query, key, value, bias),
            sinks=sinks,
            scale=scale,
            precision=precision,
            implementation=implementation,
            return_residual=True,
            **options,
        )

    actual = gradients(attend, operands, *cotangents)
    exact = in_dtype(operands, cotangents, "float64", scale, **options)
    if tf32:
        operands = [_truncate(x) for x in operands[:3]] + operands[3:]
        cotangents[0] = _truncate(cotangents[0])
    plain = in_dtype(operands, cotangents, dtype, scale, **options)
    for name, *values in zip(NAMES, actual, exact, plain):
        if values[0] is None:
            continue
        inherent = _inherent_error(name, exact, operands, cotangents, scale)
        inherent += TF32_EPSILON * np.abs(values[1][np.isfinite(values[1])]).max(initial=0) * tf32
        assert_within_budget(name, *values, inherent=inherent)


def _inherent_error(name: str, exact: Any, operands: Any, cotangents: Any, scale: Any) -> float:
    """What flash attention loses in gradients by its formulas, in units of float32's epsilon.

    Weights are made again from a logsumexp kept in float32. Its rounding and that of the exponent
    in units of log2 multiply them, where plain JAX may have none: a single key has weight 1. And
    dS = P (dP - delta) takes dP and delta from different sums, which may cancel.
    """
    if name in ("output", "logsumexp"):
        return 0.0
    query, key, value = (np.asarray(x, np.float64) for x in operands[:3])
    d_output = np.asarray(cotangents[0], np.float64)
    logsumexp = np.abs(exact[1][np.isfinite(exact[1])]).max(initial=0)
    lost = (1 + 2 * logsumexp) * np.abs(exact[NAMES.index(name)]).max(initial=0)
    if name != "d_value":
        d_weights = np.linalg.norm(d_output, axis=-1).max(initial=0)
        d_weights *= np.linalg.norm(value, axis=-1).max(initial=0)
        scale = query.shape[-1] ** -0.5 if scale is None else abs(scale)
        if name in ("d_query", "d_key"):
            other = key if name == "d_query" else query
            d_weights *= scale * np.abs(other).max(initial=0)
        else:  # a bias and a sink add up dS of all that they are broadcast to
            d_weights *= np.sqrt(exact[1].size * key.shape[1])
        lost += d_weights
    return float(jnp.finfo(jnp.float32).eps) * lost


def _truncate(x: jax.Array) -> np.ndarray:
    return (np.asarray(x, np.float32).view(np.uint32) & 0xFFFFE000).view(np.float32)


def in_dtype(
    operands: Any,
    cotangents: Any,
    dtype: str,
    scale: float | None = None,
    is_causal: bool = False,
    local_window_size: int | tuple[int, int] | None = None,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    mask: Any = None,
    segment_ids: Any = None,
    logits_soft_cap: float | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Any = None,
    deterministic: bool = False,
) -> tuple[jax.Array, ...]:
    """The reference and its derivative by JAX, all in one dtype."""
    window = local_window_size
    left, right = (window, window) if window is None or isinstance(window, int) else window
    if is_causal:
        right = 0 if right is None else min(right, 0)
    if segment_ids is not None:
        pair = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
        same = pair[0][:, None, :, None] == pair[1][:, None, None, :]
        mask = same if mask is None else mask & same
    factors = None
    if dropout_rate:
        (B, T, N, _), S = operands[0].shape, operands[1].shape[1]
        keep, words = modifiers.dropout(dropout_rate, dropout_key)
        at = tuple(jnp.asarray(x, jnp.int32) for x in np.ogrid[:B, :N, :T, :S])
        factors = np.asarray(elementwise.evaluate(keep, at, words)) / (1 - dropout_rate)

    def score(logits: Any, *at: Any) -> Any:
        return logits_soft_cap * jnp.tanh(logits / logits_soft_cap)

    def attend(query: Any, key: Any, value: Any, bias: Any = None, sinks: Any = None) -> Any:
        output, logsumexp = reference.attention(
            query,
            key,
            value,
            bias,
            mask,
            query_seq_lengths,
            key_value_seq_lengths,
            scale=query.shape[-1] ** -0.5 if scale is None else scale,
            window=(left, right),
            score=None if logits_soft_cap is None else score,
            sinks=sinks,
            factors=factors,
        )
        return output, jnp.moveaxis(logsumexp, 1, 2)

    with jax.enable_x64(True):
        cast = [
            x if x is None else jnp.asarray(np.asarray(x), dtype) for x in (*operands, *cotangents)
        ]
        return jax.tree.map(np.asarray, gradients(attend, cast[:-2], *cast[-2:]))
