"""The scans as one writes them in JAX without kernels: the baseline of the ssm suite.

Functions with those arguments of `tjk.ops` that the suite's cells pass, differentiated by JAX.
The diagonal recurrences are associative scans, the others chunks of einsums with a scan over the
chunks' states. Products are of operands in x's dtype, decays and states float32.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from tjk.nn.cells import Scans
from tjk.nn.layers import at_least_float32

CHUNK = 64
SOLVED_AT_ONCE = 16  # rows of a triangular system


def linear_scan(a: Array, x: Array, *, reverse: bool) -> Array:
    """a (D,), x (B, L, D)."""
    a = jnp.broadcast_to(a, (1, *x.shape[1:]))  # one for all the batch
    return lax.associative_scan(_then, (a, x), reverse=reverse, axis=1)[1]


def selective_scan(
    x: Array,
    delta: Array,
    A: Array,
    B: Array,
    C: Array,
    D: Array,
    *,
    delta_softplus: bool,
    reverse: bool,
) -> Array:
    """One sequence at a time and rematerialised: all of a batch's (B, L, D, R) fit no card."""

    @jax.checkpoint
    def one(sequence: tuple[Array, ...]) -> Array:
        x, delta, B, C = (at_least_float32(a) for a in sequence)
        delta = jax.nn.softplus(delta) if delta_softplus else delta
        decay = jnp.exp(delta[:, :, None] * A)  # (L, D, R)
        inputs = (delta * x)[:, :, None] * B[:, None]
        _, h = lax.associative_scan(_then, (decay, inputs), reverse=reverse)
        return jnp.einsum("ldr,lr->ld", h, C) + D * x

    return lax.map(one, (x, delta, B, C)).astype(x.dtype)


