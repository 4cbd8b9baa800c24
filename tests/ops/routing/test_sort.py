"""sort_by_expert against a stable sort in NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tjk.ops import ExpertOrder, sort_by_expert
from tjk.ops.routing import reference, triton, xla


@functools.partial(jax.jit, static_argnums=(1, 2))
def sort(experts, num_experts, implementation):
    return sort_by_expert(experts, num_experts, implementation=implementation)


def check(actual: ExpertOrder, experts: np.ndarray, num_experts: int) -> None:
    """Fails unless the three arrays are those of a stable sort, as int32."""
    slots = np.where((experts >= 0) & (experts < num_experts), experts, num_experts).ravel()
    order = np.argsort(slots, kind="stable")
    position = np.empty_like(order)
    position[order] = np.arange(len(order))
    sizes = np.bincount(slots, minlength=num_experts + 1)[:num_experts]
    for name, a, b in zip(ExpertOrder._fields, actual, (order, position, sizes)):
        assert a.dtype == jnp.int32, name
        np.testing.assert_array_equal(a, b, name)


def uniform(*shape, low=0, high, seed=0):
    return np.random.default_rng(seed).integers(low, high, shape, dtype=np.int32)


INT32 = np.iinfo(np.int32)
EXPERTS = {
    "random": (uniform(300, high=8), 8),
    "several a token": (uniform(70, 4, high=8), 8),
    "all to one": (np.full(300, 5, np.int32), 8),
    "all to the last": (np.full(129, 4, np.int32), 5),
    "empty experts": (3 * uniform(300, high=3), 8),
    "out of range": (uniform(300, low=-3, high=12), 8),
    "none in range": (uniform(300, low=8, high=20), 8),
    "negative": (np.full(300, -1, np.int32), 8),
    "extremes": (np.array([INT32.min, 1, INT32.max, 0, -1, 2, 1], np.int32), 2),
    "sorted": (np.sort(uniform(300, high=8)), 8),
    "descending": (-np.sort(-uniform(300, high=8)), 8),
    "one expert": (uniform(140, low=-1, high=2), 1),
    "many experts": (uniform(300, high=64), 64),
    "more experts than slots": (uniform(20, low=-5, high=1030), 1024),
    "no slots": (np.zeros(0, np.int32), 3),
    "no tokens": (np.zeros((0, 2), np.int32), 3),
    "one slot": (np.array([2], np.int32), 3),
    "a whole block": (uniform(128, high=5), 5),
    "one more": (uniform(129, high=5), 5),
    "one less": (uniform(127, high=5), 5),
    "a prime": (uniform(1009, high=33), 33),
}


@pytest.mark.parametrize(("experts", "num_experts"), EXPERTS.values(), ids=EXPERTS)
def test_routings(implementation, experts, num_experts):
    check(sort(experts, num_experts, implementation), experts, num_experts)


@pytest.mark.parametrize("routing", ["several a token", "out of range", "no slots"])
def test_the_reference_itself(routing):
    experts, num_experts = EXPERTS[routing]
    call = jax.jit(reference.sort_by_expert, static_argnums=1)
    check(call(experts.ravel(), num_experts), experts, num_experts)


@pytest.mark.parametrize("chunk", [1, 2, 4])
def test_chunks_of_blocks(monkeypatch, chunk):
    """The prefix over blocks in several steps: otherwise that takes 131,073 slots."""
    monkeypatch.setattr(triton, "_PREFIX_BLOCK", chunk)
    experts = uniform(700, low=-1, high=4)
    check(triton.sort(jnp.asarray(experts), 3), experts, 3)


def test_double_precision_mode_changes_nothing(implementation):
    experts, num_experts = EXPERTS["out of range"]
    with jax.enable_x64(True):
        check(sort(jnp.asarray(experts), num_experts, implementation), experts, num_experts)


def test_two_runs_give_the_same_bits(implementation):
    experts, num_experts = EXPERTS["a prime"]
    runs = [sort(experts, num_experts, implementation) for _ in range(2)]
    for a, b in zip(*runs):
        np.testing.assert_array_equal(a, b)


@settings(max_examples=12, deadline=None, derandomize=True, phases=[Phase.generate])
@given(st.data())
def test_random_experts(implementation, data):
    """A permutation and its inverse; experts ascend, and slots do within an expert."""
    slots, num_experts = data.draw(st.sampled_from([(1, 3), (31, 1), (260, 40)]))
    experts = data.draw(arrays(np.int32, slots, elements=st.integers(-2, num_experts + 1)))
    order, position, group_sizes = map(np.asarray, sort(experts, num_experts, implementation))
    np.testing.assert_array_equal(np.sort(order), np.arange(slots))
    np.testing.assert_array_equal(order[position], np.arange(slots))
    dropped = (experts < 0) | (experts >= num_experts)
    ranked = np.where(dropped, num_experts, experts)[order]
    assert all(
        (a, i) < (b, j) for a, b, i, j in zip(ranked, ranked[1:], order, order[1:], strict=False)
    )
    assert group_sizes.tolist() == [(experts == e).sum() for e in range(num_experts)]


@pytest.mark.parametrize("num_experts", [64, 256])
def test_plain_jax_keeps_no_array_of_slots_by_experts(num_experts):
    """Not even one of a byte for each: what is compared is summed at once."""
    slots = 2**16
    call = functools.partial(xla.sort, num_experts=num_experts)
    compiled = jax.jit(call).lower(jax.ShapeDtypeStruct((slots,), jnp.int32)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < slots * num_experts


def test_example():
    experts = jnp.array([[1, 0], [2, 0]], jnp.int32)
    order, position, group_sizes = sort(experts, 3, None)
    assert order.tolist() == [1, 3, 0, 2]
    assert position.tolist() == [2, 0, 3, 1]
    assert group_sizes.tolist() == [2, 1, 1]
