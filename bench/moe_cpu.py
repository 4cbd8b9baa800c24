"""The plain-JAX expert layer of tjk against the baselines, in one run on the CPU.

`python -m bench.moe_cpu` prints the median time of `tjk.ops.moe_mlp`, of `blocked` and of
`ragged_dot`, forward and gradient (of x, the three expert weights and the routing weights), from
calls that take turns. The sizes are those of the moe suite.
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any

import jax
import tabulate

from bench.case import DTYPES
from bench.interleaved import in_turns
from bench.moe_baselines import blocked, ragged_dot
from tjk.nn import moe
from tjk.ops import moe_mlp, route_top_k

LAYERS: dict[str, Callable[..., Any]] = {
    "tjk": functools.partial(moe_mlp, implementation="xla"),
    "blocked": blocked,
    "ragged_dot": ragged_dot,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--samples", type=int, default=5)
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    rows = [
        row
        for dtype in DTYPES
        for row in compare(moe.Config(), arguments.tokens, dtype, arguments.samples)
    ]
    ratios = [f"tjk / {name}" for name in list(LAYERS)[1:]]
    headers = ["dtype", "", *(f"{name} ms" for name in LAYERS), *ratios]
    print(tabulate.tabulate(rows, headers, floatfmt=".2f"))


def compare(config: moe.Config, tokens: int, dtype: str, samples: int) -> list[list[Any]]:
    """Rows of median milliseconds, and of ours in relation to the others', by direction."""
    inputs = operands(config, tokens, dtype)
    return [
        [dtype, direction, ours, *others, *(ours / other for other in others)]
        for direction, (ours, *others) in in_turns(list(LAYERS.values()), inputs, range(5), samples)
    ]


def operands(config: moe.Config, tokens: int, dtype: str) -> tuple[jax.Array, ...]:
    """x, the three expert weights, and the routing of a random router."""
    key_params, key_x = jax.random.split(jax.random.key(0))
    params = moe.init(key_params, config)
    x = jax.random.normal(key_x, (tokens, config.d_model), dtype)
    matrices = (params[name]["weight"].astype(dtype) for name in ("gate", "up", "down"))
    return x, *matrices, *route_top_k(moe.router_logits(params, x), config.top_k)


if __name__ == "__main__":
    main()
