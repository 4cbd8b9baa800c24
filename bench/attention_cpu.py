"""The plain-JAX attention of tjk against JAX's own, in one run on the CPU.

`python -m bench.attention_cpu` prints the median time of both, forward and gradient, from calls
that take turns, and the peak memory at a long sequence, where JAX's own would need T x S logits.
"""

import argparse
import functools
import itertools
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import tabulate

from tjk.ops import flash_attention

B, N, H = 2, 4, 64
ATTENTION: dict[str, Callable[..., Any]] = {
    "tjk": functools.partial(flash_attention, implementation="xla"),
    "jax": functools.partial(jax.nn.dot_product_attention, implementation="xla"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="*", default=[256, 1024])
    parser.add_argument("--memory-length", type=int, default=8192)
    parser.add_argument("--samples", type=int, default=15)
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    # Before the rest: the peak of a process never falls.
    report_memory(arguments.memory_length)
    cases = itertools.product(("float32", "bfloat16"), (False, True), arguments.lengths)
    rows = [row for case in cases for row in compare(*case, arguments.samples)]
    headers = ["dtype", "causal", "T", "", "tjk ms", "jax ms", "tjk / jax"]
    print(tabulate.tabulate(rows, headers, floatfmt=("", "", "", "", ".2f", ".2f", ".2f")))


def report_memory(T: int) -> None:
    """Prints what one gradient takes: XLA's temporaries, and the peak of the whole process."""
    inputs = operands(T, "float32")
    compiled = gradient(ATTENTION["tjk"]).lower(*inputs).compile()
    jax.block_until_ready(compiled(*inputs))
    temporary = compiled.memory_analysis().temp_size_in_bytes / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10  # KiB on Linux
    print(f"gradient at T={T}, float32: {temporary:.0f} MiB of temporaries, peak {peak:.0f} MiB")


def compare(dtype: str, causal: bool, T: int, samples: int) -> list[list[Any]]:
    """Rows of median milliseconds and their ratio, forward and gradient."""
    inputs = operands(T, dtype)
    rows = []
    for name, direction in (("forward", jax.jit), ("gradient", gradient)):
        functions = [direction(functools.partial(f, is_causal=causal)) for f in ATTENTION.values()]
        tjk, jax_ = interleaved_medians(functions, inputs, samples)
        rows.append([dtype, causal, T, name, 1e3 * tjk, 1e3 * jax_, tjk / jax_])
    return rows


def operands(T: int, dtype: str) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(0), 3)
    return tuple(jax.random.normal(key, (B, T, N, H), dtype) for key in keys)


def gradient(attention: Callable[..., jax.Array]) -> Any:
    """The jitted gradient of the output's sum of squares in query, key and value."""

    def loss(*inputs: jax.Array) -> jax.Array:
        return jnp.sum(attention(*inputs).astype(jnp.float32) ** 2)

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))


def interleaved_medians(
    functions: list[Callable[..., Any]], inputs: tuple[jax.Array, ...], samples: int
) -> list[float]:
    """Median seconds of each function, called in turns after one call that compiles."""
    times: list[list[float]] = [[] for _ in functions]
    for sample in range(samples + 1):
        for function, seconds in zip(functions, times, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(function(*inputs))
            if sample:
                seconds.append(time.perf_counter() - start)
    return [statistics.median(seconds) for seconds in times]


if __name__ == "__main__":
    main()
