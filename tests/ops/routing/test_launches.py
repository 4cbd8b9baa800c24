"""The machine code of routing's launches, compiled for every architecture without a GPU."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

from tjk import executors
from tjk.executors import compiler
from tjk.executors.architectures import SHARED_MEMORY
from tjk.launch import Launch, recording
from tjk.ops import route_top_k, sort_by_expert

ARCHITECTURES = (80, 86, 89, 90, 100, 120, "gfx942")
NAMES = ["expert_histogram", "expert_prefix", "expert_scatter", "top_k_forward", "top_k_backward"]


def _both(x, experts, num_experts, k, normalize, implementation="triton"):
    """What routes and what sorts, with the routing's gradient."""

    def loss(x):
        weights, _ = route_top_k(x, k, normalize=normalize, implementation=implementation)
        return jnp.sum(weights)

    return sort_by_expert(experts, num_experts, implementation=implementation), jax.grad(loss)(x)


def _launches(arch, M, E, k, normalize, dtype="float32") -> list[Launch]:
    x = jax.ShapeDtypeStruct((M, E), dtype)
    experts = jax.ShapeDtypeStruct((M, k), jnp.int32)
    both = functools.partial(_both, num_experts=E, k=k, normalize=normalize)
    with executors.target(arch), recording() as launches:
        jax.eval_shape(both, x, experts)
    return launches


def _facts(arch, *problem) -> list[dict]:
    """What the tests assert of each launch: plain data, for it crosses processes."""
    facts = []
    for launch in _launches(arch, *problem):
        binary = compiler.compile(launch, arch)
        facts.append(
            {
                "name": launch.name,
                "spill": binary.spill_bytes,
                # In the assembly: to disassemble takes twice as long as to compile.
                "float64": "f64" in binary.assembly,
                "fits": binary.shared_bytes <= SHARED_MEMORY[arch],
                "registers": binary.registers,
            }
        )
    return facts


PROBLEMS = [
    (32768, 8, 2, "selected"),
    (32768, 64, 8, "all"),
    (32768, 256, 8, "selected", "bfloat16"),
]


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_machine_code(native, arch, problem):
    facts = native.submit(_facts, arch, *problem).result()
    assert [launch["name"] for launch in facts] == NAMES
    for launch in facts:
        assert launch["spill"] == 0, launch
        assert not launch["float64"], launch
        assert launch["fits"], launch
        assert launch["registers"] <= 128, launch  # at least four programs a multiprocessor


@pytest.mark.parametrize("problem", [(1, 1, 1, "all"), (3, 1024, 1024, "all")], ids=str)
def test_smallest_and_largest(native, problem):
    for launch in native.submit(_facts, 86, *problem).result():
        assert launch["spill"] == 0, launch
        assert launch["fits"], launch


def test_bytes():
    """What each launch reads and writes once; only weights over all take the logits again."""
    M, E, k = 1000, 8, 2
    blocks = -(-M * k // 128)
    rows, logits, counts = 4 * M * k, 4 * M * E, 4 * (E + 1) * blocks
    sort = [rows + counts + 4 * (E + 1), 2 * counts + 4 * (E + 1), 3 * rows + counts]
    for normalize, again in (("selected", 0), ("all", logits)):
        launches = _launches(86, M, E, k, normalize)
        route = [logits + 2 * rows, 3 * rows + logits + again]
        assert [launch.bytes for launch in launches] == sort + route
        assert [launch.flops for launch in launches] == [0] * 5


def _lowered(implementation) -> list[str]:
    """Kernels named in the program for a GPU, from a process where Triton compiles."""
    x = jax.ShapeDtypeStruct((64, 8), jnp.float32)
    experts = jax.ShapeDtypeStruct((64, 2), jnp.int32)
    both = functools.partial(
        _both, num_experts=8, k=2, normalize="all", implementation=implementation
    )
    with executors.target(86):
        text = jax.jit(both).trace(x, experts).lower(lowering_platforms=("cuda",)).as_text()
    return re.findall(r"custom_call @triton_kernel_call", text)


@pytest.mark.parametrize(("implementation", "count"), [(None, 5), ("triton", 5), ("xla", 0)])
def test_default_on_a_gpu_is_triton(native, implementation, count):
    assert len(native.submit(_lowered, implementation).result()) == count
