"""The diffusion suite against its formula, evaluated in NumPy and float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.nn.by_hand import (
    affine,
    disturbed,
    float64,
    gelu,
    relative_error,
    silu,
    transformer_block,
)
from tests.numerics import assert_within_budget
from tjk.nn import diffusion, transformer


@pytest.fixture(autouse=True)
def ieee_products():
    """float32 means float32, not TF32: in Triton, and on a GPU everywhere."""
    with jax.default_matmul_precision("highest"):
        yield


SMALL = diffusion.Config(
    features=3,
    core=transformer.Config(width=24, heads=2, blocks=2, mlp_width=40),
    frequencies=5,
    time_width=12,
    modulation_width=20,
)


@functools.cache
def parameters():
    return disturbed(diffusion.init(jax.random.key(0), SMALL), 0.2)


def example():
    """Sequences and times that bfloat16 can hold."""
    x = jax.random.normal(jax.random.key(2), (2, 7, 3), jnp.bfloat16)
    return x.astype(jnp.float32), jnp.asarray([0.25, 0.8125], jnp.float32)


def by_hand(params, config, x, t):
    """The formula of the module's docstring."""
    params, x, t = float64(params), np.asarray(x, np.float64), np.asarray(t, np.float64)
    angles = 2 * np.pi * t[:, None] * params["time"]["frequencies"]
    features = np.concatenate([np.cos(angles), np.sin(angles)], -1)
    e = affine(params["time_out"], silu(affine(params["time_hidden"], features)))

    T, D = x.shape[1], config.core.width
    positions = np.zeros((T, D))
    for i in range(D // 2):
        angle = np.arange(T) / 10_000 ** (2 * i / D)
        positions[:, i], positions[:, D // 2 + i] = np.sin(angle), np.cos(angle)

    h = affine(params["in"], x) + positions
    for i in range(config.core.blocks):
        p = params[f"block_{i}"]

        def modulate(norm, n, p=p):
            hidden = gelu(affine(p[f"{norm}_hidden"], e))
            both = affine(p[f"{norm}_modulation"], hidden)[:, None]
            return n * (1 + both[..., :D]) + both[..., D:]

        h = transformer_block(p, config.core, h, modulate)
    return affine(params["out"], h)


def softmax_attention(query, key, value):
    logits = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(logits, axis=-1), value)


@functools.partial(jax.jit, static_argnames=("dtype", "implementation"))
def apply(params, x, t, dtype=jnp.float32, implementation=None):
    return diffusion.apply(params, SMALL, x, t, dtype=dtype, implementation=implementation)


@functools.partial(jax.jit, static_argnames=("dtype", "implementation"))
def gradients(params, x, t, dtype, implementation):
    """Of mean(output^2) in layers, weight and bias as one: that of the key's bias alone is zero."""

    def loss(params, x, t):
        y = apply(params, x, t, dtype, implementation)
        return jnp.square(y.astype(t.dtype)).mean()

    by_params, by_x, by_t = jax.grad(loss, (0, 1, 2))(params, x, t)
    layers = {}
    for path, gradient in jax.tree.leaves_with_path(by_params):
        layers.setdefault(jax.tree_util.keystr(path[:-1]), []).append(gradient.ravel())
    layers = {name: jnp.concatenate(parts) for name, parts in layers.items()}
    return {**layers, "x": by_x, "t": by_t}


@functools.cache
def gradients_in_float64():
    with jax.enable_x64(True):
        given = jax.tree.map(lambda a: a.astype(jnp.float64), (parameters(), *example()))
        return jax.tree.map(np.asarray, gradients(*given, jnp.float64, softmax_attention))


def test_default_config_has_the_suite_parameter_count():
    params = jax.eval_shape(lambda: diffusion.init(jax.random.key(0), diffusion.Config()))
    assert sum(x.size for x in jax.tree.leaves(params)) == 5_817_896
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(jnp.float32)}


def test_model_starts_without_knowing_the_time():
    params, (x, t) = diffusion.init(jax.random.key(0), SMALL), example()
    assert (apply(params, x, t) == apply(params, x, t + 0.1)).all()
    gradient = gradients(params, x, t, jnp.float32, None)
    assert (gradient["['block_0']['norm_mlp_modulation']"] != 0).any()


def test_float64_output_is_the_formula():
    with jax.enable_x64(True):
        given = jax.tree.map(lambda a: a.astype(jnp.float64), (parameters(), *example()))
        output = apply(*given, jnp.float64, softmax_attention)
    assert output.dtype == np.float64
    assert relative_error(output, by_hand(parameters(), SMALL, *example())) < 1e-12


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_output_is_the_formula(dtype, implementation):
    output = apply(parameters(), *example(), dtype, implementation)
    plain = apply(parameters(), *example(), dtype, softmax_attention)
    assert output.dtype == dtype
    assert_within_budget("output", output, by_hand(parameters(), SMALL, *example()), plain)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gradients_are_those_of_the_formula(dtype, implementation):
    expected = gradients_in_float64()
    plain = gradients(parameters(), *example(), dtype, softmax_attention)
    ours = gradients(parameters(), *example(), dtype, implementation)
    assert len(expected) == 5 + 2 * (8 + 4) + 2
    # A rounding anywhere reaches the gradients of all layers before, small ones, too.
    largest = max(np.abs(gradient).max() for gradient in expected.values())
    inherent = float(jnp.finfo(dtype).eps) / 2 * largest
    for name, gradient in expected.items():
        assert_within_budget(name, ours[name], gradient, plain[name], inherent=inherent)


def test_sequences_of_a_batch_do_not_see_each_other():
    x, t = example()
    alone, together = apply(parameters(), x[1:], t[1:]), apply(parameters(), x, t)
    np.testing.assert_allclose(together[1:], alone, rtol=1e-5, atol=1e-5)


def test_wrong_arguments():
    params, (x, t) = parameters(), example()
    with pytest.raises(ValueError, match=r"x must have shape \(B, T, I\) with I=3, got \(2, 3\)"):
        diffusion.apply(params, SMALL, x[:, 0], t)
    with pytest.raises(ValueError, match=r"t must have shape \(B,\) with B=2, got \(1,\)"):
        diffusion.apply(params, SMALL, x, t[:1])
    with pytest.raises(TypeError, match="t must be floating, got int32"):
        diffusion.apply(params, SMALL, x, t.astype(jnp.int32))
    with pytest.raises(TypeError, match="dtype must be floating, got int8"):
        diffusion.apply(params, SMALL, x, t, dtype=jnp.int8)
    with pytest.raises(ValueError, match="implementation"):
        diffusion.apply(params, SMALL, x, t, implementation="fastest")
    with pytest.raises(ValueError, match="frequencies must be at least 1"):
        dataclasses.replace(SMALL, frequencies=0)
