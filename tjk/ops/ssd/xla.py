"""The scan in plain JAX: a loop over chunks, each of which is a few parts computed side by side.

As in the kernels: products inside a part and with the state at its start, decays in logarithms,
and nothing kept but the states at the starts of chunks. 16-bit inputs are widened first, since CPUs
multiply them no faster. Letters of einsums: b batch, k parts of a chunk, i and j tokens of a part,
g groups, h heads of a group, p and r the axes of a state.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from tjk.ops.ssd.operands import Operands

_PART = 64  # tokens

# By dtype: where a logarithm's exponential is 0 surely, and a unit of which sums of 256 logarithms
# above that are exact multiples: 256 limit / unit is 2^24 (2^53).
_LIMIT_AND_UNIT = {"float32": (128.0, 2.0**-9), "float64": (1024.0, 2.0**-35)}

_Product = Callable[..., Array]


class _Chunk(NamedTuple):
    """Inputs of a chunk in the order of the scan: x, z, d_y (b, k, i, g, h, p), dt (b, k, i, g, h).

    B, C (b, k, i, g, r); runs (b, k, i) and previous_run (b, k), that of the token before a part.
    dt is the step after bias and softplus, 0 in padding.
    """

    x: Array
    dt: Array
    B: Array
    C: Array
    z: Array | None
    d_y: Array | None
    runs: Array | None
    previous_run: Array | None


class _Decays(NamedTuple):
    """What remains of a state, 0 where the segment is another.

    From token j to i (b, k, g, h, i, j), 0 where i < j; from the state before a part to its tokens,
    and from them to the state behind it, (b, k, i, g, h); from state to state (b, k, g, h).
    """

    between: Array
    from_start: Array
    to_end: Array
    total: Array


def forward(
    operands: Operands, *, chunk_size: int, dt_softplus: bool, reverse: bool, precision: str
) -> tuple[Array, Array, Array]:
    """y, the final state, and the states at the starts of chunks: (B, chunks, H, P, R)."""
    layout = _Layout(operands, chunk_size, reverse)
    A, D = layout.per_head(operands.A), layout.per_head(operands.D)
    product = functools.partial(jnp.einsum, precision=precision)

    def body(state: Array, chunk: _Chunk) -> tuple[Array, tuple[Array, Array]]:
        chunk = layout.widened(chunk)
        decays = _decays(chunk, A)
        states, last = _states(state, chunk, decays, product)
        y = _gated(_outputs(chunk, states, decays, D, product), chunk.z)
        return last, (y.astype(operands.x.dtype), state)

    dt = _steps(operands.dt, operands.dt_bias, A.dtype, dt_softplus)
    first = layout.state(operands.initial_state)
    last, (y, states) = lax.scan(body, first, layout.chunks(operands, dt))
    shape = layout.batch, *layout.state_shape
    states = jnp.moveaxis(states, 0, 1).reshape(shape[0], -1, *shape[1:])
    return layout.join(y, operands.x.shape), last.reshape(shape), states


def backward(
    operands: Operands,
    states: Array,
    d_y: Array,
    d_final_state: Array,
    *,
    chunk_size: int,
    dt_softplus: bool,
    reverse: bool,
    precision: str,
) -> Operands:
    """The gradients of the operands, in their dtypes; None for runs."""
    layout = _Layout(operands, chunk_size, reverse)
    A, D = layout.per_head(operands.A), layout.per_head(operands.D)
    product = functools.partial(jnp.einsum, precision=precision)

    def body(carry: tuple[Array, Array, Array | None], inputs: tuple[_Chunk, Array]) -> Any:
        d_last, d_A, d_D = carry
        chunk, state = layout.widened(inputs[0]), inputs[1]
        decays = _decays(chunk, A)
        states, _ = _states(state, chunk, decays, product)
        d_z = None
        if chunk.z is not None:
            y = _outputs(chunk, states, decays, D, product)
            d_y, d_z = jax.vjp(_gated, y, chunk.z)[1](chunk.d_y)
            chunk = chunk._replace(d_y=d_y)
        d_states, d_first = _d_states(d_last, chunk, decays, product)
        d_x, d_dt, d_log, d_B, d_C = _gradients(chunk, states, d_states, decays, A, product)
        d_A += jnp.sum(chunk.dt * d_log, (0, 1, 2))
        if D is not None:
            d_x += D[:, :, None] * chunk.d_y
            d_D += jnp.sum(chunk.x * chunk.d_y, (0, 1, 2, 5))
        dtype = operands.x.dtype
        rounded = (a if a is None else a.astype(dtype) for a in (d_x, d_B, d_C, d_z))
        return (d_first, d_A, d_D), (d_dt, *rounded)

    steps = functools.partial(_steps, exact=A.dtype, dt_softplus=dt_softplus)
    dt, steps_vjp = jax.vjp(steps, operands.dt, operands.dt_bias)
    over = layout.chunks(operands, dt, d_y), jnp.moveaxis(layout.state(states), 1, 0)
    start = layout.state(d_final_state), jnp.zeros_like(A), None if D is None else jnp.zeros_like(D)
    (d_first, d_A, d_D), outputs = lax.scan(body, start, over, reverse=True)
    names = "dt", "x", "B", "C", "z"
    gradients = {
        name: layout.join(a, getattr(operands, name).shape)
        for name, a in zip(names, outputs)
        if a is not None
    }
    gradients["dt"], d_dt_bias = steps_vjp(gradients["dt"])
    if D is not None:
        gradients["D"] = d_D.reshape(-1)
    if operands.initial_state is not None:
        gradients["initial_state"] = d_first.reshape(operands.initial_state.shape)
    return Operands(A=d_A.reshape(-1), dt_bias=d_dt_bias, **gradients)


class _Layout:
    """How arrays are cut into chunks of parts, and put together again."""

    def __init__(self, operands: Operands, chunk_size: int, reverse: bool) -> None:
        self.batch, self.length, heads, P = operands.x.shape
        groups, R = operands.B.shape[2:]
        self.heads = groups, heads // groups
        self.state_shape = heads, P, R
        self.chunk, self.part = chunk_size, min(chunk_size, _PART)
        self.reverse = reverse
        self.exact, self.parameter = operands.A.dtype, operands.A

    def per_head(self, parameter: Array | None) -> Array | None:
        """(H,) -> (g, h)."""
        return parameter if parameter is None else parameter.reshape(self.heads)

    def state(self, state: Array | None) -> Array:
        """(..., H, P, R) -> (..., g, h, p, r); None is zeros (b, g, h, p, r)."""
        if state is None:
            shape = self.batch, *self.heads, *self.state_shape[1:]
            return jnp.zeros_like(self.parameter, shape=shape)  # varies as that in shard_map
        return state.reshape(*state.shape[:-3], *self.heads, *self.state_shape[1:])

    def chunks(self, operands: Operands, dt: Array, d_y: Array | None = None) -> _Chunk:
        """All chunks, along a leading axis."""
        x, dt, z, d_y = (
            a if a is None else self._cut(a.reshape(*a.shape[:2], *self.heads, *a.shape[3:]))
            for a in (operands.x, dt, operands.z, d_y)
        )
        runs = previous = None
        if operands.runs is not None:
            runs = self._cut(operands.runs, mode="edge")
            last = jnp.moveaxis(runs[..., -1], 0, 1)  # (b, chunks, k)
            previous = jnp.pad(last.reshape(self.batch, -1)[:, :-1], ((0, 0), (1, 0)))
            previous = jnp.moveaxis(previous.reshape(last.shape), 1, 0)
        return _Chunk(x, dt, self._cut(operands.B), self._cut(operands.C), z, d_y, runs, previous)

    def widened(self, chunk: _Chunk) -> _Chunk:
        """The chunk with all but its runs in the dtype of the arithmetic."""
        wide = (a if a is None else a.astype(self.exact) for a in chunk[:6])
        return _Chunk(*wide, *chunk[6:])

    def join(self, chunks: Array, shape: tuple[int, ...]) -> Array:
        """(chunks, b, k, i, ...) -> the shape (B, L, ...), without the padding."""
        tokens = jnp.moveaxis(chunks, 0, 1).reshape(self.batch, -1, *chunks.shape[4:])
        tokens = tokens[:, : self.length].reshape(shape)
        return jnp.flip(tokens, 1) if self.reverse else tokens

    def _cut(self, tokens: Array, mode: str = "constant") -> Array:
        """(B, L, ...) -> (chunks, b, k, i, ...), padded."""
        tokens = jnp.flip(tokens, 1) if self.reverse else tokens
        padding = (0, -self.length % self.chunk)
        tokens = jnp.pad(tokens, ((0, 0), padding, *((0, 0),) * (tokens.ndim - 2)), mode=mode)
        cut = -1, self.chunk // self.part, self.part
        return jnp.moveaxis(tokens.reshape(self.batch, *cut, *tokens.shape[2:]), 1, 0)


def _steps(dt: Array, dt_bias: Array | None, exact: Any, dt_softplus: bool) -> Array:
    """The steps of the formula, in the dtype of the arithmetic."""
    dt = dt.astype(exact)
    dt = dt if dt_bias is None else dt + dt_bias
    return jax.nn.softplus(dt) if dt_softplus else dt


def _gated(y: Array, z: Array | None) -> Array:
    return y if z is None else y * jax.nn.silu(z)


def _sums(a: Array, mask: Array) -> Array:
    """Sums over the tokens of a part (b, k, i, g, h), those j that mask[i, j] names for each i.

    A product: XLA's cumulative sums are slower on every platform.
    """
    return jnp.einsum("bkjgh,ij->bkigh", a, mask.astype(a.dtype), precision="highest")


def _decays(chunk: _Chunk, A: Array) -> _Decays:
    """Every decay of a chunk's parts.

    Sums of logarithms have two addends: a multiple of the unit, whose sums and differences are
    exact, and the rest, too small for the roundings of its sums to matter. So a large step takes no
    digits away from the small ones beside it.
    """
    limit, unit = _LIMIT_AND_UNIT[str(A.dtype)]
    n = chunk.dt.shape[2]
    earlier = jnp.tril(jnp.ones((n, n), bool))
    logs = jnp.maximum(chunk.dt * A, -limit)
    coarse = jnp.round(logs / unit) * unit
    sums = jnp.stack([_sums(coarse, earlier), _sums(logs - coarse, earlier)])  # (2, b, k, i, g, h)
    by_head = jnp.moveaxis(sums, 3, -1)
    passes, reached, kept, carried = earlier, None, None, None
    if chunk.runs is not None:
        last, previous = chunk.runs[:, :, -1:], chunk.previous_run[:, :, None]
        passes = earlier & (chunk.runs[..., :, None] == chunk.runs[..., None, :])
        passes = passes[:, :, None, None]
        reached = (chunk.runs == previous)[..., None, None]
        kept = (chunk.runs == last)[..., None, None]
        carried = last[..., None] == previous[..., None]

    def remaining(log: Array, mask: Array | None) -> Array:
        log = log[0] + log[1]
        return jnp.exp(log if mask is None else jnp.where(mask, log, -jnp.inf))

    return _Decays(
        remaining(by_head[..., :, None] - by_head[..., None, :], passes),
        remaining(sums, reached),
        remaining(sums[:, :, :, -1:] - sums, kept),
        remaining(sums[:, :, :, -1], carried),
    )


def _states(state: Array, chunk: _Chunk, decays: _Decays, product: _Product) -> tuple[Array, Array]:
    """The states before the parts (b, k, g, h, p, r), and the one behind the last."""
    entering = chunk.x * (chunk.dt * decays.to_end)[..., None]
    ends = product("bkighp,bkigr->bkghpr", entering, chunk.B)
    states = []
    for k in range(ends.shape[1]):
        states.append(state)
        state = decays.total[:, k, :, :, None, None] * state + ends[:, k]
    return jnp.stack(states, 1), state


def _d_states(
    d_state: Array, chunk: _Chunk, decays: _Decays, product: _Product
) -> tuple[Array, Array]:
    """The gradients of the states behind the parts, and of the one before the first."""
    leaving = chunk.d_y * decays.from_start[..., None]
    d_starts = product("bkighp,bkigr->bkghpr", leaving, chunk.C)
    d_states = []
    for k in reversed(range(d_starts.shape[1])):
        d_states.append(d_state)
        d_state = decays.total[:, k, :, :, None, None] * d_state + d_starts[:, k]
    return jnp.stack(d_states[::-1], 1), d_state


def _outputs(
    chunk: _Chunk, states: Array, decays: _Decays, D: Array | None, product: _Product
) -> Array:
    """y before the gate, (b, k, i, g, h, p)."""
    scores = product("bkigr,bkjgr->bkgij", chunk.C, chunk.B)[:, :, :, None] * decays.between
    y = product("bkghij,bkjghp->bkighp", scores, chunk.x * chunk.dt[..., None])
    from_state = product("bkigr,bkghpr->bkighp", chunk.C, states)
    y += from_state * decays.from_start[..., None]
    return y if D is None else y + D[:, :, None] * chunk.x


def _gradients(
    chunk: _Chunk,
    states: Array,
    d_states: Array,
    decays: _Decays,
    A: Array,
    product: _Product,
) -> tuple[Array, Array, Array, Array, Array]:
    """The gradients of x (D left out), the steps, their logarithms of decays, B and C.

    That of a logarithm at t sums up what crosses from before t to t and behind it: pairs of tokens,
    tokens and the states at both ends, and the two states. Each is an addend once; a difference of
    sums, of what begins and what ends at t, would lose small crossings in large neighbours.
    """
    x, dt, B, C, d_y = chunk.x, chunk.dt, chunk.B, chunk.C, chunk.d_y
    dt_j = jnp.moveaxis(dt, 2, -1)[..., None, :]
    scores = product("bkigr,bkjgr->bkgij", C, B)[:, :, :, None]
    values = product("bkighp,bkjghp->bkghij", d_y, x) * decays.between * dt_j
    pairs = jnp.sum(values, axis=3)
    d_C = product("bkighp,bkghpr->bkighr", d_y * decays.from_start[..., None], states)
    from_state = jnp.einsum("bkighr,bkigr->bkigh", d_C, C)
    d_C = jnp.sum(d_C, axis=4) + product("bkgij,bkjgr->bkigr", pairs, B)
    d_B = product("bkighp,bkghpr->bkigr", x * (dt * decays.to_end)[..., None], d_states)
    d_B += product("bkgij,bkigr->bkjgr", pairs, C)
    d_steps = product("bkigr,bkghpr->bkighp", B, d_states) * decays.to_end[..., None]
    to_state = jnp.sum(d_steps * x, axis=-1) * dt
    d_steps += product("bkghij,bkighp->bkjghp", scores * decays.between, d_y)

    n = dt.shape[2]
    before = jnp.tril(jnp.ones((n, n), bool), -1)  # [t, j]: j < t
    crossing = jnp.einsum(
        "bkghij,tj->bkghit", values * scores, before.astype(x.dtype), precision="highest"
    )
    crossing = jnp.sum(jnp.where(before.T, jnp.zeros((), x.dtype), crossing), axis=-2)  # t <= i
    d_logs = jnp.moveaxis(crossing, -1, 2) + _sums(from_state, ~before) + _sums(to_state, before)
    d_logs += (decays.total * jnp.sum(states * d_states, (-1, -2)))[:, :, None]
    d_dt = jnp.sum(d_steps * x, axis=-1) + A * d_logs
    return d_steps * dt[..., None], d_dt, d_logs, d_B, d_C
