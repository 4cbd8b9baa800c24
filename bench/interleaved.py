"""Implementations of one operation timed against each other, in calls that take turns.

Whatever else the machine does meanwhile then slows all of them alike.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp


def in_turns(
    functions: Sequence[Callable[..., jax.Array]],
    inputs: tuple[jax.Array, ...],
    argnums: Sequence[int],
    samples: int,
) -> Iterator[tuple[str, list[float]]]:
    """Yields "forward", then "gradient", each with the functions' median milliseconds."""
    yield "forward", median_milliseconds([jax.jit(f) for f in functions], inputs, samples)
    gradients = [gradient(f, argnums) for f in functions]
    yield "gradient", median_milliseconds(gradients, inputs, samples)


def gradient(function: Callable[..., jax.Array], argnums: Sequence[int]) -> jax.stages.Wrapped:
    """The jitted gradient of the output's sum of squares in those arguments."""

    def loss(*inputs: jax.Array) -> jax.Array:
        return jnp.sum(function(*inputs).astype(jnp.float32) ** 2)

    return jax.jit(jax.grad(loss, argnums=tuple(argnums)))


def median_milliseconds(
    functions: Sequence[Callable[..., Any]],
    inputs: tuple[jax.Array, ...],
    samples: int,
    calls: int = 1,
) -> list[float]:
    """The median of each function's samples of so many calls in a row, after one that compiles."""
    times: list[list[float]] = [[] for _ in functions]
    for sample in range(samples + 1):
        for function, milliseconds in zip(functions, times):
            start = time.perf_counter()
            for _ in range(calls):
                outputs = function(*inputs)
            jax.block_until_ready(outputs)
            if sample:
                milliseconds.append(1e3 * (time.perf_counter() - start) / calls)
    return [statistics.median(milliseconds) for milliseconds in times]
