"""The gated delta rule in plain JAX: a loop over chunks, all of a chunk's tokens at a time.

In a chunk, with c the running sum of g, S the transposed state that enters, and G[i, j] =
exp(c_i - c_j) for j <= i, else 0 (all of this also 0 between segments):

    A = beta G (k k^T) below the diagonal            T = (I + A)^-1
    new = T beta (v - exp(c) k S)                    S' = exp(c_last) S + (exp(c_last - c) k)^T new
    o = scale (exp(c) q S + G (q k^T) new)

The backward pass runs the loop in reverse and makes all of this again from S. None of it outlives
its chunk. Heads stand before time, (B, H, C, width), and gates are columns, (B, H, C, 1).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from tjk.ops.delta_rule.operands import Operands
from tjk.precision import accumulator

_BASE = 8  # rows of a triangular system that are eliminated one by one


class _Tokens(NamedTuple):
    """The inputs of a chunk; of all chunks with a leading axis (n, ...)."""

    q: Array
    k: Array
    v: Array
    g: Array
    beta: Array
    runs: Array | None  # (B, 1, C, 1)
    before: Array | None  # (B, 1, 1, 1): the run of the token before the chunk


class _Gates(NamedTuple):
    """Decays inside a chunk: from its start, to its end, from each token to each later one."""

    start: Array  # (B, H, C, 1)
    end: Array  # (B, H, C, 1)
    whole: Array  # (B, H, 1, 1)
    between: Array  # (B, H, C, C)


def forward(
    operands: Operands,
    *,
    chunk_size: int,
    scale: float,
    l2_normalize: bool,
    reverse: bool,
    precision: str,
    keep: bool,
) -> tuple[Array, Array, Array | None]:
    """o (B, L, H, V), the final state, and the state before each chunk, if it is to be kept."""
    q, v, state = operands.q, operands.v, operands.initial_state
    product = _product(q.dtype, precision)

    def step(state: Array, tokens: _Tokens) -> tuple[Array, tuple[Array, Array]]:
        gates, (q, _), (k, _), v, beta = _prepare(tokens, scale, l2_normalize)
        products = product("bhtk,bhsk->bhts", k, k)
        inverse = _inverse(jnp.tril(beta * gates.between * products, -1))
        corrected = v - gates.start * product("bhtk,bhkv->bhtv", k, state)
        new = product("bhts,bhsv->bhtv", inverse, beta * corrected)
        o = gates.start * product("bhtk,bhkv->bhtv", q, state)
        scores = gates.between * product("bhtk,bhsk->bhts", q, k)
        o += product("bhts,bhsv->bhtv", scores, new)
        following = gates.whole * state + product("bhtk,bhtv->bhkv", k, gates.end * new)
        return following, (o.astype(tokens.v.dtype), state)

    if state is None:
        shape = (q.shape[0], *q.shape[2:], v.shape[-1])
        state = jnp.zeros_like(q, accumulator(q.dtype), shape=shape)  # varies as q in shard_map
    tokens = _chunks(operands, chunk_size, reverse)
    state, (o, states) = lax.scan(step, state, tokens)
    states = jnp.moveaxis(states, 0, 1) if keep else None
    return _sequence(o, q.shape[1], reverse), state, states


def backward(
    operands: Operands,
    states: Array,
    d_o: Array,
    d_state: Array,
    *,
    chunk_size: int,
    scale: float,
    l2_normalize: bool,
    reverse: bool,
    precision: str,
) -> Operands:
    """The gradients of all operands, in their dtypes."""
    product = _product(operands.q.dtype, precision)

    def step(d_next: Array, chunk: tuple[_Tokens, Array, Array]) -> tuple[Array, Any]:
        tokens, state, d_o = chunk
        inputs, d_o = tokens[:5], d_o.astype(state.dtype)
        gates, (q, q_vjp), (k, k_vjp), v, beta = _prepare(tokens, scale, l2_normalize)
        # The forward pass again.
        products = product("bhtk,bhsk->bhts", k, k)
        system = jnp.tril(beta * gates.between * products, -1)
        inverse = _inverse(system)
        recalled = gates.start * product("bhtk,bhkv->bhtv", k, state)
        corrected = v - recalled
        new = product("bhts,bhsv->bhtv", inverse, beta * corrected)
        scores = gates.between * product("bhtk,bhsk->bhts", q, k)
        # Back through o and the next state to `new`, and from there through the inverse.
        d_o_state = product("bhtv,bhkv->bhtk", d_o, state) * gates.start
        d_scores = jnp.tril(product("bhtv,bhsv->bhts", d_o, new))
        d_new = product("bhts,bhtv->bhsv", scores, d_o)
        d_new += gates.end * product("bhtk,bhkv->bhtv", k, d_next)
        d_k_end = gates.end * product("bhtv,bhkv->bhtk", new, d_next)
        d_right = product("bhts,bhtv->bhsv", inverse, d_new)
        d_system = -jnp.tril(product("bhtv,bhsv->bhts", d_right, new), -1)
        d_corrected = beta * d_right
        d_beta = jnp.sum(d_right * corrected, -1, keepdims=True)
        d_beta += jnp.sum(d_system * gates.between * products, -1, keepdims=True)
        # Queries and keys.
        d_scores_gated = d_scores * gates.between
        d_products = beta * d_system * gates.between
        d_q = d_o_state + product("bhts,bhsk->bhtk", d_scores_gated, k)
        d_k = product("bhts,bhtk->bhsk", d_scores_gated, q) + d_k_end
        d_k -= gates.start * product("bhtv,bhkv->bhtk", d_corrected, state)
        d_k += product("bhts,bhsk->bhtk", d_products + d_products.mT, k)
        # The running sums of g: what decays from s to t counts at t and, with a minus, at s.
        d_between = jnp.tril(d_scores * scores + d_system * system, -1)
        to_end = jnp.sum(d_k_end * k, -1, keepdims=True)
        d_sums = jnp.sum(d_between, -1, keepdims=True) - jnp.sum(d_between, -2)[..., None]
        d_sums += jnp.sum(d_o_state * q, -1, keepdims=True) - to_end
        d_sums -= jnp.sum(d_corrected * recalled, -1, keepdims=True)
        d_last = gates.whole * jnp.sum(d_next * state, (-1, -2), keepdims=True)
        d_last += jnp.sum(to_end, -2, keepdims=True)
        d_g = lax.cumsum(d_sums, axis=2, reverse=True) + d_last
        # The state before.
        d_state = gates.whole * d_next
        d_state += product("bhtk,bhtv->bhkv", q, gates.start * d_o)
        d_state -= product("bhtk,bhtv->bhkv", k, gates.start * d_corrected)
        gradients = (*q_vjp(d_q), *k_vjp(d_k), d_corrected, d_g, d_beta)
        return d_state, tuple(d.astype(x.dtype) for d, x in zip(gradients, inputs))

    tokens = _chunks(operands, chunk_size, reverse)
    d_outputs = _cut(d_o, chunk_size, reverse)
    xs = (tokens, jnp.moveaxis(states, 1, 0), d_outputs)
    d_state, gradients = lax.scan(step, d_state, xs, reverse=True)
    L = operands.q.shape[1]
    *d_qkv, d_g, d_beta = (_sequence(d, L, reverse) for d in gradients)
    d_g = d_g[..., 0].astype(operands.g.dtype)
    d_beta = d_beta[..., 0].astype(operands.beta.dtype)
    d_state = None if operands.initial_state is None else d_state
    return Operands(*d_qkv, d_g, d_beta, d_state)


def _chunks(operands: Operands, chunk_size: int, reverse: bool) -> _Tokens:
    """The inputs cut in chunks, which an appendix of zeros fills up; gates in full precision."""
    q, k, v, g, beta, _, runs = operands
    exact = accumulator(q.dtype)
    cut = functools.partial(_cut, chunk_size=chunk_size, reverse=reverse)
    gates = (cut(x.astype(exact)[..., None]) for x in (g, beta))
    if runs is not None:
        runs = cut(runs[..., None, None], mode="edge")
        last = runs[:-1, :, :, -1:]
        before = jnp.concatenate((jnp.zeros_like(runs[:1, :, :, :1]), last))
        return _Tokens(cut(q), cut(k), cut(v), *gates, runs, before)
    return _Tokens(cut(q), cut(k), cut(v), *gates, None, None)


def _cut(x: Array, chunk_size: int, reverse: bool, mode: str = "constant") -> Array:
    """(B, L, H, ...) to (n, B, H, C, ...), in the order of the scan."""
    if reverse:
        x = jnp.flip(x, 1)
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % chunk_size), (0, 0), (0, 0)), mode)
    x = x.reshape(x.shape[0], -1, chunk_size, *x.shape[2:])
    return x.transpose(1, 0, 3, 2, 4)


def _sequence(x: Array, L: int, reverse: bool) -> Array:
    """The inverse of `_cut`."""
    x = x.transpose(1, 0, 3, 2, 4)
    x = x.reshape(x.shape[0], -1, *x.shape[3:])[:, :L]
    return jnp.flip(x, 1) if reverse else x


def _prepare(
    tokens: _Tokens, scale: float, l2_normalize: bool
) -> tuple[_Gates, tuple[Array, Callable], tuple[Array, Callable], Array, Array]:
    """Gates, scaled queries and keys with their derivatives' rules, values, and beta."""
    exact = tokens.g.dtype

    def scaled(scale: float, x: Array) -> Array:
        x = x.astype(exact)
        if l2_normalize:
            scale = scale * lax.rsqrt(jnp.sum(jnp.square(x), -1, keepdims=True) + 1e-6)
        return scale * x

    queries = jax.vjp(functools.partial(scaled, scale), tokens.q)
    keys = jax.vjp(functools.partial(scaled, 1.0), tokens.k)
    return _gates(tokens), queries, keys, tokens.v.astype(exact), tokens.beta


