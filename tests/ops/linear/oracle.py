"""The recurrence three ways: as asked for, in float64, and in plain JAX."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.numerics import assert_within_budget
from tjk.ops.linear import linear_scan, reference

NAMES = ("y", "final_state", "d_a", "d_x", "d_initial_state")
WIDE = {"complex64": "complex128"}


@dataclasses.dataclass(frozen=True)
class Problem:
    """Sizes and flags of one call, with the final state and its cotangent."""

    B: int = 2
    L: int = 40
    D: int = 5
    complex: bool = False
    varying: bool = True
    state: bool = True
    segments: bool = False
    reverse: bool = False


@functools.cache
def inputs(p: Problem) -> dict[str, np.ndarray | None]:
    """The arguments in float64 or complex128, numbers that bfloat16 has; |a| near 0 and near 1."""
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        numbers = np.float64(jnp.asarray(rng.standard_normal(shape), jnp.bfloat16))
        return numbers + 1j * np.roll(numbers, 1, -1) if p.complex else numbers

    a = draw(p.B, p.L, p.D) if p.varying else draw(p.D)
    a = a / (1 + np.abs(a)) * np.where(np.arange(p.D) % 2, 1.0, 1.5)
    size = np.minimum(1, 1 / np.maximum(np.abs(a), 1e-9))
    rounded = np.float64(jnp.asarray((a * size).real, jnp.bfloat16))
    a = rounded + 1j * np.float64(jnp.asarray((a * size).imag, jnp.bfloat16)) * 0.9
    return {
        "a": a if p.complex else rounded,
        "x": draw(p.B, p.L, p.D),
        "initial_state": draw(p.B, p.D) if p.state else None,
    }


def segment_ids(p: Problem) -> np.ndarray | None:
    """Segments of one to nine positions; ids come back."""
    if not p.segments:
        return None
    lengths = np.random.default_rng(1).integers(1, 10, (p.B, p.L))
    return np.stack([np.repeat(np.arange(p.L) % 3, n)[: p.L] for n in lengths]).astype(np.int32)


def cast(p: Problem, dtype: str, decays: str | None = None) -> dict[str, Any]:
    """The arguments: x in a dtype, a in its own, the state in that of states."""
    exact = "float32" if dtype in ("bfloat16", "float16") else dtype
    dtypes = {"x": dtype, "a": decays or dtype, "initial_state": exact}
    return {n: None if a is None else jnp.asarray(a, dtypes[n]) for n, a in inputs(p).items()}


@functools.partial(jax.jit, static_argnums=(0, 1))
def _results(implementation: str | None, p: Problem, arguments: dict[str, Any], ids: Any) -> Any:
    """(y, final state) and the gradients of the arguments, from a cotangent of both."""

    def call(arguments: dict[str, Any]) -> Any:
        flags = {"reverse": p.reverse, "segment_ids": ids}
        if implementation is None:
            return reference.linear_scan(**arguments, **flags)
        options = {"return_final_state": True, "implementation": implementation}
        return linear_scan(**arguments, **flags, **options)

    outputs, vjp = jax.vjp(call, arguments)
    weights = [_cotangent(a) for a in outputs]
    (gradients,) = vjp(tuple(weights))
    return (*outputs, *(gradients[name] for name in ("a", "x", "initial_state")))


def _cotangent(a: jax.Array) -> jax.Array:
    """Numbers that bfloat16 has: XLA may leave out a rounding, a kernel does not."""
    i = jnp.arange(a.size).reshape(a.shape)
    real, imag = ((i % n - n // 2).astype(a.real.dtype) / 4 for n in (7, 5))
    return jax.lax.complex(real, imag) if jnp.iscomplexobj(a) else real


def results(implementation: str | None, p: Problem, dtype: str, decays: str | None = None) -> Any:
    """What NAMES names, None for what is left out; of the reference without implementation."""
    with jax.enable_x64(dtype in ("float64", "complex128")):
        values = _results(implementation, p, cast(p, dtype, decays), segment_ids(p))
        return [None if a is None else np.asarray(a) for a in values]


def check(p: Problem, dtype: str, implementation: str, decays: str | None = None) -> None:
    """Fails unless outputs and gradients are within the budget, real and imaginary parts."""
    actual = results(implementation, p, dtype, decays)
    exact = results(None, p, "complex128" if p.complex else "float64")
    plain = results(None, p, dtype, decays)
    for name, *values in zip(NAMES, actual, exact, plain, strict=True):
        if values[1] is None:
            assert values[0] is None, name
            continue
        # Sums over positions and products of decays: each way of computing orders them its own.
        inherent = 1e-6 * np.abs(values[1]).max(initial=0)
        for part in (np.real, np.imag) if p.complex else (np.asarray,):
            assert_within_budget(name, *map(part, values), inherent=inherent)
