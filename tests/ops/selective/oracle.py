"""The selective scan three ways: as asked for, in float64, and in plain JAX."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.numerics import assert_within_budget
from tjk.ops.selective import reference, selective_scan

Arrays = dict[str, Any]

FLAGS = ("skip", "gate", "bias", "softplus", "state", "segments", "reverse")

# In 16-bit problems these are float32, unless `narrow`.
_WIDE = ("A", "D", "delta_bias")


@dataclasses.dataclass(frozen=True)
class Problem:
    """Sizes, and which of the optional arguments there are."""

    B: int = 1
    L: int = 7
    D: int = 3
    R: int = 2
    skip: bool = False
    gate: bool = False
    bias: bool = False
    softplus: bool = False
    state: bool = False
    segments: bool = False
    reverse: bool = False

    @property
    def options(self) -> dict[str, bool]:
        """The keyword arguments that are no arrays."""
        return {"delta_softplus": self.softplus, "reverse": self.reverse}


def everything(**sizes: int) -> Problem:
    """A problem with all optional arguments."""
    return Problem(**dict.fromkeys(FLAGS, True), **sizes)


@functools.cache
def arrays(problem: Problem, seed: int = 0) -> Arrays:
    """The arguments, and the cotangents "d_y" and "d_state", in float64."""
    p = problem
    rng = np.random.default_rng(seed)
    draw = rng.standard_normal
    delta = draw((p.B, p.L, p.D))
    return {
        "x": draw((p.B, p.L, p.D)),
        "delta": delta - 1 if p.softplus else np.abs(delta) / 2,
        "A": -np.exp(draw((p.D, p.R))),
        "B": draw((p.B, p.L, p.R)),
        "C": draw((p.B, p.L, p.R)),
        "D": draw((p.D,)) if p.skip else None,
        "z": draw((p.B, p.L, p.D)) if p.gate else None,
        "delta_bias": np.abs(draw((p.D,))) if p.bias else None,
        "initial_state": draw((p.B, p.D, p.R)) if p.state else None,
        "d_y": draw((p.B, p.L, p.D)),
        "d_state": draw((p.B, p.D, p.R)),
    }


def segment_ids(problem: Problem, seed: int = 0) -> np.ndarray | None:
    """Segments of about six positions; an id may come back."""
    if not problem.segments:
        return None
    starts = np.random.default_rng(seed).random((problem.B, problem.L)) < 1 / 6
    return (np.cumsum(starts, axis=1) % 3).astype(np.int32)


def cast(problem: Problem, dtype: str, *, narrow: bool = False, seed: int = 0) -> Arrays:
    """The arrays in a dtype; states, and unless `narrow` the channels' parameters, in float32."""
    exact = "float64" if dtype == "float64" else "float32"
    kept = ("initial_state", "d_state") if narrow else ("initial_state", "d_state", *_WIDE)
    return {
        name: None if x is None else jnp.asarray(x, exact if name in kept else dtype)
        for name, x in arrays(problem, seed).items()
    }


@functools.cache
def compiled(implementation: str | None, **options: Any) -> Any:
    """y, the final state, and all gradients; of the reference if there is no implementation.

    One jitted function for all tests, so that equal shapes are compiled once.
    """
    if implementation is None:
        scan = functools.partial(reference.selective_scan, **options)
    else:
        options = options | {"implementation": implementation, "return_final_state": True}
        scan = functools.partial(selective_scan, **options)

    @jax.jit
    def run(arguments: Arrays, segment_ids: Any) -> Arrays:
        *cotangents, arguments = arguments["d_y"], arguments["d_state"], {**arguments}
        del arguments["d_y"], arguments["d_state"]
        (y, state), vjp = jax.vjp(lambda a: scan(**a, segment_ids=segment_ids), arguments)
        (gradients,) = vjp(tuple(cotangents))
        return {"y": y, "state": state} | {f"d {name}": d for name, d in gradients.items()}

    return run


def check(
    problem: Problem, dtype: str, implementation: str, *, narrow: bool = False, seed: int = 0
) -> None:
    """Fails unless y, the final state and all gradients are within the budget.

    A decay is made as exp2(delta (A log2(e))), which rounds the exponent v once more: an error of
    |v| exp(v) <= 1 / e times half an epsilon in each step, and less than one epsilon in the sum.
    """
    operands = cast(problem, dtype, narrow=narrow, seed=seed)
    ids = segment_ids(problem, seed)
    actual = compiled(implementation, **problem.options)(operands, ids)
    plain = compiled(None, **problem.options)(operands, ids)
    with jax.enable_x64(True):
        exact = {
            name: None if x is None else jnp.asarray(np.asarray(x), "float64")
            for name, x in operands.items()
        }
        exact = jax.tree.map(np.asarray, compiled(None, **problem.options)(exact, ids))
    assert actual.keys() == exact.keys()
    for name, value in actual.items():
        if value is not None:
            rounding = float(jnp.finfo(jnp.float32).eps) * np.abs(exact[name]).max()
            assert_within_budget(name, value, exact[name], plain[name], inherent=rounding)
