"""The machine code of the scan's launches, compiled for every architecture without a GPU."""

import re

import jax
import jax.numpy as jnp
import pytest

from tjk import executors
from tjk.executors import compiler
from tjk.executors.architectures import MULTIPROCESSORS, SHARED_MEMORY
from tjk.launch import Launch, recording
from tjk.ops.ssd import ssd_scan

# Every architecture, each with one of the dtypes: compiling takes long.
SUITE_BINARIES = [
    *((80, "bfloat16"), (86, "float32"), (89, "bfloat16")),
    *((90, "float32"), (100, "bfloat16"), (120, "float32")),
]
FORWARD = ["ssd_steps", "ssd_chunk_states", "ssd_pass_states", "ssd_outputs"]
BACKWARD = ["ssd_steps", "ssd_chunk_states", "ssd_pass_d_states", "ssd_d_C", "ssd_d_inputs"]
BACKWARD += ["ssd_d_steps"]
PRODUCTS = ("ssd_chunk_states", "ssd_outputs", "ssd_d_C", "ssd_d_inputs")
# H, P, G, R of the suite's cells.
CELLS = {"ssd": (1, 128, 1, 128), "mamba2": (4, 64, 1, 64)}


def _launches(arch, dtype, sizes, B=8, L=4096, *, gated=False, segments=False, **options):
    """What value and gradients of one scan launch."""
    H, P, G, R = sizes
    shapes = {"x": (B, L, H, P), "dt": (B, L, H), "B": (B, L, G, R), "C": (B, L, G, R)}
    shapes |= {"z": (B, L, H, P)} if gated else {}
    structs = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}
    per_head = jax.ShapeDtypeStruct((H,), jnp.float32)
    structs |= dict.fromkeys(("A", "D", "dt_bias"), per_head)
    if segments:
        structs["initial_state"] = jax.ShapeDtypeStruct((B, H, P, R), jnp.float32)
        options["segment_ids"] = jnp.zeros((B, L), jnp.int32)

    def loss(operands):
        y = ssd_scan(**operands, dt_softplus=True, implementation="triton", **options)
        return jnp.sum(y.astype(jnp.float32))

    with executors.target(arch), recording() as launches:
        jax.eval_shape(jax.grad(loss), structs)
    return launches


def _compile(*arguments, **options) -> list[dict]:
    """What the tests assert of each launch: plain data, for it crosses processes."""
    arch = arguments[0]
    facts = []
    for launch in _launches(*arguments, **options):
        binary = compiler.compile(launch, arch)
        products = r"\b(wgmma\.mma|mma\.sync|tcgen05\.mma)|\bv_mfma_"
        facts.append(
            {
                "name": launch.name,
                "spill": binary.spill_bytes,
                "fits": binary.shared_bytes <= SHARED_MEMORY[arch] and binary.tensor_memory <= 512,
                "float64": len(re.findall(r"[._]f64\b", binary.assembly)),
                "tensor core": len(re.findall(products, binary.assembly)),
                # Products without tensor cores; what else multiplies is a few dozen instructions.
                "fma": len(re.findall(r"\bfma\.rn", binary.assembly)),
            }
        )
    return facts


def _check(facts, *, tensor_cores=True) -> None:
    for launch in facts:
        assert launch["spill"] == 0, launch
        assert launch["fits"], launch
        assert launch["float64"] == 0, launch
        if launch["name"] in PRODUCTS:
            assert (launch["tensor core"] > 0) == tensor_cores, launch
            assert launch["fma"] < 400 or not tensor_cores, launch


@pytest.mark.parametrize(("arch", "dtype"), SUITE_BINARIES)
@pytest.mark.parametrize("cell", CELLS)
def test_suite(native, arch, dtype, cell):
    facts = native.submit(_compile, arch, dtype, CELLS[cell]).result()
    assert [launch["name"] for launch in facts] == FORWARD + BACKWARD
    _check(facts)


@pytest.mark.parametrize(
    ("arch", "dtype", "sizes", "options"),
    [
        ("gfx942", "float32", CELLS["ssd"], {}),
        ("gfx942", "bfloat16", CELLS["mamba2"], {}),
        (86, "float32", (2, 256, 1, 256), {}),
        (86, "bfloat16", (3, 100, 1, 200), {"gated": True, "segments": True}),
        (90, "float16", (2, 128, 2, 128), {"gated": True, "segments": True, "reverse": True}),
        (86, "float32", (33, 16, 3, 16), {"gated": True, "segments": True, "chunk_size": 16}),
    ],
    ids=str,
)
def test_other_sizes(native, arch, dtype, sizes, options):
    _check(native.submit(_compile, arch, dtype, sizes, **options).result())


def test_full_precision(native):
    facts = native.submit(_compile, 86, "float32", CELLS["ssd"], precision="highest").result()
    _check(facts, tensor_cores=False)


def _moved(launches: list[Launch]) -> int:
    return sum(launch.bytes for launch in launches)


# Of the bytes of inputs and outputs. Above 1: x and B are read twice, for the states and for y, and
# states, (P, R) float32 each chunk, are written and read twice; backward three launches read
# x, B, C and d_y in part or whole.
BYTES = {
    ("ssd", "float32"): (2.05, 2.35),
    ("ssd", "bfloat16"): (2.60, 2.85),
    ("mamba2", "float32"): (2.40, 2.85),
    ("mamba2", "bfloat16"): (2.50, 3.00),
}


@pytest.mark.parametrize(("cell", "dtype"), BYTES)
def test_bytes(cell, dtype):
    H, P, G, R = CELLS[cell]
    size = jnp.dtype(dtype).itemsize * 8 * 4096
    launches = _launches(86, dtype, CELLS[cell])
    forward, backward = launches[: len(FORWARD)], launches[len(FORWARD) :]
    once = size * (2 * H * P + 2 * G * R + H)
    assert _moved(forward) <= BYTES[cell, dtype][0] * once
    once = size * (3 * H * P + 4 * G * R + 2 * H)
    assert _moved(backward) <= BYTES[cell, dtype][1] * once


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("arch", [86, 120])
def test_one_long_sequence_fills_the_card(arch, dtype, cell):
    for launch in _launches(arch, dtype, CELLS[cell], B=1, L=65536):
        if launch.name in PRODUCTS:
            assert launch.grid[0] >= 2 * MULTIPROCESSORS[arch], launch.name


def test_states_exist_at_chunk_boundaries_only():
    for cell, (H, P, _, R) in CELLS.items():
        for launch in _launches(86, "float32", CELLS[cell]):
            for out in launch.outputs:
                assert out.size <= max(8 * 4096 * H * P, 8 * 4096 // 128 * H * P * R), launch.name


def test_an_array_of_2_to_the_32_elements_has_a_grid():
    launches = _launches(90, "bfloat16", (8, 256, 1, 16), B=64, L=32768)
    assert max(launch.grid[0] for launch in launches) < 2**31
    outputs = next(launch for launch in launches if launch.name == "ssd_outputs")
    assert outputs.inputs[0].size == 2**32