def ssd_scan(
    x: Array,
    dt: Array,
    A: Array,
    B: Array,
    C: Array,
    D: Array,
    *,
    dt_bias: Array,
    dt_softplus: bool,
    reverse: bool,
) -> Array:
    """x (B, L, H, P), dt (B, L, H), B and C (B, L, G, R)."""
    dtype, exact, heads = x.dtype, A.dtype, x.shape[2]
    dt = dt.astype(exact) + dt_bias
    dt = jax.nn.softplus(dt) if dt_softplus else dt
    B, C = (jnp.repeat(a, heads // a.shape[2], axis=2) for a in (B, C))
    product = functools.partial(jnp.einsum, preferred_element_type=exact)

    def chunked(x: Array, dt: Array, B: Array, C: Array) -> Array:
        total = jnp.cumsum(dt * A, axis=2)  # (B, c, t, H)
        between = jnp.exp(_differences(total.swapaxes(2, 3)))  # (B, c, H, t, s)
        steps = (x * dt[..., None]).astype(dtype)
        scores = product("bcthr,bcshr->bchts", C, B) * between
        y = product("bchts,bcshp->bcthp", scores.astype(dtype), steps)
        to_end = jnp.exp(total[:, :, -1:] - total)
        ends = product("bcth,bcthr,bcthp->bchpr", to_end.astype(dtype), B, steps)
        states = _carry(jnp.exp(total[:, :, -1])[..., None, None], ends)
        from_start = jnp.exp(total)
        y += product("bcthr,bchpr->bcthp", C, states.astype(dtype)) * from_start[..., None]
        return y

    y = _in_chunks(chunked, (x, dt, B, C), reverse)
    return (y + D[:, None] * x).astype(dtype)


def gated_delta_rule(
    q: Array, k: Array, v: Array, g: Array, beta: Array, *, l2_normalize: bool, reverse: bool
) -> Array:
    """q, k (B, L, H, K), v (B, L, H, V), g, beta (B, L, H)."""
    dtype, exact = v.dtype, g.dtype
    if l2_normalize:
        q, k = (_normalized(a) for a in (q, k))
    q = q * q.shape[-1] ** -0.5
    product = functools.partial(jnp.einsum, preferred_element_type=exact)

    def chunked(q: Array, k: Array, v: Array, g: Array, beta: Array) -> Array:
        q, k, v = (a.swapaxes(2, 3) for a in (q, k, v))  # (B, c, H, t, K)
        total = jnp.cumsum(g, axis=2).swapaxes(2, 3)  # (B, c, H, t)
        beta = beta.swapaxes(2, 3)[..., None]
        between = jnp.exp(_differences(total))  # (B, c, H, t, s)
        lower = jnp.tril(beta * product("bchtk,bchsk->bchts", k, k) * between, -1)
        right = jnp.concatenate((beta * v, beta * jnp.exp(total)[..., None] * k), axis=-1)
        u, w = jnp.split(_solve(lower, right), (v.shape[-1],), axis=-1)
        scores = (product("bchtk,bchsk->bchts", q, k) * between).astype(dtype)
        queries = (q * jnp.exp(total)[..., None]).astype(dtype)
        to_end = jnp.exp(total[..., -1:] - total)[..., None]
        keys = (k * to_end).astype(dtype)

        def step(S: Array, chunk: tuple[Array, ...]) -> tuple[Array, Array]:
            u, w, scores, queries, keys, decay = chunk
            new = (u - product("bhtk,bhkv->bhtv", w, S)).astype(dtype)
            out = product("bhtk,bhkv->bhtv", queries, S.astype(dtype))
            out += product("bhts,bhsv->bhtv", scores, new)
            return decay[..., None, None] * S + product("bhtk,bhtv->bhkv", keys, new), out

        decay = jnp.exp(total[..., -1])
        chunks = (jnp.moveaxis(a, 1, 0) for a in (u, w, scores, queries, keys, decay))
        first = jnp.zeros((*k.shape[:1], *k.shape[2:3], k.shape[-1], v.shape[-1]), exact)
        _, y = lax.scan(step, first, tuple(chunks))  # (c, B, H, t, V)
        return y.transpose(1, 0, 3, 2, 4)

    return _in_chunks(chunked, (q, k, v, g, beta), reverse).astype(dtype)


def causal_conv1d(
    x: Array, weight: Array, bias: Array, *, activation: str | None, reverse: bool
) -> Array:
    """x (B, L, D), weight (D, W): a sum of shifted arrays, of which only the end is rounded."""
    dtype, x, weight, bias = x.dtype, *map(at_least_float32, (x, weight, bias))
    (L, width), padding = (x.shape[1], weight.shape[1]), (weight.shape[1] - 1, 0)
    padded = jnp.pad(x, ((0, 0), padding[::-1] if reverse else padding, (0, 0)))
    taps = range(width)[::-1] if reverse else range(width)
    y = sum(padded[:, i : i + L] * weight[:, j] for i, j in enumerate(taps)) + bias
    return (jax.nn.silu(y) if activation == "silu" else y).astype(dtype)


def _then(first: tuple[Array, Array], second: tuple[Array, Array]) -> tuple[Array, Array]:
    """h -> a h + b, one after the other."""
    return first[0] * second[0], second[0] * first[1] + second[1]


def _differences(total: Array) -> Array:
    """(..., t) -> (..., t, s): total_t - total_s, -inf where s > t."""
    t = jnp.arange(total.shape[-1])
    return jnp.where(t[:, None] >= t, total[..., :, None] - total[..., None, :], -jnp.inf)


def _solve(lower: Array, right: Array) -> Array:
    """(1 + lower)^-1 right, of strictly lower triangles (..., t, t).

    By products, because `lax.linalg.triangular_solve` of so many small systems is slow on a GPU,
    and hangs on a CPU in a gradient (jax 0.10.2): halves one after the other and, of few rows,
    (1 - N)(1 + N^2)(1 + N^4)..., whose error grows with the number of rows.
    """
    t = lower.shape[-1]
    if t > SOLVED_AT_ONCE:
        h = t // 2
        first = _solve(lower[..., :h, :h], right[..., :h, :])
        rest = right[..., h:, :] - lower[..., h:, :h] @ first
        return jnp.concatenate((first, _solve(lower[..., h:, h:], rest)), axis=-2)
    power = -lower
    solved = right + power @ right
    for _ in range(1, (t - 1).bit_length()):
        power = power @ power
        solved = solved + power @ solved
    return solved


def _carry(decay: Array, ends: Array) -> Array:
    """The states at the starts of chunks (B, c, ...) that each add `ends` to a decayed state."""

    def step(state: Array, chunk: tuple[Array, Array]) -> tuple[Array, Array]:
        decay, end = chunk
        return decay * state + end, state

    by_chunk = (jnp.moveaxis(decay, 1, 0), jnp.moveaxis(ends, 1, 0))
    return jnp.moveaxis(lax.scan(step, jnp.zeros_like(ends[:, 0]), by_chunk)[1], 0, 1)


def _normalized(x: Array) -> Array:
    wide = at_least_float32(x)
    norm = lax.rsqrt(jnp.sum(jnp.square(wide), axis=-1, keepdims=True) + 1e-6)
    return (wide * norm).astype(x.dtype)


def _in_chunks(function: Callable[..., Array], inputs: Any, reverse: bool) -> Array:
    """A function of (B, chunks, time, ...) applied to (B, L, ...), padded with zeros."""
    L = inputs[0].shape[1]
    chunk = min(CHUNK, L)

    def cut(x: Array) -> Array:
        x = jnp.flip(x, 1) if reverse else x
        x = jnp.pad(x, ((0, 0), (0, -L % chunk), *((0, 0),) * (x.ndim - 2)))
        return x.reshape(x.shape[0], -1, chunk, *x.shape[2:])

    y = function(*(cut(x) for x in inputs))
    y = y.reshape(y.shape[0], -1, *y.shape[3:])[:, :L]
    return jnp.flip(y, 1) if reverse else y


SCANS = Scans(linear_scan, selective_scan, ssd_scan, gated_delta_rule, causal_conv1d)
