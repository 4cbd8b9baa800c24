"""The machine code of attention's launches, compiled for every architecture without a GPU."""

import re

import jax
import jax.numpy as jnp
import pytest

from tests.ops.attention.machine_code import hot_loop
from tjk import executors
from tjk.executors import compiler
from tjk.executors.architectures import SHARED_MEMORY
from tjk.launch import Launch, recording
from tjk.nn import transformer
from tjk.ops import flash_attention

CUDA = (80, 86, 89, 90, 100, 120)


def _suite_launches(arch, dtype, tokens) -> list[Launch]:
    """What one training step of the transformer suite launches."""
    config = transformer.Config()
    params = jax.eval_shape(lambda key: transformer.init(key, config), jax.random.key(0))
    x = jax.ShapeDtypeStruct((8, tokens, config.width), jnp.float32)

    def loss(params, x):
        y = transformer.apply(params, config, x, dtype=jnp.dtype(dtype), implementation="triton")
        return jnp.mean(y.astype(jnp.float32) ** 2)

    with executors.target(arch), recording() as launches:
        jax.eval_shape(jax.grad(loss), params, x)
    return launches


def _launches(arch, dtype, width, options) -> list[Launch]:
    """The launches of value and gradients at one width, head groups of two, causal."""
    query = jax.ShapeDtypeStruct((1, 1000, 4, width), dtype)
    key = jax.ShapeDtypeStruct((1, 1000, 2, width), dtype)

    def loss(query, key, value):
        return jnp.sum(flash_attention(query, key, value, implementation="triton", **options))

    with executors.target(arch), recording() as launches:
        jax.eval_shape(jax.grad(loss, (0, 1, 2)), query, key, key)
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
                "spills in the loop": _spills_in_loop(binary),
                "fits": binary.shared_bytes <= SHARED_MEMORY[arch] and binary.tensor_memory <= 512,
                "float64": binary.float64,
                "narrow loads": binary.global_loads - binary.wide_loads,
                "tensor core": binary.tensor_core,
                "products": _products(binary, launch),
            }
        )
    return facts


def _spills_in_loop(binary) -> int:
    """Accesses to spilled registers in the innermost loop that has tensor-core instructions."""
    loop = [] if isinstance(binary.arch, str) else hot_loop(binary)
    if not loop:
        return binary.local_accesses
    return sum(bool(re.search(r"\b(LDL|STL)\b", line)) for line in loop)


def _products(binary, launch) -> float:
    """Multiplications of the tensor-core instructions in a loop body / those of one pair of tiles.

    Each tile product stands once in the code, so 1 says that all of them are on tensor cores; a
    little more, that warps share a row of tiles. Compute capability 10.0 does not say it in the
    opcode.
    """
    constexprs = dict(launch.constexprs)
    pair = constexprs["BLOCK_M"] * constexprs["BLOCK_N"]
    width = constexprs["H_0"] + constexprs["H_1"]
    count = {
        "attention_forward": 2,
        "attention_backward": 5,
        "attention_backward_key_value": 4,
        "attention_backward_query": 3,
    }[launch.name]
    total = 0
    for opcode, times in binary.opcodes.items():
        if shape := re.match(r"HGMMA\.64x(\d+)x(\d+)", opcode):
            total += times * 64 * int(shape[1]) * int(shape[2]) * (launch.num_warps // 4)
        elif shape := re.match(r"HMMA\.168(8|16)\.", opcode):
            total += times * 16 * 8 * int(shape[1]) * launch.num_warps
    return total / (count * pair * width)


def _compile_suite(arch, dtype, tokens) -> list[dict]:
    return _facts(_suite_launches(arch, dtype, tokens), arch)


def _compile_width(arch, dtype, width, options) -> list[dict]:
    return _facts(_launches(arch, dtype, width, options), arch)


@pytest.mark.parametrize("tokens", [256, 1024, 4096])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("arch", CUDA)
def test_transformer_suite(native, arch, dtype, tokens):
    facts = native.submit(_compile_suite, arch, dtype, tokens).result()
    names = [launch["name"] for launch in facts]
    assert names == ["attention_forward"] * 4 + ["attention_backward"] * 4
    for launch in facts:
        assert launch["spill"] == 0, launch
        assert launch["fits"], launch
        assert launch["float64"] == 0, launch
        # The backward's logsumexp and delta are vectors of fewer elements than threads.
        assert launch["narrow loads"] <= (6 if launch["name"] == "attention_backward" else 0), (
            launch
        )
        if arch == 100:
            assert launch["tensor core"] >= 5, launch
        else:
            assert 1 <= launch["products"] < 1.5, launch


@pytest.mark.parametrize(("dtype", "deterministic"), [("float32", False), ("bfloat16", True)])
@pytest.mark.parametrize("width", [16, 80, 96, 128, 160, 256])
@pytest.mark.parametrize("arch", [86, 90, "gfx942"])
def test_widths(native, arch, width, dtype, deterministic):
    options = {"deterministic": deterministic, "is_causal": True}
    for launch in native.submit(_compile_width, arch, dtype, width, options).result():
        # In two parts, and with head groups, ptxas puts some bytes aside whatever the tile: around
        # the loop, and between 129 and 192 columns in it, too.
        assert launch["spill"] <= (0 if width in (16, 128, 256) else 64), launch
        assert launch["spills in the loop"] == 0 or width == 160, launch
        assert launch["fits"], launch
        assert launch["float64"] == 0, launch
        assert launch["tensor core"] > 0, launch


@pytest.mark.parametrize("arch", [86, 90])
def test_full_precision_fits(native, arch):
    options = {"precision": "highest", "deterministic": True}
    for launch in native.submit(_compile_width, arch, "float32", 64, options).result():
        assert launch["spill"] == 0, launch
        assert launch["fits"], launch
        assert launch["tensor core"] == 0, launch


def _flops(options, T, S) -> list[int]:
    query = jax.ShapeDtypeStruct((1, T, 1, 64), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((1, S, 1, 64), jnp.bfloat16)

    def loss(query, key, value):
        return jnp.sum(flash_attention(query, key, value, implementation="triton", **options))

    with recording() as launches:
        jax.eval_shape(jax.grad(loss, (0, 1, 2)), query, key, key)
    return [launch.flops for launch in launches]


@pytest.mark.parametrize(
    ("deterministic", "products"), [(False, [2, 5]), (True, [2, 3, 4])], ids=str
)
def test_flops(deterministic, products):
    expected = [n * 2 * 1024 * 2048 * 64 for n in products]
    assert _flops({"deterministic": deterministic}, 1024, 2048) == expected


def test_flops_of_masks():
    """Tiles that a mask leaves empty are not visited."""
    full, causal = (_flops({"is_causal": x}, 4096, 4096)[0] for x in (False, True))
    assert 0.5 < causal / full < 0.53
    window = _flops({"local_window_size": (128, 128)}, 4096, 4096)[0]
    assert window / full < 0.11
