"""The convolution three ways: as asked for, in float64, and in plain JAX."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.numerics import assert_within_budget
from tjk.ops.convolution import causal_conv1d, reference

NAMES = ("y", "final_state", "d_x", "d_weight", "d_bias", "d_initial_state")


@dataclasses.dataclass(frozen=True)
class Problem:
    """Sizes and flags of one call, with the final state and its cotangent."""

    B: int = 2
    L: int = 40
    D: int = 5
    W: int = 4
    bias: bool = True
    activation: str | None = "silu"
    state: bool = True
    segments: bool = False
    reverse: bool = False


@functools.cache
def inputs(p: Problem) -> dict[str, np.ndarray | None]:
    """The arguments in float64, numbers that bfloat16 has."""
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return np.float64(jnp.asarray(rng.standard_normal(shape), jnp.bfloat16))

    return {
        "x": draw(p.B, p.L, p.D),
        "weight": draw(p.D, p.W),
        "bias": draw(p.D) if p.bias else None,
        "initial_state": draw(p.B, p.W - 1, p.D) if p.state else None,
    }


def segment_ids(p: Problem) -> np.ndarray | None:
    """Segments of one to five positions; ids come back."""
    if not p.segments:
        return None
    lengths = np.random.default_rng(1).integers(1, 6, (p.B, p.L))
    return np.stack([np.repeat(np.arange(p.L) % 3, n)[: p.L] for n in lengths]).astype(np.int32)


def cast(p: Problem, dtype: str, weights: str | None = None) -> dict[str, Any]:
    """The arguments: x in a dtype, weight and bias in their own, the state in float32."""
    exact = "float64" if dtype == "float64" else "float32"
    dtypes = {"x": dtype, "weight": weights or dtype, "bias": weights or dtype}
    return {
        name: None if a is None else jnp.asarray(a, dtypes.get(name, exact))
        for name, a in inputs(p).items()
    }


@functools.partial(jax.jit, static_argnums=(0, 1))
def _results(implementation: str | None, p: Problem, arguments: dict[str, Any], ids: Any) -> Any:
    """(y, final state) and the gradients of the arguments, from a cotangent of both."""

    def call(arguments: dict[str, Any]) -> Any:
        arguments = dict(arguments)
        operands = [arguments.pop(name) for name in ("x", "weight", "bias")]
        flags = {"activation": p.activation, "reverse": p.reverse, "segment_ids": ids} | arguments
        if implementation is None:
            return reference.causal_conv1d(*operands, **flags)
        options = {"return_final_state": True, "implementation": implementation}
        return causal_conv1d(*operands, **flags, **options)

    outputs, vjp = jax.vjp(call, arguments)
    # Numbers that bfloat16 has: XLA may leave out a rounding, a kernel does not.
    (gradients,) = vjp(
        tuple((jnp.arange(a.size).reshape(a.shape) % 7 - 3).astype(a.dtype) / 4 for a in outputs)
    )
    names = ("x", "weight", "bias", "initial_state")
    return (*outputs, *(gradients[name] for name in names))


def results(implementation: str | None, p: Problem, dtype: str, weights: str | None = None) -> Any:
    """What NAMES names, None for what is left out; of the reference without implementation."""
    with jax.enable_x64(dtype == "float64"):
        ids = segment_ids(p)
        values = _results(implementation, p, cast(p, dtype, weights), ids)
        return [None if a is None else np.asarray(a) for a in values]


def check(p: Problem, dtype: str, implementation: str, weights: str | None = None) -> None:
    """Fails unless outputs and gradients are within the budget."""
    actual = results(implementation, p, dtype, weights)
    exact = results(None, p, "float64")
    plain = results(None, p, dtype, weights)
    for name, *values in zip(NAMES, actual, exact, plain, strict=True):
        if values[1] is None:
            assert values[0] is None, name
        elif values[1].size:
            # Sums over positions: each way of computing adds them up in an order of its own.
            inherent = 1e-6 * np.abs(values[1]).max() if name in ("d_weight", "d_bias") else 0.0
            assert_within_budget(name, *values, inherent=inherent)
