"""The transformer suite against its formula, evaluated in NumPy and float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.nn.by_hand import disturbed, float64, normalized, relative_error, transformer_block
from tests.numerics import assert_within_budget
from tjk.nn import transformer
from tjk.nn.layers import init_layer_norm, init_linear, layer_norm, linear


@pytest.fixture(autouse=True)
def ieee_products():
    """float32 means float32, not TF32: in Triton, and on a GPU everywhere."""
    with jax.default_matmul_precision("highest"):
        yield


SMALL = transformer.Config(width=24, heads=2, blocks=2, mlp_width=40)


def perturbed(config):
    """Parameters in which no bias is zero and no scale one, so that each of them shows."""
    return disturbed(transformer.init(jax.random.key(0), config), 0.3)


def example(shape=(2, 7, 24), seed=2):
    return jax.random.normal(jax.random.key(seed), shape)


def by_hand(params, config, x):
    """The formula of the module's docstring."""
    x = np.asarray(x, np.float64)
    for p in float64(params).values():
        x = transformer_block(p, config, x)
    return x


def softmax_attention(query, key, value):
    logits = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(logits, axis=-1), value)


@functools.partial(jax.jit, static_argnames=("dtype", "implementation"))
def apply(params, x, dtype=jnp.float32, implementation=None):
    return transformer.apply(params, SMALL, x, dtype=dtype, implementation=implementation)


@functools.partial(jax.jit, static_argnames=("dtype", "implementation"))
def gradients(params, x, dtype, implementation):
    """Of mean(output^2), by name; the key's weight and bias as one, since the bias's is zero."""

    def loss(params, x):
        y = apply(params, x, dtype, implementation)
        return jnp.square(y.astype(jnp.float64 if dtype == jnp.float64 else jnp.float32)).mean()

    by_params, by_x = jax.grad(loss, (0, 1))(params, x)
    for block in by_params.values():
        block["key"] = jnp.concatenate([block["key"]["weight"].ravel(), block["key"]["bias"]])
    named = jax.tree.leaves_with_path({**by_params, "x": by_x})
    return {jax.tree_util.keystr(path): gradient for path, gradient in named}


def in_float64(function, params, x, implementation=softmax_attention):
    with jax.enable_x64(True):
        params, x = jax.tree.map(lambda a: a.astype(jnp.float64), (params, x))
        return jax.tree.map(np.asarray, function(params, x, jnp.float64, implementation))


def test_default_config_has_the_suite_parameter_count():
    params = jax.eval_shape(lambda: transformer.init(jax.random.key(0), transformer.Config()))
    assert sum(x.size for x in jax.tree.leaves(params)) == 3_159_040
    assert sum(x.size for x in jax.tree.leaves(params["block_3"])) == 789_760
    assert len(params) == 4
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(jnp.float32)}


def test_init_draws_every_weight_anew():
    params = transformer.init(jax.random.key(0), SMALL)
    weights = [x for x in jax.tree.leaves(params) if x.ndim == 2]
    assert len(weights) == 12
    first_numbers = {float(w[0, 0]) for w in weights}
    assert len(first_numbers) == 12
    deviation = float(params["block_0"]["mlp_out"]["weight"].std())
    assert deviation == pytest.approx(40**-0.5, rel=0.1)


