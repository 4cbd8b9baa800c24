"""`flash_attention`: contract, checks, choice of implementation."""

import math
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from tjk import checks
from tjk.choice import Implementation
from tjk.ops import masks
from tjk.ops.attention.contract import DTYPES, check_arrays, choose
from tjk.ops.attention.modifiers import dropout, segments, soft_cap
from tjk.ops.attention.operands import Modifiers, Operands, Options
from tjk.ops.attention.rule import attend
from tjk.precision import Precision, accumulator, resolve

_OP = "flash_attention"


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
    segment_ids: ArrayLike | tuple[ArrayLike, ArrayLike] | None = None,
    logits_soft_cap: float | None = None,
    dropout_rate: float = 0.0,
    dropout_key: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
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
    `s < key_value_seq_lengths[b]`; `mask` is True there; both have one segment id. A query that
    sees nothing gives 0 (where JAX gives the mean of the values), logsumexp -inf (or its sink), and
    gradients 0.

    With logits_soft_cap c the logits are c tanh(x / c). With sinks the sum in logsumexp has the
    term exp(sinks[n]) more. Dropout multiplies each weight, after the softmax, by 0 or by
    1 / (1 - dropout_rate): a hash of dropout_key and of b, n, t and s says which, so that nothing
    is stored, and one key gives one mask in all implementations (b counts in a device's own share
    of the batch: inside `jax.shard_map` keys must differ).

    Products accumulate in float32 and the softmax is float32. For bfloat16 and float16 the weights
    are rounded to value's dtype before their product with it; the output is rounded once.

    Differentiable in query, key, value, bias and sinks, through the output and the logsumexp.
    Gradients of query and bias add up in float32 atomics in Triton, in an order that varies between
    runs by roundings, unless deterministic. The output and the logsumexp carry the checkpoint names
    "flash_attention_output" and "flash_attention_logsumexp": a policy of `jax.checkpoint` that
    saves both runs the forward kernel once.

    ============== ========================================== =================================
    implementation dtypes, widths                             bias with deterministic
    ============== ========================================== =================================
    "triton"       float32, bfloat16, float16; H, V to 256    NotImplementedError
    "xla"          those and float64; any width               yes
    None           "triton" on a GPU where it can, else "xla"
    ============== ========================================== =================================

    Sources: Dao, FlashAttention-2, https://arxiv.org/abs/2307.08691; soft cap: Gemma 2,
    https://arxiv.org/abs/2408.00118; sinks: https://arxiv.org/abs/2508.10925.

    Args:
        query: (B, T, N, H), or (T, N, H).
        key: (B, S, K, H), or (S, K, H), in query's dtype. N must be a multiple of K: query head n
            uses key head n // (N / K).
        value: (B, S, K, V), or (S, K, V), in query's dtype.
        bias: added to the scaled products; each axis that of (B, N, T, S) or 1, or without the
            first.
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
        segment_ids: (B, T) integers where T = S, or a pair of (B, T) and (B, S): which of several
            sequences packed into one each position belongs to. Tiles without a common id are
            skipped.
        logits_soft_cap: c, positive.
        dropout_rate: the share of weights that are dropped, from 0 to below 1.
        dropout_key: a key of `jax.random`, needed where the rate is not 0.
        sinks: (N,) float32, the logit of each head of a key that has no value.
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
        NotImplementedError: for "triton" with a width above 256, or a bias if deterministic.

    Example:
        >>> import jax
        >>> from tjk.ops import flash_attention
        >>> x = jax.random.normal(jax.random.key(0), (2, 128, 4, 64))
        >>> flash_attention(x, x, x, is_causal=True).shape
        (2, 128, 4, 64)
    """
    query, key, value, batched = check_arrays(_OP, query, key, value, implementation)
    (B, T, N, H), S = query.shape, key.shape[1]
    if bias is not None:
        bias = _broadcastable("bias", bias, (B, N, T, S))
        checks.check_dtype(_OP, "bias", bias, (*DTYPES, "float64"))
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

    exact = accumulator(query.dtype)
    window = _window(is_causal, local_window_size, T, S)
    modifiers: dict[str, Any] = {}
    operands = Operands(query, key, value, bias, mask, *lengths)
    if logits_soft_cap is not None:
        if not logits_soft_cap > 0:
            checks.fail_value(_OP, "logits_soft_cap must be positive", logits_soft_cap)
        modifiers["score"] = soft_cap(float(logits_soft_cap), exact)
    if segment_ids is not None:
        ids = _segment_ids(segment_ids, batched, (B, T, S))
        modifiers["mask"], arrays = segments(ids)
        kinds = masks.kinds(*segments(ids, window), B, N, T, S)
        operands = operands._replace(mask_arrays=arrays, kinds=kinds)
    if not 0 <= dropout_rate < 1:
        checks.fail_value(_OP, "dropout_rate must be from 0 to below 1", dropout_rate)
    if dropout_rate > 0:
        if dropout_key is None:
            checks.fail_value(_OP, "dropout_key must be given where dropout_rate is not 0", None)
        modifiers["keep"], arrays = dropout(dropout_rate, dropout_key)
        modifiers["keep_scale"] = 1 / (1 - dropout_rate)
        operands = operands._replace(keep_arrays=arrays)
    if sinks is not None:
        sinks = jnp.asarray(sinks)
        checks.check_shape(_OP, "sinks", sinks, "N", {"N": N})
        checks.check_dtype(_OP, "sinks", sinks, (str(exact),))
        operands = operands._replace(sinks=sinks)

    options = Options(
        implementation=choose(
            *(_OP, implementation, query, value),
            **{"a bias with deterministic=True": bias is not None and deterministic},
        ),
        scale=1 / math.sqrt(H) if scale is None else float(scale),
        window=window,
        precision=resolve(_OP, precision),
        deterministic=bool(deterministic),
        modifiers=Modifiers(**modifiers),
    )
    output, logsumexp = attend(operands, options)
    if not batched:
        output, logsumexp = output[0], logsumexp[0]
    return (output, logsumexp) if return_residual else output


def _broadcastable(name: str, x: ArrayLike, shape: tuple[int, ...]) -> Array:
    """x with four axes, each 1 or that of (B, N, T, S)."""
    x = jnp.asarray(x)
    full = x[None] if x.ndim == 3 else x
    if full.ndim != 4 or any(size not in (1, whole) for size, whole in zip(full.shape, shape)):
        rule = f"{name} must have three or four axes that broadcast to (B, N, T, S)={shape}"
        checks.fail_value(_OP, rule, x.shape)
    return full


def _window(
    is_causal: bool, local_window_size: int | tuple[int, int] | None, T: int, S: int
) -> tuple[int | None, int | None]:
    """(left, right) of the visible positions; causal is right 0.

    None where a bound excludes no key, for it would cost a comparison for each logit; bounds that
    exclude all keys are made small, lest they overflow.
    """
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
    return (
        None if left is None or left >= T - 1 else max(left, -S),
        None if right is None or right >= S - 1 else max(right, -T),
    )


def _segment_ids(
    given: ArrayLike | tuple[ArrayLike, ArrayLike], batched: bool, sizes: tuple[int, int, int]
) -> tuple[Array, Array]:
    """The ids of queries and keys, with a batch axis."""
    B, T, S = sizes
    pair = given if isinstance(given, tuple) else (given, given)
    if len(pair) != 2:
        checks.fail_value(_OP, "segment_ids must be an array or a pair of arrays", len(pair))
    ids = []
    for name, x, size in zip(("of queries", "of keys"), pair, (T, S)):
        x = jnp.asarray(x)
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise TypeError(f"{_OP}: segment_ids must be integers, got {x.dtype}")
        x = x if batched else x[None]
        if x.shape != (B, size):
            rule = f"segment_ids {name} must have shape {(B, size) if batched else (size,)}"
            checks.fail_value(_OP, rule, x.shape if batched else x.shape[1:])
        ids.append(x.astype(jnp.int32))
    return ids[0], ids[1]
