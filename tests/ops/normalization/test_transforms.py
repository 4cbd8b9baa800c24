"""group_norm under JAX's transformations, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.ad_checkpoint import saved_residuals  # jax.ad_checkpoint only prints them

from tjk.ops import group_norm

SHAPE = (2, 3, 4, 8)


def call(x, scale, bias, **options):
    return group_norm(x, scale, bias, groups=2, activation="silu", **options)


@pytest.fixture(scope="module")
def operands():
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((3, *SHAPE), (3, 8), (3, 8))
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes)]


@pytest.mark.parametrize("axes", [(0, None, None), (0, 0, 0), (None, 0, None)])
def test_vmap(implementation, operands, axes):
    def loss(*operands):
        y = call(*operands, implementation=implementation)
        return jnp.sum(jnp.sin(y)), y

    given = [a if axis == 0 else a[0] for a, axis in zip(operands, axes)]
    function = jax.grad(loss, (0, 1, 2), has_aux=True)
    together = jax.jit(jax.vmap(function, axes))(*given)
    for i in range(3):
        alone = function(*(a[i] if axis == 0 else a for a, axis in zip(given, axes)))
        for x, y in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
            np.testing.assert_allclose(x[i], y, rtol=2e-5, atol=2e-6)


def test_statistics_are_named_for_checkpoints(implementation, operands):
    policy = jax.checkpoint_policies.save_only_these_names("group_norm_statistics")

    def loss(*operands):
        return jnp.sum(jnp.sin(call(*operands, implementation=implementation)))

    given = [a[0] for a in operands]
    saved = saved_residuals(jax.checkpoint(loss, policy=policy), *given)
    assert sorted(a.shape for a, source in saved if "argument" not in source) == [(2, 2), (2, 2)]
    expected = jax.grad(loss, (0, 1, 2))(*given)
    actual = jax.jit(jax.grad(jax.checkpoint(loss, policy=policy), (0, 1, 2)))(*given)
    for x, y in zip(actual, expected):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(0, 4, 8), (2, 0, 8)])
def test_nothing_is_normalized_to_nothing(implementation, shape):
    x = jnp.zeros(shape)
    assert call(x, jnp.ones(8), jnp.ones(8), implementation=implementation).shape == shape
    gradients = jax.grad(lambda *a: call(*a, implementation=implementation).sum(), (0, 1, 2))(
        x, jnp.ones(8), jnp.ones(8)
    )
    assert not any(np.asarray(g).any() for g in gradients)


def test_float64_is_left_to_xla():
    with jax.enable_x64(True):
        x, weights = jnp.ones(SHAPE, "float64"), jnp.ones(8, "float64")
        assert call(x, weights, weights).dtype == "float64"
        with pytest.raises(NotImplementedError, match="does not take float64"):
            call(x, weights, weights, implementation="triton")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": jnp.ones(8)}, ValueError, r"x must have shape \(B, \*spatial, C\), got \(8,\)"),
        ({"x": jnp.ones(SHAPE, "int32")}, TypeError, "x must have dtype .*, got int32"),
        ({"scale": jnp.ones(4)}, ValueError, r"scale must have shape \(C,\) with C=8"),
        ({"bias": jnp.ones((8, 1))}, ValueError, r"bias must have shape \(C,\) with C=8"),
        ({"bias": jnp.ones(8, "int32")}, TypeError, "bias must have a floating dtype, got int32"),
        ({"groups": 3}, ValueError, "groups must be a positive integer that divides C=8, got 3"),
        ({"groups": 0}, ValueError, "groups must be a positive integer"),
        ({"groups": 2.0}, ValueError, "groups must be a positive integer"),
        ({"epsilon": -1e-5}, ValueError, "epsilon must not be negative, got -1e-05"),
        ({"epsilon": float("nan")}, ValueError, "epsilon must not be negative"),
        ({"activation": "relu"}, ValueError, "activation must be None or 'silu', got 'relu'"),
        ({"implementation": "fast"}, ValueError, "implementation"),
    ],
)
def test_wrong_arguments(changes, error, message):
    arguments = {"x": jnp.ones(SHAPE), "scale": jnp.ones(8), "bias": jnp.ones(8), "groups": 2}
    with pytest.raises(error, match=message):
        group_norm(**(arguments | changes))
