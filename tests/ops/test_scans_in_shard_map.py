"""The scans inside `jax.shard_map`, where types say over which axes of the mesh an array varies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tjk import ops

X = jnp.sin(jnp.arange(2 * 20 * 2 * 4, dtype=jnp.float32)).reshape(2, 20, 2, 4)
ROWS = X.reshape(2, 20, 8)
STEPS = jnp.abs(X[..., 0])  # (B, L, H)


def linear(a, x):
    return ops.linear_scan(jax.nn.sigmoid(a), x, implementation="xla")


def convolution(weight, x):
    return ops.causal_conv1d(x, weight[:, None] * jnp.arange(1.0, 4), implementation="xla")


def selective(a, x):
    A = -jnp.abs(a)[:, None] * jnp.arange(1.0, 4)
    return ops.selective_scan(x, jnp.abs(x), A, x[..., :3], x[..., 1:4], implementation="xla")


def ssd(a, x):
    B = x[:, :, :1]
    return ops.ssd_scan(x, jnp.abs(x[..., 0]), -jnp.abs(a), B, B, implementation="xla")


def delta_rule(scale, x):
    g, beta = -jnp.abs(x[..., 0]), jax.nn.sigmoid(x[..., 1])
    return ops.gated_delta_rule(scale * x, x, x, g, beta, l2_normalize=True, implementation="xla")


@pytest.mark.parametrize(
    ("scan", "parameter", "x"),
    [
        (linear, ROWS[0, 0], ROWS),
        (convolution, ROWS[0, 0], ROWS),
        (selective, ROWS[0, 0], ROWS),
        (ssd, X[0, 0, :, 0], X),
        (delta_rule, X[0, 0, 0], X),
    ],
)
def test_a_shard_of_the_batch(scan, parameter, x):
    """Parameters are replicated: their gradients add up over the mesh."""
    mesh = jax.make_mesh((1,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = (jax.P(), jax.P("batch"))
    sharded = jax.shard_map(scan, mesh=mesh, in_specs=specs, out_specs=jax.P("batch"))

    def loss(function, *operands):
        return jnp.sum(jnp.sin(function(*operands)))

    value = jax.jit(jax.value_and_grad(loss, (1, 2)), static_argnums=0)
    ours, expected = (jax.tree.leaves(value(f, parameter, x)) for f in (sharded, scan))
    for a, b in zip(ours, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
