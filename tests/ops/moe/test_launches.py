"""The machine code of the moe suite's launches, compiled for every architecture without a GPU."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tjk import executors
from tjk.executors import compiler
from tjk.executors.architectures import SHARED_MEMORY
from tjk.launch import Launch, recording
from tjk.nn import moe
from tjk.ops import grouped_matmul, moe_mlp

CONFIG = moe.Config()
# Every architecture, each with one of the dtypes: compiling takes long.
SUITE_BINARIES = [
    *((80, "bfloat16"), (86, "float32"), (89, "bfloat16")),
    *((90, "float32"), (100, "bfloat16"), (120, "float32")),
]
PRODUCTS = {
    "moe_gate_up": 2,
    "grouped_matmul": 1,
    "moe_d_hidden": 1,
    "moe_d_input": 2,
    "grouped_outer": 1,
}
# Loads of group sizes, slots and routing weights: one to a row or a group, not 128 bits each.
NARROW = {
    "moe_gate_up": 5,
    "grouped_matmul": 1,
    "moe_d_hidden": 13,
    "moe_d_input": 1,
    "grouped_outer": 13,
}


def _train_step(arch, dtype, tokens, config=CONFIG) -> list[Launch]:
    """What one training step of the moe suite launches."""
    params = jax.eval_shape(lambda key: moe.init(key, config), jax.random.key(0))
    x = jax.ShapeDtypeStruct((tokens, config.d_model), jnp.float32)

    def loss(params, x):
        y, _ = moe.apply(params, config, x, dtype=jnp.dtype(dtype), implementation="triton")
        return jnp.mean(y.astype(jnp.float32) ** 2)

    with executors.target(arch), recording() as launches:
        jax.eval_shape(jax.grad(loss), params, x)
    return launches


def _facts(launches, arch) -> list[dict]:
    """What the tests assert of each launch: plain data, for it crosses processes."""
    facts = []
    for launch in launches:
        binary = compiler.compile(launch, arch)
        facts.append(
            {
                "name": launch.name,
                "spill": binary.spill_bytes,
                "fits": binary.shared_bytes <= SHARED_MEMORY[arch] and binary.tensor_memory <= 512,
                "float64": binary.float64,
                "narrow loads": binary.global_loads - binary.wide_loads,
                "wide loads": binary.wide_loads,
                "tensor core": binary.tensor_core,
                "products": _products(binary, launch),
            }
        )
    return facts


def _products(binary, launch) -> float:
    """Multiplications of the tensor-core instructions / those of one step of the products.

    Each tile product stands once in the code, so 1 says that all of them are on tensor cores.
    Compute capability 10.0 does not say it in the opcode.
    """
    tile = dict(launch.constexprs)
    step = tile.get("BLOCK_M", 1) * tile.get("BLOCK_N", 1) * tile.get("BLOCK_K", 1)
    total = 0
    for opcode, times in binary.opcodes.items():
        if shape := re.match(r"HGMMA\.64x(\d+)x(\d+)", opcode):
            total += times * 64 * int(shape[1]) * int(shape[2]) * (launch.num_warps // 4)
        elif shape := re.match(r"HMMA\.168(8|16)\.", opcode):
            total += times * 16 * 8 * int(shape[1]) * launch.num_warps
    return total / (PRODUCTS.get(launch.name, 1) * step)


def _compile_suite(arch, dtype, tokens) -> list[dict]:
    return _facts(_train_step(arch, dtype, tokens), arch)


@pytest.mark.parametrize(("arch", "dtype"), SUITE_BINARIES)
def test_suite(native, arch, dtype):
    """32768 tokens launch the same kernels with the same tiles as 4096."""
    facts = native.submit(_compile_suite, arch, dtype, 4096).result()
    assert [f["name"] for f in facts if f["name"] in PRODUCTS] == [
        *("moe_gate_up", "grouped_matmul"),
        *("moe_d_hidden", "moe_d_input", "grouped_outer", "grouped_outer", "grouped_outer"),
    ]
    for launch in facts:
        assert launch["spill"] == 0, launch
        assert launch["fits"], launch
        assert launch["float64"] == 0, launch
        if launch["name"] in PRODUCTS:
            assert launch["narrow loads"] <= NARROW[launch["name"]], launch
            assert launch["wide loads"] > 0, launch
            if arch == 100:
                assert launch["tensor core"] > 0, launch
            else:
                assert launch["products"] == 1, launch


def test_tiles_depend_on_rows_per_expert_alone():
    for dtype in ("float32", "bfloat16"):
        few, many = (
            [(launch.name, launch.constexprs, launch.num_warps) for launch in launches]
            for launches in (_train_step(86, dtype, tokens) for tokens in (4096, 32768))
            for launches in [[launch for launch in launches if launch.name in PRODUCTS]]
        )
        assert few == many


def _compile_others(arch, dtype, experts, tokens, width, precision) -> list[dict]:
    """The launches of odd widths and other numbers of experts, and of grouped_matmul alone."""
    x = jax.ShapeDtypeStruct((tokens, width), dtype)
    wide = jax.ShapeDtypeStruct((experts, width, 2 * width), dtype)
    down = jax.ShapeDtypeStruct((experts, 2 * width, width), dtype)
    weights = jax.ShapeDtypeStruct((tokens, 2), jnp.float32)
    indices = jax.ShapeDtypeStruct((tokens, 2), jnp.int32)
    sizes = jax.ShapeDtypeStruct((experts,), jnp.int32)
    options = {"implementation": "triton", "precision": precision}

    def loss(x, gate, up, down, weights, indices, sizes):
        y = moe_mlp(x, gate, up, down, weights, indices, **options).astype(jnp.float32)
        return jnp.sum(y) + jnp.sum(grouped_matmul(x, gate, sizes, **options).astype(jnp.float32))

    with executors.target(arch), recording() as launches:
        operands = (x, wide, wide, down, weights, indices, sizes)
        jax.eval_shape(jax.grad(loss, (0, 1, 2, 3, 4)), *operands)
    # From the assembly: the disassembly takes twice the time of compiling.
    binaries = [(launch.name, compiler.compile(launch, arch)) for launch in launches]
    return [
        {
            "name": name,
            "spill": binary.spill_bytes,
            "fits": binary.shared_bytes <= SHARED_MEMORY[arch],
            "float64": len(re.findall(r"[._]f64\b", binary.assembly)),
            "tensor core": len(re.findall(r"\b(wgmma|mma)\.|\bv_mfma_", binary.assembly)),
        }
        for name, binary in binaries
    ]


@pytest.mark.parametrize(
    ("dtype", "experts", "tokens", "width", "precision"),
    [
        ("bfloat16", 64, 4096, 512, None),
        ("bfloat16", 256, 300, 100, None),
        ("float32", 3, 5000, 100, None),
        ("float32", 8, 4096, 512, "highest"),
    ],
)
@pytest.mark.parametrize("arch", [86, 90, "gfx942"])
def test_other_sizes(native, arch, dtype, experts, tokens, width, precision):
    arguments = (arch, dtype, experts, tokens, width, precision)
    for launch in native.submit(_compile_others, *arguments).result():
        assert launch["spill"] == 0, launch
        assert launch["fits"], launch
        assert launch["float64"] == 0, launch
        if launch["name"] in PRODUCTS:
            assert (launch["tensor core"] > 0) == (precision is None or arch == "gfx942"), launch


def _flops(tokens, experts) -> tuple[int, float, int]:
    """FLOPs that the launches record, those of the tiles of a random routing, and the least."""
    config = dataclasses.replace(CONFIG, experts=experts)
    rows = tokens * config.top_k
    sizes = np.bincount(np.random.default_rng(0).integers(0, experts, rows), minlength=experts)
    recorded, real, least = 0, 0.0, 0
    for launch in _train_step(86, "bfloat16", tokens, config):
        if launch.name in PRODUCTS:
            constexprs = dict(launch.constexprs)
            block = constexprs["BLOCK_M"]
            product = 2 * PRODUCTS[launch.name] * constexprs["K"] * constexprs["N"]
            recorded += launch.flops
            real += product * block * np.ceil(sizes / block).sum()
            least += product * rows
    return recorded, real, least


@pytest.mark.parametrize(
    ("tokens", "experts", "padding"), [(4096, 8, 1.05), (32768, 8, 1.05), (4096, 64, 1.15)]
)
def test_flops(tokens, experts, padding):
    recorded, real, least = _flops(tokens, experts)
    assert least < recorded <= padding * least
    assert least < real <= padding * least
    assert recorded == pytest.approx(real, rel=0.02)
