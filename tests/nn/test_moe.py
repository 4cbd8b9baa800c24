"""The moe suite against its formula, evaluated in NumPy and float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.numerics import assert_within_budget
from tjk.nn import moe


@pytest.fixture(autouse=True)
def ieee_products():
    """float32 means float32, not TF32: in Triton, and on a GPU everywhere."""
    with jax.default_matmul_precision("highest"):
        yield


SMALL = moe.Config(d_model=24, d_hidden=40, experts=5, top_k=2)


@functools.cache
def parameters(config=SMALL):
    return moe.init(jax.random.key(0), config)


@functools.cache
def example(shape=(2, 7, 24)):
    """Numbers that bfloat16 can hold, so that every dtype has the same right result."""
    return jax.random.normal(jax.random.key(2), shape, jnp.bfloat16).astype(jnp.float32)


def activated(name, h):
    if name == "silu":
        return h / (1 + np.exp(-h))
    if name == "gelu":
        return h / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))
    return np.maximum(h, 0)


def by_hand(params, config, x):
    """The formula of the module's docstring, one token at a time, and the two losses."""
    router, gate, up, down = (
        np.asarray(params[name]["weight"], np.float64) for name in ("router", "gate", "up", "down")
    )
    tokens = np.asarray(x, np.float64).reshape(-1, config.d_model)
    y, chosen, shares, squares = np.zeros_like(tokens), [], [], []
    for m, token in enumerate(tokens):
        logits = token @ router
        experts = sorted(range(config.experts), key=lambda e: (-logits[e], e))[: config.top_k]
        weights = np.exp(logits[experts]) / np.exp(logits[experts]).sum()
        for weight, e in zip(weights, experts):
            hidden = activated(config.activation, token @ gate[e]) * (token @ up[e])
            y[m] += weight * (hidden @ down[e])
        chosen += experts
        shares.append(np.exp(logits) / np.exp(logits).sum())
        squares.append(np.log(np.exp(logits).sum()) ** 2)
    fraction = np.bincount(chosen, minlength=config.experts) / len(chosen)
    load_balance = config.experts * (fraction * np.mean(shares, axis=0)).sum()
    return y.reshape(x.shape), load_balance, np.mean(squares)


def textbook(x, w_gate, w_up, w_down, weights, experts):
    """Every expert on every token."""
    hidden = jax.nn.silu(jnp.einsum("md,edf->mef", x, w_gate))
    hidden *= jnp.einsum("md,edf->mef", x, w_up)
    outputs = jnp.einsum("mef,efd->med", hidden, w_down)
    chosen = jnp.take_along_axis(outputs, experts[:, :, None], axis=1)
    return jnp.einsum("mk,mkd->md", weights.astype(x.dtype), chosen)


@functools.partial(jax.jit, static_argnames=("config", "dtype", "implementation"))
def apply(params, x, config=SMALL, dtype=jnp.float32, implementation=None):
    return moe.apply(params, config, x, dtype=dtype, implementation=implementation)


@functools.partial(jax.jit, static_argnames=("dtype", "implementation"))
def gradients(params, x, dtype, implementation):
    """Of mean(output^2) and both losses together, by name."""

    def loss(params, x):
        y, losses = apply(params, x, dtype=dtype, implementation=implementation)
        y = y.astype(losses.router_z.dtype)
        return jnp.square(y).mean() + 0.1 * losses.load_balance + 0.01 * losses.router_z

    by_params, by_x = jax.grad(loss, (0, 1))(params, x)
    named = jax.tree.leaves_with_path({**by_params, "x": by_x})
    return {jax.tree_util.keystr(path): gradient for path, gradient in named}


@functools.cache
def gradients_in_float64():
    with jax.enable_x64(True):
        params, x = jax.tree.map(lambda a: a.astype(jnp.float64), (parameters(), example()))
        return jax.tree.map(np.asarray, gradients(params, x, jnp.float64, textbook))


