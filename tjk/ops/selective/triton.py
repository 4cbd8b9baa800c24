"""The selective scan in Triton: launches, and how much each program takes."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from kernels_triton import selective as kernels
from tjk import executors
from tjk.launch import Launch
from tjk.ops.selective.operands import SPACING, Operands

_THREADS = 128
_BLOCK_STATES = 1024
# Of `selective_gradients`: consecutive steps of one lane, lanes along time.
_INNER, _OUTER = 8, SPACING // 8


def forward(
    operands: Operands, runs: Array | None, *, softplus: bool, reverse: bool, keep: bool
) -> tuple[Array, Array, Array | None]:
    """y (B, L, D), the final state (B, D, R), and the states before each chunk, if to be kept.

    The states are (B, cdiv(L, SPACING), D, R), chunks in the order of the scan.
    """
    walk = _Walk(operands, runs, softplus, reverse, adjoint=False)
    y, states, final = walk.run(operands.x, operands.B, operands.state, keep=keep)
    return y, final, states if keep else None


def backward(
    operands: Operands,
    runs: Array | None,
    states: Array,
    d_y: Array,
    d_final: Array,
    *,
    softplus: bool,
    reverse: bool,
) -> Operands:
    """The gradients of all operands, in their dtypes."""
    walk = _Walk(operands, runs, softplus, reverse, adjoint=True)
    _, adjoints, d_start = walk.run(d_y, operands.C, d_final, keep=True)
    launch = gradients_launch(operands, runs, states, adjoints, d_y, softplus, reverse)
    d_x, d_delta, d_A, d_rows, d_D, d_z, d_bias = executors.run(launch)
    d_B, d_C = jnp.moveaxis(jnp.sum(d_rows, 1), (1, 2), (0, 3)).astype(operands.B.dtype)
    return Operands(
        x=d_x,
        delta=d_delta,
        A=jnp.sum(d_A, (0, 1)),
        B=d_B,
        C=d_C,
        D=None if operands.D is None else jnp.sum(d_D, (0, 1)),
        z=None if operands.z is None else d_z,
        delta_bias=None if operands.delta_bias is None else jnp.sum(d_bias, (0, 1)),
        state=None if operands.state is None else d_start,
    )


class _Walk(NamedTuple):
    """The recurrence in one direction: h with y, or the adjoint states."""

    operands: Operands
    runs: Array | None
    softplus: bool
    reverse: bool
    adjoint: bool

    def run(
        self, x: Array, B: Array, start: Array | None, *, keep: bool
    ) -> tuple[Array, Array, Array]:
        """y, the states before each chunk, the state at the end: see `selective_states`."""
        batch, L, D = x.shape
        blocks = batch * -(-D // tile(self.operands.A.shape[1], x.dtype).block_d)
        parts, part_chunks = cut(blocks, -(-L // SPACING), executors.multiprocessors())
        if parts > 1:
            launch = self.states_launch(x, B, None, parts, part_chunks, ends=True)
            _, _, ends, totals = executors.run(launch)
            launch = self.starts_launch(ends, totals, start, part_chunks)
            (start,) = executors.run(launch)
        launch = self.states_launch(x, B, start, parts, part_chunks, keep=keep)
        return executors.run(launch)[:3]

    def states_launch(
        self,
        x: Array,
        B: Array,
        start: Array | None,
        parts: int,
        part_chunks: int,
        *,
        keep: bool = False,
        ends: bool = False,
    ) -> Launch:
        """The launch that walks through all parts, each from its own start (B, parts, D, R)."""
        (batch, L, D), R = x.shape, self.operands.A.shape[1]
        block_d, steps, high, low = tile(R, x.dtype)
        output = not (self.adjoint or ends)
        states = (batch, -(-L // SPACING), D, R)
        end = (batch, parts, D, R) if ends else (batch, D, R)
        return _launch(
            kernels.selective_states,
            {
                "x": x,
                "delta": self.operands.delta,
                "A": self.operands.A[None],
                "B": B,
                "C": self.operands.C if output else None,
                "D": _row(self.operands.D) if output else None,
                "z": self.operands.z if output or self.adjoint else None,
                "bias": _row(self.operands.delta_bias),
                "runs": self.runs,
                "start": start,
            },
            (batch, L, parts, part_chunks * (SPACING // steps)),
            (
                jax.ShapeDtypeStruct(x.shape if output else (0,), x.dtype),
                jax.ShapeDtypeStruct(states if keep else (0,), jnp.float32),
                jax.ShapeDtypeStruct(end, jnp.float32),
                jax.ShapeDtypeStruct((batch, parts, D) if ends else (0,), jnp.float32),
            ),
            batch * parts * -(-D // block_d),
            {
                **{"D": D, "R": R, "ADJOINT": self.adjoint, "REVERSE": self.reverse},
                **{"SOFTPLUS": self.softplus, "OUTPUT": output, "KEEP": keep, "ENDS": ends},
                **{"SPACING": SPACING, "BLOCK_D": block_d, "STEPS": steps},
                **{"HIGH": high, "LOW": low, "EVEN": L % steps == 0},
            },
            absent=("D", "z", "bias", "runs", "start"),
        )

    def starts_launch(
        self, ends: Array, totals: Array, start: Array | None, part_chunks: int
    ) -> Launch:
        """The launch that makes the starts (B, parts, D, R) of the parts."""
        batch, parts, D, R = ends.shape
        return _launch(
            kernels.selective_starts,
            {
                **{"end": ends, "A": self.operands.A[None], "total": totals},
                **{"runs": self.runs, "start": start},
            },
            (batch, self.operands.x.shape[1], parts, part_chunks * SPACING),
            (jax.ShapeDtypeStruct(ends.shape, jnp.float32),),
            batch * -(-D * R // _BLOCK_STATES),
            {
                **{"D": D, "R": R, "ADJOINT": self.adjoint, "REVERSE": self.reverse},
                "BLOCK": _BLOCK_STATES,
            },
            absent=("runs", "start"),
        )


def gradients_launch(
    operands: Operands,
    runs: Array | None,
    states: Array,
    adjoints: Array,
    d_y: Array,
    softplus: bool,
    reverse: bool,
) -> Launch:
    """The launch that makes the gradients, those of weights and of B and C as partial sums."""
    (batch, L, D), R, chunks = d_y.shape, operands.A.shape[1], states.shape[1]
    side = _THREADS // _OUTER
    block_d = side if operands.z is not None else 2 * side  # as registers allow
    groups = split(batch * chunks, -(-D // block_d), executors.multiprocessors())
    by_chunk = (batch, chunks, D)
    return _launch(
        kernels.selective_gradients,
        {
            **{"x": operands.x, "delta": operands.delta, "A": operands.A[None]},
            **{"B": operands.B, "C": operands.C, "D": _row(operands.D), "z": operands.z},
            **{"bias": _row(operands.delta_bias), "runs": runs},
            **{"states": states, "adjoints": adjoints, "d_y": d_y},
        },
        (batch, L, L, chunks, groups),
        (
            jax.ShapeDtypeStruct(operands.x.shape, operands.x.dtype),
            jax.ShapeDtypeStruct(operands.delta.shape, operands.delta.dtype),
            jax.ShapeDtypeStruct((*by_chunk, R), jnp.float32),
            jax.ShapeDtypeStruct((batch, groups, 2, R, L), jnp.float32),
            jax.ShapeDtypeStruct((0,) if operands.D is None else by_chunk, jnp.float32),
            jax.ShapeDtypeStruct((0,) if operands.z is None else d_y.shape, d_y.dtype),
            jax.ShapeDtypeStruct((0,) if operands.delta_bias is None else by_chunk, jnp.float32),
        ),
        batch * chunks * groups,
        {
            **{"D": D, "R": R, "REVERSE": reverse, "SOFTPLUS": softplus},
            **{"BLOCK_D": block_d, "SIDE": side, "INNER": _INNER, "OUTER": _OUTER},
            "EVEN": L % SPACING == 0,
        },
        absent=("D", "z", "bias", "runs"),
    )


class Tile(NamedTuple):
    """What a program of `selective_states` holds; `steps` threads share a channel's states."""

    block_d: int
    steps: int
    high: int
    low: int


