"""`flex_attention`: attention that JAX functions of scalars modify."""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from tjk import checks
from tjk.choice import Implementation
from tjk.ops import masks
from tjk.ops.attention.contract import check_arrays, choose
from tjk.ops.attention.modifiers import trace_score
from tjk.ops.attention.operands import Modifiers, Operands, Options
from tjk.ops.attention.rule import attend
from tjk.ops.masks import BlockMask, MaskFunction
from tjk.precision import Precision, accumulator, resolve

_OP = "flex_attention"


def flex_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    score_mod: Callable[..., Array] | None = None,
    mask_mod: MaskFunction | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    return_residual: bool = False,
    precision: Precision = None,
    implementation: Implementation = None,
) -> Array | tuple[Array, Array]:
    r"""Attention whose logits and mask are JAX functions, compiled into the kernel.

    .. math::
        o_t = \sum_s p_{ts} v_s, \qquad p_{ts} = \exp(x_{ts} - \ell_t), \qquad
        x_{ts} = \mathrm{score\_mod}(\mathrm{scale}\; q_t \cdot k_s, b, h, t, s), \qquad
        \ell_t = \log \sum_s \exp x_{ts}

    with sums over the keys s for which mask_mod(b, h, t, s) is True. A query that sees nothing
    gives 0, logsumexp -inf, and gradients 0. Dtypes and roundings are those of `flash_attention`.

    Both functions take and return scalars: score (float32, float64 in float64), b, h, q_idx and
    kv_idx (int32). They are traced once, for all positions, so that Python's `if` cannot ask for a
    value: `jnp.where` can. Arrays that they close over are read at scalar indices, as in
    `slopes[h]` or `table[q_idx - kv_idx + T]`. Arithmetic, comparisons, logic, `jnp.where`,
    minima and maxima, exponentials, logarithms, roots, `jnp.tanh`, integer division and conversions
    are supported; anything else is refused by name. A function must not have side effects.

    Differentiable in query, key, value and the float arrays that score_mod reads, through output
    and logsumexp. In Triton gradients of query and of such arrays add up in float32 atomics, in an
    order that varies between runs by roundings. Where many logits read one element they queue up
    there: a bias of every pair is cheap, a table of distances is not.

    Tiles of 64 queries and 64 keys that mask_mod leaves empty are not visited, and in those that it
    leaves full it is not asked. Which they are is found out in each call, unless `block_mask` says
    it: `tjk.ops.masks.block_mask` classifies once for many calls.

    ============== ========================================== ======
    implementation dtypes                                     widths
    ============== ========================================== ======
    "triton"       float32, bfloat16, float16                 to 256
    "xla"          those and float64                          any
    None           "triton" on a GPU where it can, else "xla"
    ============== ========================================== ======

    Source: Dong et al., FlexAttention, https://arxiv.org/abs/2412.05496.

    Args:
        query: (B, T, N, H), or (T, N, H).
        key: (B, S, K, H), or (S, K, H), in query's dtype. N must be a multiple of K: query head n
            uses key head n // (N / K).
        value: (B, S, K, V), or (S, K, V), in query's dtype.
        score_mod: from (score, b, h, q_idx, kv_idx) to the logit, in score's dtype.
        mask_mod: from (b, h, q_idx, kv_idx) to a bool; `tjk.ops.masks` has some.
        block_mask: for T queries and S keys, from the same mask_mod. Alone it shows all of a tile
            that is not empty.
        scale: of the products; 1 / sqrt(H) if None.
        return_residual: whether to return the logsumexp, too.
        precision: of float32 products: None is JAX's default (TF32 on a GPU), "highest" IEEE
            float32.
        implementation: "triton", "xla", or None to choose when the program is lowered. A name
            never falls back: it runs or raises.

    Returns:
        The output, (B, T, N, V) or (T, N, V) in query's dtype. With return_residual a pair of it
        and the logsumexp, (B, T, N) or (T, N) float32, natural logarithm.

    Raises:
        TypeError: for a dtype outside the table, differing dtypes, or a function whose result has
            another dtype than it should.
        ValueError: for a shape or value that does not fit; for "triton" lowered for a CPU without
            the interpreter.
        NotImplementedError: for a function with an operation that is not supported, or with side
            effects; for "triton" with a width above 256, or a function that computes in float64 (as
            Python's 0.5 times an integer does with jax_enable_x64).

    Example:
        >>> import jax
        >>> from tjk.ops import flex_attention, masks
        >>> x = jax.random.normal(jax.random.key(0), (2, 128, 4, 64))
        >>> slopes = jax.numpy.array([0.5, 0.25, 0.125, 0.0625])
        >>> def alibi(score, b, h, q_idx, kv_idx):
        ...     return score - slopes[h] * (q_idx - kv_idx)
        >>> flex_attention(x, x, x, score_mod=alibi, mask_mod=masks.causal).shape
        (2, 128, 4, 64)
    """
    query, key, value, batched = check_arrays(_OP, query, key, value, implementation)
    (B, T, N, H), S = query.shape, key.shape[1]
    exact = accumulator(query.dtype)
    operands = Operands(query, key, value)
    modifiers: dict[str, Any] = {}
    if score_mod is not None:
        modifiers["score"], arrays = trace_score(_OP, score_mod, exact)
        operands = operands._replace(score_arrays=arrays)
    if mask_mod is not None:
        modifiers["mask"], arrays = masks.trace(_OP, "mask_mod", mask_mod)
        operands = operands._replace(mask_arrays=arrays)
    if block_mask is not None:
        _check_block_mask(block_mask, (B, N, T, S))
        operands = operands._replace(kinds=block_mask.kinds)
    elif mask_mod is not None:
        kinds = masks.kinds(modifiers["mask"], operands.mask_arrays, B, N, T, S)
        operands = operands._replace(kinds=kinds)
    is_double = any(program.is_double for program in modifiers.values())
    options = Options(
        implementation=choose(
            *(_OP, implementation, query, value),
            **{"a function that computes in float64": is_double and query.dtype != jnp.float64},
        ),
        scale=1 / math.sqrt(H) if scale is None else float(scale),
        precision=resolve(_OP, precision),
        modifiers=Modifiers(**modifiers),
    )
    output, logsumexp = attend(operands, options)
    if not batched:
        output, logsumexp = output[0], logsumexp[0]
    return (output, logsumexp) if return_residual else output


def _check_block_mask(block_mask: BlockMask, sizes: tuple[int, int, int, int]) -> None:
    B, N, T, S = sizes
    if (block_mask.T, block_mask.S) != (T, S):
        checks.fail_value(
            _OP, f"block_mask must be for T={T} and S={S}", f"T={block_mask.T}, S={block_mask.S}"
        )
    batches, heads, *_ = jnp.shape(block_mask.kinds)
    if batches not in (1, B) or heads not in (1, N):
        rule = f"block_mask must be for batch={B} or all, and for heads={N} or all"
        checks.fail_value(_OP, rule, f"batch={batches}, heads={heads}")
