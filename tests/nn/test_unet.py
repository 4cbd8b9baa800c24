"""The unet suite against its formula, evaluated in NumPy and float64."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.suites.unet import group_norm
from tests.nn.by_hand import disturbed, float64, relative_error, silu
from tests.numerics import assert_within_budget
from tjk.nn import unet


@pytest.fixture(autouse=True)
def ieee_products():
    """float32 means float32, not TF32: on a GPU convolutions, too."""
    with jax.default_matmul_precision("highest"):
        yield


SMALL = {
    kernel: unet.Config(features=2, widths=(4, 8), kernel=kernel, groups=2, epsilon=1e-3)
    for kernel in ((3, 3), (1, 3), (3,))
}
SHAPES = {(3, 3): (2, 4, 6, 2), (1, 3): (2, 3, 6, 2), (3,): (2, 6, 2)}


@functools.cache
def parameters(kernel):
    return disturbed(unet.init(jax.random.key(0), SMALL[kernel]), 0.1)


def example(kernel):
    """Images that bfloat16 can hold."""
    x = jax.random.normal(jax.random.key(2), SHAPES[kernel], jnp.bfloat16)
    return x.astype(jnp.float32)


def slid(p, padded, sizes, strides):
    """The kernel at each place of a padded image, one after the other."""
    weight = p["weight"]
    y = np.zeros((len(padded), *sizes, weight.shape[-1]))
    for at in itertools.product(*map(range, sizes)):
        window = (slice(i * s, i * s + k) for i, s, k in zip(at, strides, weight.shape))
        patch = padded[(slice(None), *window)]  # (B, *kernel, I)
        axes = range(1, patch.ndim), range(weight.ndim - 1)
        y[(slice(None), *at)] = np.tensordot(patch, weight, axes)
    return y + p.get("bias", 0)


def conv(p, x, strides=None):
    spatial, kernel = x.shape[1:-1], p["weight"].shape[:-2]
    strides = strides or (1,) * len(spatial)
    around = [((k - 1) // 2, (k - 1) // 2) for k in kernel]
    sizes = [size // s for size, s in zip(spatial, strides)]
    return slid(p, np.pad(x, [(0, 0), *around, (0, 0)]), sizes, strides)


def conv_transposed(p, x, strides):
    """A convolution of the image with a zero behind each pixel along a doubled axis."""
    sizes = [size * s for size, s in zip(x.shape[1:-1], strides)]
    spread = np.zeros((len(x), *sizes, x.shape[-1]))
    spread[(slice(None), *(slice(None, None, s) for s in strides))] = x
    around = [(2, 1) if s == 2 else (0, 0) for s in strides]
    return slid(p, np.pad(spread, [(0, 0), *around, (0, 0)]), sizes, (1,) * len(sizes))


def normalized(p, x, groups, epsilon):
    y = x.reshape(len(x), -1, groups, x.shape[-1] // groups)
    y = y - y.mean((1, 3), keepdims=True)
    y = y / np.sqrt((y**2).mean((1, 3), keepdims=True) + epsilon)
    return silu(y.reshape(x.shape) * p["scale"] + p["bias"])


def by_hand(params, config, x):
    """Two levels, written out."""
    p, x = float64(params), np.asarray(x, np.float64)

    def block(name, x):
        q = p[name]
        h = conv(q["conv_in"], normalized(q["norm_in"], x, config.groups, config.epsilon))
        h = conv(q["conv_out"], normalized(q["norm_out"], h, config.groups, config.epsilon))
        return conv(q["skip"], x) + h

    first = conv(p["in"], x)
    fine = block("down_0", first)
    coarse = block("down_1", conv(p["coarsen_0"], fine, config.strides))
    h = block("middle_1", block("middle_0", coarse))
    h = block("up_1", np.concatenate([h, coarse], -1))
    h = conv_transposed(p["refine_0"], h, config.strides)
    h = block("up_0", np.concatenate([h, fine], -1))
    return conv(p["out"], np.concatenate([first, h], -1))


@functools.partial(jax.jit, static_argnames=("kernel", "dtype", "implementation"))
def apply(params, x, kernel=(3, 3), dtype=jnp.float32, implementation=None):
    return unet.apply(params, SMALL[kernel], x, dtype=dtype, implementation=implementation)


@functools.partial(jax.jit, static_argnames=("kernel", "dtype", "implementation"))
def gradients(params, x, kernel, dtype, implementation):
    """Of mean(output^2), by name."""

    def loss(params, x):
        y = apply(params, x, kernel, dtype, implementation)
        return jnp.square(y.astype(x.dtype)).mean()

    by_params, by_x = jax.grad(loss, (0, 1))(params, x)
    named = jax.tree.leaves_with_path({**by_params, "x": by_x})
    return {jax.tree_util.keystr(path): gradient for path, gradient in named}


def in_float64(function, kernel):
    with jax.enable_x64(True):
        given = jax.tree.map(lambda a: a.astype(jnp.float64), (parameters(kernel), example(kernel)))
        return jax.tree.map(np.asarray, function(*given, kernel, jnp.float64, group_norm))


@pytest.mark.parametrize(("kernel", "count"), [((1, 3), 2_803_968), ((3, 3), 7_940_352)])
def test_config_has_the_suite_parameter_count(kernel, count):
    config = unet.Config(kernel=kernel)
    params = jax.eval_shape(lambda: unet.init(jax.random.key(0), config))
    assert sum(x.size for x in jax.tree.leaves(params)) == count
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(jnp.float32)}
    assert unet.Config().kernel == (3, 3)


@pytest.mark.parametrize("kernel", SMALL)
def test_float64_output_is_the_formula(kernel):
    output = in_float64(apply, kernel)
    assert output.dtype == np.float64
    assert (
        relative_error(output, by_hand(parameters(kernel), SMALL[kernel], example(kernel))) < 1e-13
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_output_and_gradients_are_those_of_the_formula(dtype, implementation):
    kernel = (1, 3)
    given = (parameters(kernel), example(kernel), kernel, dtype)
    output, plain = apply(*given, implementation), apply(*given, group_norm)
    assert output.dtype == dtype
    assert_within_budget("output", output, in_float64(apply, kernel), plain)

    expected = in_float64(gradients, kernel)
    ours, plain = gradients(*given, implementation), gradients(*given, group_norm)
    # A rounding anywhere reaches the gradients of all layers before, small ones, too.
    largest = max(np.abs(gradient).max() for gradient in expected.values())
    inherent = float(jnp.finfo(dtype).eps) / 2 * largest
    for name, gradient in expected.items():
        assert_within_budget(name, ours[name], gradient, plain[name], inherent=inherent)


def test_block_starts_as_the_identity():
    config = SMALL[1, 3]
    params = unet.init(jax.random.key(0), config)
    x = jax.random.normal(jax.random.key(2), (2, 3, 6, 4))
    y = unet._block(config, group_norm, params["down_0"], x)
    np.testing.assert_array_equal(y, x)


def test_images_of_a_batch_do_not_see_each_other():
    params, x = parameters((3, 3)), example((3, 3))
    alone, together = apply(params, x[1:]), apply(params, x)
    np.testing.assert_allclose(together[1:], alone, rtol=1e-5, atol=1e-5)


def test_wrong_arguments():
    config, params, x = SMALL[3, 3], parameters((3, 3)), example((3, 3))
    with pytest.raises(ValueError, match=r"shape \(B, H, W, I\) with I=2, got \(2, 6, 2\)"):
        unet.apply(params, config, x[:, 0])
    with pytest.raises(ValueError, match=r"with I=2, got \(2, 4, 6, 1\)"):
        unet.apply(params, config, x[..., 1:])
    with pytest.raises(ValueError, match=r"multiples of \(2, 2\), got \(2, 4, 5, 2\)"):
        unet.apply(params, config, x[:, :, 1:])
    with pytest.raises(TypeError, match="x must be floating, got int32"):
        unet.apply(params, config, x.astype(jnp.int32))
    with pytest.raises(TypeError, match="dtype must be floating, got int8"):
        unet.apply(params, config, x, dtype=jnp.int8)
    with pytest.raises(ValueError, match="implementation"):
        unet.apply(params, config, x, implementation="fastest")


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"groups": 3}, "groups must divide every width"),
        ({"kernel": (2, 3)}, "one to three odd numbers"),
        ({"kernel": ()}, "one to three odd numbers"),
        ({"widths": ()}, "at least 1"),
        ({"features": 0}, "at least 1"),
    ],
)
def test_wrong_config(change, rule):
    with pytest.raises(ValueError, match=rule):
        dataclasses.replace(SMALL[1, 3], **change)