def tile(R: int, dtype: Any) -> Tile:
    """Eight states a thread, or fewer where R is small: four threads a channel at least.

    The `low` states of one load are next to each other in memory: 16 bytes for each thread.
    """
    padded = max(4, 1 << (R - 1).bit_length())
    steps = max(4, padded // 8)
    low = min(padded, 16 // jnp.dtype(dtype).itemsize * steps)
    return Tile(_THREADS // steps, steps, padded // low, low)


def cut(blocks: int, chunks: int, multiprocessors: int) -> tuple[int, int]:
    """Number of parts of time, and chunks of each.

    Parts cost a pass of their own, about as much as the walk itself. So there are none where every
    other multiprocessor has a program already, and else so many that each has three.
    """
    if 2 * blocks >= multiprocessors:
        return 1, chunks
    part_chunks = max(1, blocks * chunks // (3 * multiprocessors))
    return -(-chunks // part_chunks), part_chunks


def split(programs: int, blocks: int, multiprocessors: int) -> int:
    """Into how many groups the blocks of channels go: as many as run at once, two programs on each
    multiprocessor. More would leave most of the card idle at the end, and add partial sums."""
    return min(blocks, max(1, 2 * multiprocessors // max(1, programs)))


def _row(x: Array | None) -> Array | None:
    return None if x is None else x[None]


def _launch(
    kernel: Any,
    inputs: dict[str, Array | None],
    scalars: tuple[int, ...],
    outputs: tuple[jax.ShapeDtypeStruct, ...],
    programs: int,
    constexprs: dict[str, Any],
    absent: Iterable[str],
) -> Launch:
    """A launch batch by batch; HAS_<NAME> says whether what may be absent is there.

    Weights have a leading axis of 1 in place of the batch, so that vmap can fold into both.
    """
    present = [x for x in inputs.values() if x is not None]
    return Launch(
        kernel=kernel,
        inputs=tuple(present[0] if x is None else x for x in inputs.values()),
        scalars=scalars,
        outputs=outputs,
        grid=(programs,),
        constexprs={f"HAS_{name.upper()}": inputs[name] is not None for name in absent}
        | constexprs,
        # AMD's have 64 threads.
        num_warps=_THREADS // (64 if isinstance(executors.architecture(), str) else 32),
        num_stages=1,
        batched=True,
        bytes=sum(x.size * x.dtype.itemsize for x in (*present, *outputs)),
        arch=executors.architecture(),
    )