def relative_error(x, expected):
    return np.abs(np.asarray(x).astype(np.float64) - expected).max() / np.abs(expected).max()


def chosen_experts(params, config, x, dtype):
    """The experts that `apply` hands to the expert layer."""
    given = []

    def layer(x, w_gate, w_up, w_down, weights, experts):
        given.append(np.asarray(experts))
        return x

    moe.apply(params, config, x, dtype=dtype, implementation=layer)
    return given[0]


def test_default_config_has_the_suite_parameter_count():
    params = jax.eval_shape(lambda: moe.init(jax.random.key(0), moe.Config()))
    assert sum(x.size for x in jax.tree.leaves(params)) == 12_587_008
    assert jax.tree.map(jnp.shape, params) == {
        "router": {"weight": (512, 8)},
        "gate": {"weight": (8, 512, 1024)},
        "up": {"weight": (8, 512, 1024)},
        "down": {"weight": (8, 1024, 512)},
    }
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(jnp.float32)}


def test_init_draws_every_weight_anew_by_its_inputs():
    config = moe.Config(d_model=256, d_hidden=384, experts=3, top_k=1)
    params = parameters(config)
    experts = [params[name]["weight"][e] for name in ("gate", "up", "down") for e in range(3)]
    matrices = [params["router"]["weight"], *experts]
    assert len({float(w[0, 0]) for w in matrices}) == 10
    for w in matrices:
        assert float(w.std()) == pytest.approx(w.shape[0] ** -0.5, rel=0.1)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"top_k": 1, "activation": "gelu"},
        {"top_k": 5, "activation": "relu"},
        {"experts": 1, "top_k": 1},
    ],
)
def test_float64_output_and_losses_are_the_formula(changes):
    config = dataclasses.replace(SMALL, **changes)
    with jax.enable_x64(True):
        params, x = jax.tree.map(lambda a: a.astype(jnp.float64), (parameters(config), example()))
        y, losses = apply(params, x, config, jnp.float64)
    expected = by_hand(parameters(config), config, example())
    assert y.dtype == np.float64
    for actual, right in zip((y, *losses), expected):
        assert relative_error(actual, right) < 1e-13


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_output_and_losses_are_the_formula(dtype, implementation):
    expected, *expected_losses = by_hand(parameters(), SMALL, example())
    y, losses = apply(parameters(), example(), dtype=dtype, implementation=implementation)
    plain, _ = apply(parameters(), example(), dtype=dtype, implementation=textbook)
    assert y.dtype == dtype
    assert_within_budget("output", y, expected, plain)
    for loss, right in zip(losses, expected_losses):
        assert loss.dtype == jnp.float32
        assert float(loss) == pytest.approx(right, rel=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gradients_are_those_of_the_formula(dtype, implementation):
    expected = gradients_in_float64()
    plain = gradients(parameters(), example(), dtype, textbook)
    ours = gradients(parameters(), example(), dtype, implementation)
    assert len(expected) == 5
    for name, gradient in expected.items():
        assert_within_budget(name, ours[name], gradient, plain[name])


def test_each_loss_is_the_routers_alone():
    def loss(params, name):
        return getattr(apply(params, example())[1], name)

    for name in moe.Losses._fields:
        gradient = jax.grad(loss)(parameters(), name)
        assert np.abs(gradient["router"]["weight"]).max() > 1e-3
        assert not any(np.any(gradient[expert]["weight"]) for expert in ("gate", "up", "down"))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_router_weights_are_not_rounded(dtype):
    """Logits of 1 and 1 + 2^-12: one number in bfloat16, and one in TF32."""
    config = moe.Config(d_model=1, d_hidden=1, experts=2, top_k=1)
    params = parameters(config) | {"router": {"weight": jnp.asarray([[1.0, 1 + 2.0**-12]])}}
    x = jnp.asarray([[1.0], [-1.0]])
    assert chosen_experts(params, config, x, dtype).tolist() == [[1], [0]]


def test_router_product_is_of_full_precision():
    with jax.default_matmul_precision("default"):
        program = str(jax.make_jaxpr(moe.router_logits)(parameters(), example()[0]))
    assert "HIGHEST" in program


def test_router_sees_the_tokens_as_the_experts_do():
    """1 + 2^-12 rounds to 1 in bfloat16, where the second expert is the first's equal."""
    config = moe.Config(d_model=2, d_hidden=1, experts=2, top_k=1)
    params = parameters(config) | {"router": {"weight": jnp.asarray([[1.0, 0], [0, 1]])}}
    x = jnp.asarray([[1.0, 1 + 2.0**-12]])
    assert chosen_experts(params, config, x, jnp.float32).tolist() == [[1]]
    assert chosen_experts(params, config, x, jnp.bfloat16).tolist() == [[0]]


def test_default_is_the_implementation_of_the_platform():
    default, _ = apply(parameters(), example())
    named, _ = apply(parameters(), example(), implementation="xla")
    assert (default == named).all()


@pytest.mark.parametrize("shape", [(24,), (14, 24), (1, 2, 7, 24)])
def test_leading_axes_are_tokens(shape):
    tokens = example()[0, :1] if len(shape) == 1 else example()
    x = tokens.reshape(shape)
    y, losses = apply(parameters(), x)
    expected, expected_losses = apply(parameters(), tokens)
    assert y.shape == shape
    np.testing.assert_array_equal(y.reshape(-1), expected.reshape(-1))
    np.testing.assert_array_equal(losses, expected_losses)


def test_no_tokens():
    y, losses = apply(parameters(), jnp.zeros((3, 0, 24)))
    assert y.shape == (3, 0, 24)
    assert [float(loss) for loss in losses] == [0, 0]


def test_tokens_do_not_see_each_other():
    alone, _ = apply(parameters(), example()[1:, :3])
    together, _ = apply(parameters(), example())
    np.testing.assert_allclose(together[1:, :3], alone, rtol=1e-5, atol=1e-6)


def test_one_trace_serves_jit_vmap_and_remat():
    x = example((3, 2, 5, 24))

    def model(x):
        y, losses = apply(parameters(), x)
        return jnp.append(y.reshape(-1), jnp.stack(losses))

    @jax.jit
    def gradient(x):
        return jax.grad(lambda x: jnp.sin(model(x)).sum())(x)

    expected = np.stack([model(part) for part in x])
    np.testing.assert_allclose(jax.vmap(model)(x), expected, rtol=2e-5, atol=2e-5)
    expected = np.stack([gradient(part) for part in x])
    mapped = jax.jit(jax.vmap(jax.checkpoint(gradient)))
    np.testing.assert_allclose(mapped(x), expected, rtol=2e-5, atol=2e-5)


def test_wrong_arguments():
    params, x = parameters(), example()
    with pytest.raises(ValueError, match=r"x must have shape \(\.\.\., D\) with D=24, got \(2, 7"):
        moe.apply(params, SMALL, x[..., 1:])
    with pytest.raises(ValueError, match=r"with D=24, got \(\)"):
        moe.apply(params, SMALL, x[0, 0, 0])
    with pytest.raises(TypeError, match="x must be floating, got int32"):
        moe.apply(params, SMALL, x.astype(jnp.int32))
    with pytest.raises(TypeError, match="dtype must be floating, got int8"):
        moe.apply(params, SMALL, x, dtype=jnp.int8)
    with pytest.raises(ValueError, match="implementation must be None, 'triton' or 'xla'"):
        moe.apply(params, SMALL, x, implementation="fastest")


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"top_k": 6}, "top_k must be at most experts"),
        ({"top_k": 0}, "top_k must be at least 1"),
        ({"d_hidden": -1}, "d_hidden must be at least 1"),
        ({"activation": "tanh"}, "activation must be 'silu', 'gelu' or 'relu'"),
    ],
)
def test_wrong_config(change, rule):
    with pytest.raises(ValueError, match=rule):
        dataclasses.replace(SMALL, **change)
