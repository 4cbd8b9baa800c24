"""Arrays of more than 2^31 elements: which addresses the last program of each kernel touches."""

import functools

import jax
import jax.numpy as jnp
import pytest

from tests.conftest import ON_GPU
from tests.ops.attention.test_offsets import run_last_program
from tjk.launch import recording
from tjk.ops import route_top_k, sort_by_expert


def sort(experts):
    """Counts of 4097 x 2^19 blocks."""
    return sort_by_expert(experts, 4096, implementation="triton")


def route(x):
    """2^33 logits, 2^31 weights and more."""
    route = functools.partial(route_top_k, k=300, normalize="all", implementation="triton")
    return jax.grad(lambda x: route(x)[0].sum())(x)


@pytest.mark.skipif(ON_GPU, reason="needs the interpreter")
@pytest.mark.parametrize(
    ("call", "shape", "dtype", "arrays"),
    [
        # Not totals, whose end the last program need not touch.
        (sort, (2**26,), jnp.int32, {"expert_histogram": (0, 1), "expert_prefix": (0, 2)}),
        (
            route,
            (2**23, 1024),
            jnp.bfloat16,
            {"top_k_forward": (0, 1, 2), "top_k_backward": (0, 1, 2, 3, 4)},
        ),
    ],
)
def test_last_program_ends_where_the_arrays_end(monkeypatch, call, shape, dtype, arrays):
    with recording() as launches:
        jax.eval_shape(call, jax.ShapeDtypeStruct(shape, dtype))
    launches = {launch.name: launch for launch in launches}
    for name, numbers in arrays.items():
        launch = launches[name]
        with monkeypatch.context() as patches:
            memory = run_last_program(launch, patches)
        structs = (*launch.inputs, *launch.outputs)
        for i in numbers:
            assert structs[i].size > 2**31 or structs[i].ndim == 1
            assert memory.last(i) == memory.sizes[i] - structs[i].dtype.itemsize, (name, i)
            assert min(a.min() for a in memory.touched[i]) >= 0
