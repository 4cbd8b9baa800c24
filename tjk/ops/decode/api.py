"""`decode_attention`: contract, checks, choice of implementation."""

import dataclasses
import functools
import math
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from tjk import checks, choice
from tjk.choice import Implementation
from tjk.manual_axes import vary_together
from tjk.ops.attention.contract import check_arrays, choose
from tjk.ops.decode import xla
from tjk.precision import Precision, resolve

_OP = "decode_attention"


def decode_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    lengths: ArrayLike,
    scale: float | None = None,
    local_window_size: int | None = None,
    logits_soft_cap: float | None = None,
    return_residual: bool = False,
    splits: int | None = None,
    precision: Precision = None,
    implementation: Implementation = None,
) -> Array | tuple[Array, Array]:
    r"""Attention of the last one or few tokens over a cache of keys and values, for generation.

    .. math::
        o_t = \sum_s \exp(x_{ts} - \ell_t)\, v_s, \qquad
        x_{ts} = \mathrm{scale}\; q_t \cdot k_s, \qquad \ell_t = \log \sum_s \exp x_{ts}

    with sums over the keys that the query sees. The T queries are the last of the lengths[b]
    tokens whose keys and values the cache of sequence b holds: query t stands at position
    p = lengths[b] - T + t and sees key s if `s <= p`, and `s >= p - left` with local_window_size.
    A query that sees nothing (p < 0) gives 0 and logsumexp -inf. What the cache holds from
    lengths[b] on is never used, be it NaN. With logits_soft_cap c the logits are c tanh(x / c).

    This is the last rows of `flash_attention` with is_causal. In Triton all T N / K queries of one
    key head share a program, so that the cache is read once (where they are more than 64, once for
    each 64), and so many programs share a cache that the card is full; a second kernel combines
    what they found. Two runs give the same bits.

    Products accumulate in float32 and the softmax is float32. For bfloat16 and float16 the weights
    are rounded to value's dtype before their product with it; the output is rounded once.

    Not differentiable: under `jax.grad` it raises, and `flash_attention` is what to train with.

    ============== ========================================== ======
    implementation dtypes, widths                             splits
    ============== ========================================== ======
    "triton"       float32, bfloat16, float16; H, V to 256    used
    "xla"          those and float64; any width               unused
    None           "triton" on a GPU where it can, else "xla"
    ============== ========================================== ======

    Source: Dao, Haziza, Massa, Sizov: Flash-Decoding for long-context inference,
    https://crfm.stanford.edu/2023/10/12/flashdecoding.html.

    Args:
        query: (B, T, N, H), or (B, N, H) for one token.
        key: (B, S, K, H), in query's dtype. N must be a multiple of K: query head n uses key head
            n // (N / K).
        value: (B, S, K, V), in query's dtype.
        lengths: (B,) int32, how many tokens the cache holds, those of the query counted; clamped
            to 0 and S.
        scale: of the logits; 1 / sqrt(H) if None.
        local_window_size: how many positions before its own a query sees; None is all.
        logits_soft_cap: c, positive.
        return_residual: whether to return the logsumexp, too.
        splits: in how many parts a cache is read at a time; None fills the card. No more are made
            than there are tiles of keys.
        precision: of float32 products: None is JAX's default (TF32 on a GPU), "highest" IEEE
            float32.
        implementation: "triton", "xla", or None to choose when the program is lowered. A name
            never falls back: it runs or raises.

    Returns:
        The output, (B, T, N, V) or (B, N, V) in query's dtype. With return_residual a pair of it
        and the logsumexp, (B, T, N) or (B, N) float32, natural logarithm.

    Raises:
        TypeError: for a dtype outside the table or differing dtypes.
        ValueError: for a shape or value that does not fit; for "triton" lowered for a CPU without
            the interpreter.
        NotImplementedError: for "triton" with a width above 256; when differentiated.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from tjk.ops import decode_attention
        >>> cache = jax.random.normal(jax.random.key(0), (2, 1024, 4, 64))
        >>> query = jax.random.normal(jax.random.key(1), (2, 32, 64))
        >>> decode_attention(query, cache, cache, lengths=jnp.array([1000, 7], jnp.int32)).shape
        (2, 32, 64)
    """
    query = jnp.asarray(query)
    if query.ndim not in (3, 4):
        checks.fail_value(_OP, "query must have shape (B, T, N, H) or (B, N, H)", query.shape)
    is_one = query.ndim == 3
    query, key, value, _ = check_arrays(
        *(_OP, query[:, None] if is_one else query, key, value, implementation)
    )
    lengths = jnp.asarray(lengths)
    checks.check_shape(_OP, "lengths", lengths, "B", {"B": len(query)})
    checks.check_dtype(_OP, "lengths", lengths, ("int32",))
    if local_window_size is not None and local_window_size < 0:
        checks.fail_value(_OP, "local_window_size must be at least 0", local_window_size)
    if logits_soft_cap is not None and not logits_soft_cap > 0:
        checks.fail_value(_OP, "logits_soft_cap must be positive", logits_soft_cap)
    if splits is not None and splits < 1:
        checks.fail_value(_OP, "splits must be at least 1", splits)
    # A bound that every key meets would cost a comparison for each logit.
    is_bound = local_window_size is not None and local_window_size < key.shape[1] - 1
    options = _Options(
        implementation=choose(_OP, implementation, query, value),
        scale=1 / math.sqrt(query.shape[-1]) if scale is None else float(scale),
        left=int(local_window_size) if is_bound else None,
        soft_cap=None if logits_soft_cap is None else float(logits_soft_cap),
        splits=None if splits is None else int(splits),
        precision=resolve(_OP, precision),
    )
    output, logsumexp = _decode(*vary_together(query, key, value, lengths), options)
    if is_one:
        output, logsumexp = output[:, 0], logsumexp[:, 0]
    return (output, logsumexp) if return_residual else output


@dataclasses.dataclass(frozen=True)
class _Options:
    """What is fixed while a program is traced."""

    implementation: Implementation
    scale: float
    left: int | None
    soft_cap: float | None
    splits: int | None
    precision: str


@functools.partial(jax.custom_jvp, nondiff_argnums=(4,))
def _decode(
    query: Array, key: Array, value: Array, lengths: Array, options: _Options
) -> tuple[Array, Array]:
    """Output (B, T, N, V) and logsumexp (B, T, N)."""
    shared = {name: getattr(options, name) for name in ("scale", "left", "soft_cap", "precision")}

    def triton(*operands: Array) -> tuple[Array, Array]:
        from tjk.ops.decode import triton  # needs the package triton, which Linux alone has

        return triton.forward(*operands, splits=options.splits, **shared)

    plain = functools.partial(xla.forward, **shared)
    return choice.dispatch(options.implementation, triton, plain, query, key, value, lengths)


@_decode.defjvp
def _no_derivative(*_: Any) -> NoReturn:
    raise NotImplementedError(
        f"{_OP}: has no derivative; use flash_attention for training, or jax.lax.stop_gradient on "
        "query, key and value"
    )
