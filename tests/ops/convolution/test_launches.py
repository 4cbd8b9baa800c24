"""The machine code of the convolution's launches, compiled for every architecture without a GPU."""

import re

import jax
import jax.numpy as jnp
import pytest

from tjk import executors
from tjk.executors import compiler
from tjk.executors.architectures import MULTIPROCESSORS
from tjk.launch import Launch, recording
from tjk.ops.convolution import causal_conv1d


def _launches(arch, dtype, shape, **flags) -> list[Launch]:
    """Those of the mamba2 cell's convolution, forward and backward."""
    B, L, D = shape
    x = jax.ShapeDtypeStruct(shape, dtype)
    weight, bias = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((D, 4), (D,)))
    ids = jax.ShapeDtypeStruct((B, L), jnp.int32)

    def loss(x, weight, bias, ids):
        options = {"activation": "silu", "implementation": "triton"}
        if flags.get("segments"):
            state = jnp.zeros((B, 3, D), jnp.float32)
            options |= {"segment_ids": ids, "reverse": True, "initial_state": state}
        return jnp.sum(causal_conv1d(x, weight, bias, **options).astype(jnp.float32))

    with executors.target(arch), recording() as launches:
        jax.eval_shape(jax.grad(loss, (0, 1, 2)), x, weight, bias, ids)
    return launches


def _facts(arch, dtype, shape, **flags) -> list[dict]:
    """What the tests assert of each launch: plain data, for it crosses processes."""
    facts = []
    for launch in _launches(arch, dtype, shape, **flags):
        binary = compiler.compile(launch, arch)
        facts.append(
            {
                "name": launch.name,
                "spill": binary.spill_bytes,
                "registers": binary.registers,
                "float64": binary.float64,
                # Of a row of x or its gradient; a thread has four channels at least.
                "wide loads": len(re.findall(r"ld\.global\S*\.v[42]\.b32", binary.assembly)),
            }
        )
    return facts


@pytest.mark.parametrize(
    ("arch", "dtype"),
    [
        *((80, "bfloat16"), (86, "float32"), (89, "bfloat16")),
        *((90, "float32"), (100, "bfloat16"), (120, "float32")),
    ],
)
def test_suite(native, arch, dtype):
    forward, backward = native.submit(_facts, arch, dtype, (8, 4096, 384)).result()
    assert [forward["name"], backward["name"]] == ["convolution_forward", "convolution_backward"]
    for launch in (forward, backward):
        assert launch["spill"] == launch["float64"] == 0, launch
        assert launch["registers"] <= 128, launch  # four programs a multiprocessor
    # 16 elements of each of four taps; three rows before a part, then four of x and four of d_y.
    assert forward["wide loads"] == (16 if dtype == "float32" else 8), forward
    assert backward["wide loads"] == 11, backward


@pytest.mark.parametrize("arch", [86, "gfx942"])
def test_every_flag(native, arch):
    for launch in native.submit(_facts, arch, "bfloat16", (2, 1000, 130), segments=True).result():
        assert launch["spill"] == launch["float64"] == 0, launch


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes(dtype):
    """Each of x, y, d_y and d_x crosses device memory once; the rest is small."""
    x = 8 * 4096 * 384 * jnp.dtype(dtype).itemsize
    forward, backward = _launches(86, dtype, (8, 4096, 384))
    assert 2 * x < forward.bytes <= 2.01 * x
    assert 3 * x < backward.bytes <= 3.1 * x


@pytest.mark.parametrize("D", [128, 384])
def test_one_long_sequence_fills_the_card(D):
    for arch in (86, 90, 120):
        for launch in _launches(arch, "float32", (1, 65536, D)):
            assert launch.grid[0] >= 2 * MULTIPROCESSORS[arch], (launch.name, launch.grid)
