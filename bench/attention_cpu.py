"""The plain-JAX attention of tjk against JAX's own, in one run on the CPU.

`python -m bench.attention_cpu` prints the median time of both, forward and gradient, from calls
that take turns, and the peak memory at a long sequence, where JAX's own would need T x S logits.
"""

import argparse
import functools
import itertools
import resource
from collections.abc import Callable
from typing import Any

import jax
import tabulate

from bench.interleaved import gradient, in_turns
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
    compiled = gradient(ATTENTION["tjk"], range(3)).lower(*inputs).compile()
    jax.block_until_ready(compiled(*inputs))
    temporary = compiled.memory_analysis().temp_size_in_bytes / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10  # KiB on Linux
    print(f"gradient at T={T}, float32: {temporary:.0f} MiB of temporaries, peak {peak:.0f} MiB")


def compare(dtype: str, causal: bool, T: int, samples: int) -> list[list[Any]]:
    """Rows of median milliseconds and their ratio, forward and gradient."""
    functions = [functools.partial(f, is_causal=causal) for f in ATTENTION.values()]
    return [
        [dtype, causal, T, direction, *milliseconds, milliseconds[0] / milliseconds[1]]
        for direction, milliseconds in in_turns(functions, operands(T, dtype), range(3), samples)
    ]


def operands(T: int, dtype: str) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(0), 3)
    return tuple(jax.random.normal(key, (B, T, N, H), dtype) for key in keys)


if __name__ == "__main__":
    main()
