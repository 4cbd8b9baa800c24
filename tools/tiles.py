"""Times launches of the suites with other numbers of warps and stages, on the GPU that is here.

    python -m tools.tiles --out tiles.json

Each launch is run by itself on random operands. A candidate counts only if its outputs are those of
the launch as it is, up to the order of sums. Operations with integer tables are left out: random
ones would point anywhere. The file is written after each launch.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tabulate import tabulate
from tqdm import tqdm

from bench import machine
from bench.interleaved import median_milliseconds
from bench.measure import calls_per_sample
from bench.whole_file import FileError, check_writable, replacing
from tjk import executors
from tjk.launch import Launch, recording
from tjk.ops import flash_attention, group_norm, linear_scan, selective_scan, ssd_scan

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Target:
    """An operation at sizes that matter; `operands` are shapes, all in `dtype` but for `float32`.

    Attributes:
        name: operation and what it stands for.
        function: of the operands; its forward and backward launches are tried.
        operands: their shapes.
        float32: indices of operands that are float32 whatever the dtype is.
    """

    name: str
    function: Callable[..., Any]
    operands: tuple[Shape, ...]
    float32: tuple[int, ...] = ()


def targets(B: int, T: int) -> list[Target]:
    """What the suites run most, for B sequences of T tokens."""

    def attention(q: Any, k: Any, v: Any) -> Any:
        return flash_attention(q, k, v, implementation="triton")

    def causal(q: Any, k: Any, v: Any) -> Any:
        return flash_attention(q, k, v, is_causal=True, implementation="triton")

    def mamba(x: Any, delta: Any, A: Any, b: Any, c: Any) -> Any:
        return selective_scan(x, delta, A, b, c, delta_softplus=True, implementation="triton")

    def mamba2(x: Any, dt: Any, A: Any, b: Any, c: Any) -> Any:
        return ssd_scan(x, dt, A, b, c, dt_softplus=True, implementation="triton")

    def linear(a: Any, x: Any) -> Any:
        return linear_scan(jax.nn.sigmoid(a), x, implementation="triton")

    def normalized(x: Any, scale: Any, bias: Any) -> Any:
        return group_norm(x, scale, bias, groups=8, activation="silu", implementation="triton")

    heads, width = (B, T, 4, 64), (B, T, 128)
    return [
        Target("attention", attention, (heads,) * 3),
        Target("causal attention", causal, (heads,) * 3),
        Target("mamba", mamba, (width, width, (128, 16), (B, T, 16), (B, T, 16)), (2,)),
        Target("mamba2", mamba2, (heads, (B, T, 4), (4,), (B, T, 1, 64), (B, T, 1, 64)), (1, 2)),
        Target("linear", linear, (width, width)),
        Target("group_norm", normalized, ((B, T, 64), (64,), (64,)), (1, 2)),
    ]


def launches(target: Target, dtype: str) -> list[Launch]:
    """Those of forward and backward, each once."""
    operands = [
        jax.ShapeDtypeStruct(shape, jnp.float32 if i in target.float32 else jnp.dtype(dtype))
        for i, shape in enumerate(target.operands)
    ]

    def loss(*operands: jax.Array) -> jax.Array:
        y = jax.tree.leaves(target.function(*operands))[0]
        return jnp.sum(y.astype(jnp.float32))

    with recording() as records:
        jax.eval_shape(jax.grad(loss, tuple(range(len(operands)))), *operands)
    return list(dict.fromkeys(records))


def candidates(launch: Launch) -> Iterator[Launch]:
    """The launch itself, and its neighbours in warps and in stages."""
    yield launch
    for warps in (launch.num_warps // 2, 2 * launch.num_warps):
        if 1 <= warps <= 16:
            yield dataclasses.replace(launch, num_warps=warps)
    for stages in (launch.num_stages - 1, launch.num_stages + 1):
        if 1 <= stages <= 4:
            yield dataclasses.replace(launch, num_stages=stages)


def measure(launch: Launch, samples: int) -> list[dict[str, Any]]:
    """One row for each candidate: {"num_warps", "num_stages", and "ms" or "error"}."""
    inputs = operands(launch)
    rows, functions, expected = [], [], None
    for candidate in candidates(launch):
        row = {"num_warps": candidate.num_warps, "num_stages": candidate.num_stages}
        rows.append(row)
        function = jax.jit(_runner(candidate))
        try:
            outputs = jax.block_until_ready(function(*inputs))
        except Exception as error:  # as for want of shared memory
            row["error"] = f"{type(error).__name__}: {error}"[:300]
            continue
        expected = expected or outputs
        if not all(map(_agree, outputs, expected)):
            row["error"] = "its outputs differ from those of the launch as it is"
            continue
        functions.append((row, function))
    if not functions:
        return rows
    compiled = [function for _, function in functions]
    once = median_milliseconds(compiled[:1], inputs, 1)[0]
    # Many calls in a row: a launch may be shorter than it takes to ask for it.
    calls = calls_per_sample(1e-3 * once)
    times = median_milliseconds(compiled, inputs, samples, calls)
    for (row, _), milliseconds in zip(functions, times):
        row["ms"] = milliseconds
    return rows


def operands(launch: Launch) -> tuple[jax.Array, ...]:
    """Numbers below 0, as rates of decay must be; integers, which none of the targets reads, 0."""
    rng = np.random.default_rng(0)
    return tuple(
        jnp.asarray(-rng.uniform(0.01, 1.0, x.shape), x.dtype)
        if jnp.issubdtype(x.dtype, jnp.floating)
        else jnp.zeros(x.shape, x.dtype)
        for x in launch.inputs
    )


def _runner(launch: Launch) -> Callable[..., tuple[jax.Array, ...]]:
    return lambda *inputs: executors.run(dataclasses.replace(launch, inputs=inputs))


def _agree(x: jax.Array, y: jax.Array) -> bool:
    x, y = (np.asarray(a, np.float32) for a in (x, y))
    scale = np.max(np.abs(y), initial=0.0, where=np.isfinite(y))
    return np.allclose(x, y, rtol=2e-2, atol=2e-2 * scale, equal_nan=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.tiles", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--samples", type=int, default=9)
    parser.add_argument(
        "--rehearse", action="store_true", help="tiny sizes, for Triton's interpreter"
    )
    options = parser.parse_args(arguments)
    try:
        check_writable(options.out)
        document = {"device": machine.device(), "versions": machine.versions(), "launches": []}
        sizes = [(1, 16)] if options.rehearse else [(8, 4096), (8, 1024)]
        work = [
            (f"{target.name} {dtype} B={B} T={T}", launch)
            for B, T in sizes
            for target in targets(B, T)[-2 if options.rehearse else 0 :]
            for dtype in ("bfloat16", "float32")
            for launch in launches(target, dtype)
        ]
        for name, launch in (progress := tqdm(work, unit="launch", file=sys.stderr)):
            progress.set_postfix_str(f"{name} {launch.name}")
            row = {"operation": name, "kernel": launch.name, "bytes": launch.bytes}
            row |= {"flops": launch.flops, "candidates": measure(launch, options.samples)}
            document["launches"].append(row)
            with replacing(options.out) as file:
                file.write(json.dumps(document, indent=2).encode())
    except FileError as error:
        parser.error(str(error))
    print(summary(document["launches"]))
    return 0


def summary(rows: list[dict[str, Any]]) -> str:
    """A line for each launch: its time as it is, and the fastest candidate."""
    lines = []
    for row in rows:
        timed = [c for c in row["candidates"] if "ms" in c]
        ours, best = row["candidates"][0], min(timed, key=lambda c: c["ms"], default=None)
        if best is None or "ms" not in ours:
            continue
        chosen = f"{best['num_warps']} warps, {best['num_stages']} stages"
        gain = ours["ms"] / best["ms"]
        lines.append((row["operation"], row["kernel"], ours["ms"], best["ms"], gain, chosen))
    headers = ("operation", "kernel", "ms", "best ms", "gain", "by")
    return tabulate(lines, headers=headers, floatfmt=".3g")


if __name__ == "__main__":
    sys.exit(main())
