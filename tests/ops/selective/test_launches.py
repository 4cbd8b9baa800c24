"""The launches of selective_scan: bytes, grids, and machine code for every architecture."""

import re

import jax
import jax.numpy as jnp
import pytest

from tjk import executors
from tjk.executors import compiler
from tjk.executors.architectures import MULTIPROCESSORS, SHARED_MEMORY
from tjk.launch import Launch, recording
from tjk.ops.selective import selective_scan

CUDA = (80, 86, 89, 90, 100, 120)
# Every architecture, each with one of the dtypes: compiling takes long.
SUITE_BINARIES = [
    *((80, "bfloat16"), (86, "float32"), (89, "bfloat16")),
    *((90, "float32"), (100, "bfloat16"), (120, "float32")),
]
# The cell of the ssm suite, and one of a real model: Mamba 130M, gated.
SUITE = {"B": 8, "L": 4096, "D": 128, "R": 128, "gate": False}
MODEL = {"B": 2, "L": 2000, "D": 1536, "R": 16, "gate": True}


def _arguments(dtype, B, L, D, R, gate) -> dict[str, jax.ShapeDtypeStruct]:
    rows, states = ((B, L, D), (B, L, R))
    shapes = {"x": rows, "delta": rows, "B": states, "C": states} | ({"z": rows} if gate else {})
    weights = {"A": (D, R), "D": (D,)} | ({"delta_bias": (D,)} if gate else {})
    return {k: jax.ShapeDtypeStruct(shape, dtype) for k, shape in shapes.items()} | {
        k: jax.ShapeDtypeStruct(shape, jnp.float32) for k, shape in weights.items()
    }


def _launches(arch, arguments, **options) -> tuple[list[Launch], list[Launch]]:
    """What the forward pass launches, and the backward pass."""

    def scan(arguments):
        return selective_scan(**arguments, delta_softplus=True, implementation="triton", **options)

    with executors.target(arch), recording() as launches:
        y, vjp = jax.eval_shape(lambda a: jax.vjp(scan, a), arguments)
        forward = list(launches)
        jax.eval_shape(lambda vjp, d_y: vjp(d_y), vjp, y)
    return forward, launches[len(forward) :]


def _bytes(arrays) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arrays))


@pytest.mark.parametrize("arch", CUDA)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes(dtype, arch):
    """The chunk states that the backward pass wants are among what the forward pass moves."""
    arguments = _arguments(dtype, **SUITE)
    y = arguments["x"]
    forward, backward = _launches(arch, arguments)
    assert [launch.name for launch in forward] == ["selective_states"]
    assert [launch.name for launch in backward] == ["selective_states", "selective_gradients"]
    moved = [sum(launch.bytes for launch in launches) for launches in (forward, backward)]
    assert moved[0] <= 1.3 * _bytes([arguments, y])
    assert moved[1] <= 2.5 * _bytes([arguments, y, arguments])


@pytest.mark.parametrize("arch", [*CUDA, "gfx942"])
def test_one_long_sequence_fills_the_card(arch):
    arguments = _arguments("float32", **SUITE | {"B": 1, "L": 65536})
    forward, backward = _launches(arch, arguments)
    names = [launch.name for launch in (*forward, *backward)]
    passes = ["selective_states", "selective_starts", "selective_states"]
    assert names == [*passes, *passes, "selective_gradients"]
    for launch in (*forward, *backward):
        if launch.name != "selective_starts":
            assert launch.grid[0] >= 4 / 3 * MULTIPROCESSORS[arch], launch
        # Nothing is as large as the states of all steps.
        assert all(out.size <= 65536 * 128 * 128 / 16 for out in launch.outputs), launch


def _facts(arch, dtype, shape, options) -> list[dict]:
    """What the tests assert of each launch: plain data, for it crosses processes."""
    forward, backward = _launches(arch, _arguments(dtype, **shape), **options)
    facts = []
    for launch in (*forward, *backward):
        binary = compiler.compile(launch, arch)
        facts.append(
            {
                "name": launch.name,
                "spill": binary.spill_bytes,
                "fits": binary.shared_bytes <= SHARED_MEMORY[arch],
                "float64": len(re.findall(r"[._]f64\b", binary.assembly)),
                "exponentials": len(re.findall(r"\bex2\.approx|\bv_exp_f32", binary.assembly)),
            }
        )
    return facts


def _check(facts) -> None:
    for launch in facts:
        assert launch["spill"] == 0, launch
        assert launch["fits"], launch
        assert launch["float64"] == 0, launch


@pytest.mark.parametrize(("arch", "dtype"), SUITE_BINARIES)
def test_suite(native, arch, dtype):
    facts = native.submit(_facts, arch, dtype, SUITE, {}).result()
    _check(facts)
    # One exponential a state and step, 8 x 16 in the code of a tile, and that of its softplus;
    # in the gradients one for each of 8 x 2 and their 2 sums, and the softplus of 16, twice.
    assert [launch["exponentials"] for launch in facts] == [129, 129, 50]


@pytest.mark.parametrize(("arch", "reverse"), [(86, True), (90, False), ("gfx942", True)])
def test_model(native, arch, reverse):
    _check(native.submit(_facts, arch, "bfloat16", MODEL, {"reverse": reverse}).result())
