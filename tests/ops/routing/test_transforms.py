"""route_top_k and sort_by_expert under JAX's transformations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tjk.launch import recording
from tjk.ops import route_top_k, sort_by_expert

M, E, K = 9, 5, 2


@pytest.fixture(params=["selected", "all"])
def route(implementation, request):
    """A function of logits alone."""
    return functools.partial(
        route_top_k, k=K, normalize=request.param, implementation=implementation
    )


@pytest.fixture
def sort(implementation):
    """A function of experts alone."""
    return functools.partial(sort_by_expert, num_experts=E, implementation=implementation)


def logits(*lead):
    return np.random.default_rng(0).standard_normal((*lead, M, E), np.float32)


def experts(*lead):
    return np.random.default_rng(0).integers(-1, E + 1, (*lead, M, K), dtype=np.int32)


def assert_same(actual, expected):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def stacked(function, arrays):
    """What vmap must give: one call for each, stacked."""
    return jax.tree.map(lambda *xs: np.stack(xs), *map(jax.jit(function), arrays))


def test_vmap(route):
    x = logits(3)
    expected = stacked(route, x)
    assert_same(jax.jit(jax.vmap(route))(x), expected)
    assert_same(jax.jit(jax.vmap(route, in_axes=2))(np.moveaxis(x, 0, 2)), expected)


def test_nested_vmap(route):
    x = logits(6)
    nested = jax.jit(jax.vmap(jax.vmap(route)))(x.reshape(2, 3, M, E))
    assert_same([y.reshape(6, M, K) for y in nested], stacked(route, x))


def test_gradients_and_vmap(route):
    x = logits(3)

    def loss(x):
        weights, chosen = route(x)
        return jnp.sum(jnp.sin(weights) * (1 + chosen.astype(jnp.float32)))

    expected = stacked(jax.grad(loss), x)
    assert_same(jax.jit(jax.vmap(jax.grad(loss)))(x), expected)
    assert_same(jax.jit(jax.grad(lambda x: jax.vmap(loss)(x).sum()))(x), expected)
    assert_same(jax.jit(jax.grad(jax.checkpoint(loss)))(x[0]), expected[0])


def test_experts_have_no_derivative(route):
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(route(x)[1].astype(jnp.float32))))(logits())
    assert not gradient.any()


def test_jit_and_scan(route):
    x = logits(2)
    expected = stacked(route, x)
    assert_same(route(x[0]), [y[0] for y in expected])
    assert_same(jax.lax.scan(lambda _, x: (None, route(x)), None, x)[1], expected)


def mapped_by_shards(function):
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P("x")))


def test_shard_map(route):
    """With JAX's check of how values vary."""

    def both(x):
        weights, vjp, chosen = jax.vjp(route, x, has_aux=True)
        return weights, chosen, vjp(weights)[0]

    assert_same(mapped_by_shards(both)(logits()), jax.jit(both)(logits()))


def test_sort_vmap(sort):
    x = experts(3)
    expected = stacked(sort, x)
    assert_same(jax.jit(jax.vmap(sort))(x), expected)
    assert_same(jax.jit(jax.vmap(sort, in_axes=2))(np.moveaxis(x, 0, 2)), expected)


def test_sort_jit_scan_and_shard_map(sort):
    x = experts(2)
    expected = stacked(sort, x)
    first = [y[0] for y in expected]
    assert_same(sort(x[0]), first)
    assert_same(jax.lax.scan(lambda _, x: (None, sort(x)), None, x)[1], expected)
    assert_same(mapped_by_shards(sort)(x[0]), first)


def test_vmap_of_routing_is_one_launch():
    with recording() as launches:
        route = functools.partial(route_top_k, k=K, implementation="triton")
        jax.eval_shape(jax.vmap(jax.grad(lambda x: route(x)[0].sum())), logits(3))
    assert [launch.name for launch in launches] == ["top_k_forward", "top_k_backward"]
    assert all(launch.inputs[0].shape == (3, M, E) for launch in launches)


def test_default_on_a_cpu_is_plain_jax():
    """Even where Triton's interpreter could run."""
    route = jax.jit(functools.partial(route_top_k, k=K))
    sort = jax.jit(functools.partial(sort_by_expert, num_experts=E))
    for call, argument in ((route, logits()), (sort, experts())):
        text = call.trace(argument).lower(lowering_platforms=("cpu",)).as_text()
        assert "callback" not in text
