"""The machine code of the recurrence's launches, compiled for every architecture without a GPU."""

import re

import jax
import jax.numpy as jnp
import pytest

from tjk import executors
from tjk.executors import compiler
from tjk.executors.architectures import MULTIPROCESSORS
from tjk.launch import Launch, recording
from tjk.ops.linear import linear_scan

FORWARD = ["linear_summaries", "linear_outputs", "linear_outputs"]
BACKWARD = ["linear_summaries", "linear_outputs", "linear_gradients"]
SUITE = (8, 4096, 128)


def _launches(arch, dtype, shape, *, varying=False, flags=False) -> list[Launch]:
    """Those of a scan, forward and backward; by default of the LRU cell."""
    B, L, D = shape
    x = jax.ShapeDtypeStruct(shape, dtype)
    a = x if varying else jax.ShapeDtypeStruct((D,), dtype)
    ids = jax.ShapeDtypeStruct((B, L), jnp.int32)

    def loss(a, x, ids):
        options = {"implementation": "triton"}
        if flags:
            state = jnp.zeros((B, D), "float32")
            options |= {"segment_ids": ids, "reverse": True, "initial_state": state}
        return jnp.sum(jnp.real(linear_scan(a, x, **options)).astype(jnp.float32))

    with executors.target(arch), recording() as launches:
        jax.eval_shape(jax.grad(loss, (0, 1)), a, x, ids)
    return launches


def _facts(arch, dtype, shape, **options) -> list[dict]:
    """What the tests assert of each launch: plain data, for it crosses processes."""
    facts = []
    for launch in _launches(arch, dtype, shape, **options):
        binary = compiler.compile(launch, arch)
        loads = re.findall(r"ld\.global\S*", binary.assembly)
        facts.append(
            {
                "name": launch.name,
                "spill": binary.spill_bytes,
                "float64": len(re.findall(r"[._]f64\b", binary.assembly)),
                "narrow loads": sum(".v4.b32" not in load for load in loads),
                "shuffles": len(re.findall(r"\bshfl\.|\bbar\.", binary.assembly)),
            }
        )
    return facts


@pytest.mark.parametrize("varying", [False, True])
@pytest.mark.parametrize("arch", [80, 86, 89, 90, 100, 120])
def test_suite(native, arch, varying):
    """Complex: loads of 128 bits alone, and no exchange between lanes."""
    facts = native.submit(_facts, arch, "complex64", SUITE, varying=varying).result()
    assert [launch["name"] for launch in facts] == FORWARD + BACKWARD
    for launch in facts:
        zeros = (launch[key] for key in ("spill", "float64", "narrow loads", "shuffles"))
        assert not any(zeros), launch


@pytest.mark.parametrize(
    ("arch", "dtype"), [(80, "bfloat16"), (86, "float32"), (120, "bfloat16"), ("gfx942", "float32")]
)
def test_every_flag(native, arch, dtype):
    options = {"varying": True, "flags": True}
    for launch in native.submit(_facts, arch, dtype, (2, 1000, 130), **options).result():
        assert launch["spill"] == launch["float64"] == launch["shuffles"] == 0, launch


@pytest.mark.parametrize(
    ("dtype", "varying", "forward", "backward"),
    [
        # Of x and y (2) and of d_y, y and d_x (3): x and d_y are read twice.
        ("complex64", False, 1.6, 1.4),
        # Of a, x and y (3) and of a, d_y, y, d_x and d_a (5): a, too.
        ("float32", True, 1.75, 1.45),
    ],
)
def test_bytes(dtype, varying, forward, backward):
    """Time is parallel at the price of reading twice what a part's summary is made of."""
    least = (3, 5) if varying else (2, 3)
    launches = _launches(86, dtype, SUITE, varying=varying)
    x = 8 * 4096 * 128 * jnp.dtype(dtype).itemsize
    moved = [sum(launch.bytes for launch in part) / x for part in (launches[:3], launches[3:])]
    assert least[0] < moved[0] <= forward * least[0]
    assert least[1] < moved[1] <= backward * least[1]


@pytest.mark.parametrize("arch", [86, 90, 120])
def test_one_long_sequence_fills_the_card(arch):
    """The recurrence over its parts is itself cut into parts: no program takes more than 128 steps.

    So the time of that does not show.
    """
    launches = _launches(arch, "complex64", (1, 65536, 128))
    whole = [launch for launch in launches if launch.scalars[0] == 65536]
    assert [launch.name for launch in whole] == [
        *("linear_summaries", "linear_outputs", "linear_summaries", "linear_gradients"),
    ]
    for launch in whole:
        assert launch.grid[0] >= 2 * MULTIPROCESSORS[arch], (launch.name, launch.grid)
    assert max(launch.scalars[2] for launch in launches) <= 128


def test_many_sequences_need_no_parts():
    names = [launch.name for launch in _launches(86, "float32", (1024, 256, 128))]
    assert names == ["linear_outputs", "linear_gradients"]
