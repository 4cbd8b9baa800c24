"""The machine code of the ssm suite's gated delta rule, for every architecture without a GPU."""

import re

import jax
import jax.numpy as jnp
import pytest

from tjk import executors
from tjk.executors import compiler
from tjk.executors.architectures import MULTIPROCESSORS, SHARED_MEMORY
from tjk.launch import Launch, recording
from tjk.ops.delta_rule import gated_delta_rule, tiles

# Every architecture, each with one of the dtypes: compiling takes long.
SUITE_BINARIES = [
    *((80, "bfloat16"), (86, "float32"), (89, "bfloat16")),
    *((90, "float32"), (100, "bfloat16"), (120, "float32")),
]
FORWARD = ["delta_rule_compose", "delta_rule_states", "delta_rule_outputs"]
BACKWARD = [
    *("delta_rule_d_states", "delta_rule_states"),
    *("delta_rule_d_states", "delta_rule_gradients"),
]


def _launches(arch, dtype, B=8, L=1024, H=4, K=32, V=32, **options) -> list[Launch]:
    """What a value and all gradients launch."""
    q = jax.ShapeDtypeStruct((B, L, H, K), dtype)
    v = jax.ShapeDtypeStruct((B, L, H, V), dtype)
    gate = jax.ShapeDtypeStruct((B, L, H), jnp.float32)

    def loss(*operands):
        o = gated_delta_rule(*operands, l2_normalize=True, implementation="triton", **options)
        return jnp.sum(o.astype(jnp.float32))

    with executors.target(arch), recording() as launches:
        jax.eval_shape(jax.grad(loss, (0, 1, 2, 3, 4)), q, q, v, gate, gate)
    return launches


def _compile(arch, dtype, **options) -> list[dict]:
    """What the tests assert of each launch: plain data, for it crosses processes."""
    facts = []
    for launch in _launches(arch, dtype, **options):
        binary = compiler.compile(launch, arch)
        facts.append(
            {
                "name": launch.name,
                "spill": binary.spill_bytes,
                "fits": binary.shared_bytes <= SHARED_MEMORY[arch] and binary.tensor_memory <= 512,
                "float64": len(re.findall(r"[._]f64\b", binary.assembly)),
                "tensor core": len(re.findall(r"\b(wgmma|mma)\.|\bv_mfma_", binary.assembly)),
            }
        )
    return facts


@pytest.mark.parametrize(("arch", "dtype"), SUITE_BINARIES)
def test_suite(native, arch, dtype):
    facts = native.submit(_compile, arch, dtype).result()
    assert [launch["name"] for launch in facts] == FORWARD + BACKWARD
    for launch in facts:
        assert launch["spill"] == 0, launch
        assert launch["fits"], launch
        assert launch["float64"] == 0, launch
        assert launch["tensor core"] > 0, launch


def test_amd(native):
    for launch in native.submit(_compile, "gfx942", "bfloat16").result():
        assert launch["fits"], launch
        assert launch["tensor core"] > 0, launch


@pytest.mark.parametrize("arch", [86, 90])
def test_a_long_sequence_fills_the_card(monkeypatch, arch):
    monkeypatch.setattr(tiles, "multiprocessors", executors.multiprocessors)
    for launch in _launches(arch, "float32", B=1, L=65536):
        if launch.name != "delta_rule_states":
            assert launch.grid[0] >= 2 * MULTIPROCESSORS[arch], launch.name


def test_a_large_batch_goes_through_time_once():
    names = [launch.name for launch in _launches(86, "float32", B=64)]
    assert names == ["delta_rule_outputs", "delta_rule_d_states", "delta_rule_gradients"]


@pytest.mark.parametrize(
    ("dtype", "forward", "backward"), [("float32", 1.8, 2.8), ("bfloat16", 2.1, 3.1)]
)
def test_bytes(monkeypatch, dtype, forward, backward):
    """Against inputs and outputs once: with states kept, and time gone through twice."""
    monkeypatch.setattr(tiles, "multiprocessors", executors.multiprocessors)
    launches = _launches(86, dtype, L=4096)
    tokens, size = 8 * 4096 * 4, jnp.dtype(dtype).itemsize
    states = tokens * 32 * 32 * 4 // 64
    moved = [launch.bytes for launch in launches]
    assert sum(moved[:3]) <= forward * tokens * (4 * 32 * size + 2 * 4)
    assert sum(moved[3:]) <= backward * (tokens * (7 * 32 * size + 4 * 4) + states)