def _gates(tokens: _Tokens) -> _Gates:
    # A decay that is 0 anyway must not cost the sums after it their digits.
    least = jnp.log(jnp.finfo(tokens.g.dtype).smallest_subnormal)
    sums = jnp.cumsum(jnp.maximum(tokens.g, least), axis=2)
    last = sums[:, :, -1:]
    C = sums.shape[2]
    apart = jnp.tril(jnp.ones((C, C), bool))
    differences = sums - sums.mT
    start, end, whole = sums, last - sums, last
    if tokens.runs is not None:
        final = tokens.runs[:, :, -1:]
        apart = apart & (tokens.runs == tokens.runs.mT)
        start = _where(tokens.runs == tokens.before, start)
        end = _where(tokens.runs == final, end)
        whole = _where(final == tokens.before, whole)
    return _Gates(jnp.exp(start), jnp.exp(end), jnp.exp(whole), jnp.exp(_where(apart, differences)))


def _where(connected: Array, exponent: Array) -> Array:
    """-inf where two tokens are not connected, which makes the decay between them 0."""
    return jnp.where(connected, exponent, jnp.full_like(exponent, -jnp.inf))


def _product(dtype: jnp.dtype, precision: str) -> Callable[..., Array]:
    """`einsum` of operands rounded to a dtype, with sums of at least float32."""
    exact = accumulator(dtype)

    def product(subscripts: str, *operands: Array) -> Array:
        operands = tuple(x.astype(dtype) for x in operands)
        return jnp.einsum(subscripts, *operands, precision=precision, preferred_element_type=exact)

    return product


def _inverse(system: Array) -> Array:
    """(I + system)^-1 of strictly lower triangles (..., C, C), in full precision.

    By halves: the corner of the inverse is minus the lower half's inverse times the system's corner
    times the upper half's. All entries are those of some inverse, so none is larger than the result
    implies: with |k| <= 1 and beta <= 2 that is 2, where powers of the system grow beyond bounds.
    """
    C = system.shape[-1]
    if C <= _BASE:
        inverse = jnp.broadcast_to(jnp.eye(C, dtype=system.dtype), system.shape)
        for j in range(C - 1):
            inverse -= system[..., :, j, None] * inverse[..., j, None, :]
        return inverse
    product = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)
    h = C // 2
    upper, lower = _inverse(jnp.stack((system[..., :h, :h], system[..., h:, h:])))
    corner = -product(lower, product(system[..., h:, :h], upper))
    top = jnp.concatenate((upper, jnp.zeros_like(upper)), -1)
    return jnp.concatenate((top, jnp.concatenate((corner, lower), -1)), -2)