def test_float64_output_is_the_formula():
    params, x = perturbed(SMALL), example()
    output = in_float64(apply, params, x)
    assert output.dtype == np.float64
    assert relative_error(output, by_hand(params, SMALL, x)) < 1e-13


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_output_is_the_formula(dtype, implementation):
    params, x = perturbed(SMALL), example()
    output = apply(params, x, dtype, implementation)
    plain = apply(params, x, dtype, softmax_attention)
    assert output.dtype == dtype
    assert_within_budget("output", output, by_hand(params, SMALL, x), plain)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gradients_are_those_of_the_formula(dtype, implementation):
    params, x = perturbed(SMALL), example()
    expected = in_float64(gradients, params, x)
    plain = gradients(params, x, dtype, softmax_attention)
    ours = gradients(params, x, dtype, implementation)
    assert len(expected) == 2 * 15 + 1
    one_rounding = float(jnp.finfo(dtype).eps) / 2  # of the products; the gradients are float32
    for name, gradient in expected.items():
        assert_within_budget(name, ours[name], gradient, plain[name], inherent=one_rounding)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_baseline_is_plain_attention(dtype):
    params, x = perturbed(SMALL), example()
    plain = apply(params, x, dtype, softmax_attention)
    with jax.numpy_dtype_promotion("standard"):  # jax's own attention promotes in bfloat16
        baseline = apply(params, x, dtype, "jax_xla")
    assert_within_budget("output", baseline, by_hand(params, SMALL, x), plain)


def test_default_is_the_implementation_of_the_platform():
    params, x = perturbed(SMALL), example()
    default, named = apply(params, x), apply(params, x, implementation="xla")
    assert (default == named).all()


def test_one_trace_serves_jit_vmap_and_remat():
    params, x = perturbed(SMALL), example((3, 2, 5, 24))

    def model(x):
        return apply(params, x)

    expected = np.stack([model(part) for part in x])
    for function in (jax.vmap(model), jax.jit(jax.vmap(jax.checkpoint(model)))):
        np.testing.assert_allclose(function(x), expected, rtol=2e-5, atol=2e-5)


def test_sequences_of_a_batch_do_not_see_each_other():
    params, x = perturbed(SMALL), example()
    alone, together = apply(params, x[1:]), apply(params, x)
    np.testing.assert_allclose(together[1:], alone, rtol=1e-5, atol=1e-5)


def test_layer_norm_keeps_statistics_in_float32():
    x = (100 + example((4, 256))).astype(jnp.bfloat16)
    params = init_layer_norm(256)
    expected = normalized(
        {"scale": 1.0, "bias": 0.0}, np.asarray(x).astype(np.float64), epsilon=1e-6
    )
    output = layer_norm(params, x, epsilon=1e-6)
    assert output.dtype == jnp.bfloat16
    assert relative_error(output, expected) < 2**-8


def test_gradient_of_a_bias_adds_up_in_float32():
    x = example((4096, 8)).astype(jnp.bfloat16)
    weights = (1 + example((4096, 8), seed=3)).astype(jnp.bfloat16)

    def total(params):
        return (linear(params, x) * weights).astype(jnp.float32).sum()

    gradient = jax.jit(jax.grad(total))(init_linear(jax.random.key(0), 8, 8))["bias"]
    expected = np.asarray(weights).astype(np.float64).sum(0)
    assert relative_error(gradient, expected) < 1e-5


def test_wrong_arguments():
    params, x = transformer.init(jax.random.key(0), SMALL), example()
    with pytest.raises(ValueError, match=r"x must have shape \(B, T, D\) with D=24, got \(2, 24\)"):
        transformer.apply(params, SMALL, x[:, 0])
    with pytest.raises(ValueError, match=r"with D=24, got \(2, 7, 23\)"):
        transformer.apply(params, SMALL, x[..., 1:])
    with pytest.raises(TypeError, match="x must be floating, got int32"):
        transformer.apply(params, SMALL, x.astype(jnp.int32))
    with pytest.raises(TypeError, match="dtype must be floating, got int8"):
        transformer.apply(params, SMALL, x, dtype=jnp.int8)
    with pytest.raises(ValueError, match="implementation"):
        transformer.apply(params, SMALL, x, implementation="fastest")
    with pytest.raises(TypeError, match=r"'jax_cudnn'.*bfloat16 or float16, got float32"):
        transformer.apply(params, SMALL, x, implementation="jax_cudnn")


@pytest.mark.parametrize(
    ("change", "rule"),
    [({"heads": 5}, "heads must divide width"), ({"blocks": 0}, "blocks must be at least 1")],
)
def test_wrong_config(change, rule):
    with pytest.raises(ValueError, match=rule):
        dataclasses.replace(SMALL, **change)
