"""The machine code of GroupNorm's launches, compiled for every architecture without a GPU."""

import re

import jax
import jax.numpy as jnp
import pytest

from tjk import executors
from tjk.executors import compiler
from tjk.launch import Launch, recording
from tjk.nn import unet
from tjk.ops import group_norm

# What the U-Net normalizes: (images, pixels, channels) at each resolution of its suite.
UNET = [
    (8, (resolution // r) ** 2, width)
    for resolution in (32, 64)
    for r, channels in ((1, (64, 128)), (2, (128, 256)), (4, (256, 512)))
    for width in channels
]


def _launches(arch, dtype, shape) -> list[Launch]:
    """Those of a normalization, forward and backward."""
    x = jax.ShapeDtypeStruct(shape, dtype)
    weights = jax.ShapeDtypeStruct(shape[-1:], jnp.float32)
    groups = unet.Config().groups

    def loss(x, scale, bias):
        y = group_norm(x, scale, bias, groups=groups, activation="silu", implementation="triton")
        return jnp.sum(y.astype(jnp.float32))

    with executors.target(arch), recording() as launches:
        jax.eval_shape(jax.grad(loss, (0, 1, 2)), x, weights, weights)
    return launches


def _facts(arch, dtype, shapes) -> list[dict]:
    """What the tests assert of each launch: plain data, for it crosses processes."""
    facts = []
    for shape in shapes:
        for launch in _launches(arch, dtype, shape):
            binary = compiler.compile(launch, arch)
            facts.append(
                {
                    "name": launch.name,
                    "shape": shape,
                    "spill": binary.spill_bytes,
                    "float64": binary.float64,
                    "atomics": len(re.findall(r"\b(atom|red)\.", binary.assembly)),
                    "wide loads": binary.wide_loads,
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
    shapes = [(8, 4096, 64), (8, 256, 256), (8, 65536, 256), (8, 65536, 320)]
    facts = native.submit(_facts, arch, dtype, shapes).result()
    assert len(facts) >= 2 * len(shapes)
    for launch in facts:
        # On 100 ptxas puts one 8-byte value of a kernel of 56 registers on the stack.
        assert launch["spill"] <= (8 if arch == 100 else 0), launch
        assert launch["float64"] == launch["atomics"] == 0, launch
        # Of 320 channels a group has 10: between groups of 16 lanes addresses jump.
        assert launch["wide loads"] or launch["shape"][-1] == 320, launch


@pytest.mark.parametrize("shape", [(2, 700, 96), (3, 64, 32), (2, 5, 32 * 37)])
def test_amd(native, shape):
    for launch in native.submit(_facts, "gfx942", "bfloat16", [shape]).result():
        assert launch["spill"] == launch["float64"] == 0, launch


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", UNET)
def test_bytes(dtype, shape):
    """x is read twice and y written once; of a gradient x and d_y are read twice, d_x written."""
    launches = _launches(86, dtype, shape)
    x = shape[0] * shape[1] * shape[2] * jnp.dtype(dtype).itemsize
    forward = [launch for launch in launches if launch.name.endswith(("statistics", "forward"))]
    backward = [launch for launch in launches if launch not in forward]
    small = 0.1 * x + 64 * 2**10
    assert sum(launch.bytes for launch in forward) <= (len(forward) + 1) * x + small
    assert sum(launch.bytes for launch in backward) <= (2 * len(backward) + 1) * x + small
    assert {len(forward), len(backward)} <= {1, 2}
