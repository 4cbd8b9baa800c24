"""The ssm suite against its formulas, evaluated in NumPy and float64, one position at a time."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.suites.ssm import DEFINITION
from tests.nn.by_hand import affine, disturbed, gelu, normalized, sigmoid, silu, softplus
from tests.numerics import assert_within_budget
from tjk.nn import ssm
from tjk.nn.cells import CELLS
from tjk.nn.layers import at_least_float32


@pytest.fixture(autouse=True)
def ieee_products():
    """float32 means float32, not TF32: in Triton, and on a GPU everywhere."""
    with jax.default_matmul_precision("highest"):
        yield


SIZES = {"lru": 995_728, "mamba": 930_704, "ssd": 863_644, "mamba2": 1_136_064, "gdn": 1_006_144}
HEADS = {"lru": None, "mamba": None, "ssd": 8, "mamba2": 8, "gdn": 4}
SMALL = {
    cell: ssm.Config(
        cell,
        features=3,
        width=8,
        layers=2,
        mlp_width=12,
        state=None if cell in ("ssd", "gdn") else 5,
        head_width=HEADS[cell],
        epsilon=1e-3,
    )
    for cell in CELLS
}


@functools.cache
def parameters(cell):
    """Every parameter random, so that none is without effect."""
    return disturbed(ssm.init(jax.random.key(0), SMALL[cell]), 0.1)


@functools.cache
def example(shape=(2, 7, 3)):
    """Numbers that bfloat16 can hold, so that every dtype has the same right result."""
    return jax.random.normal(jax.random.key(2), shape, jnp.bfloat16).astype(jnp.float32)


def rms(p, x, epsilon):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * p["scale"]


def convolved(p, x):
    """(L, D): each position from itself and the three before."""
    W = p["weight"].shape[1]
    padded = np.concatenate((np.zeros((W - 1, x.shape[1])), x))
    return silu(sum(padded[j : j + len(x)] * p["weight"][:, j] for j in range(W)) + p["bias"])


def lru(p, config, x):
    decay = np.exp(-np.exp(p["nu"]) + 1j * np.exp(p["theta"]))
    h, y = np.zeros(len(decay), complex), []
    for now in x:
        h = decay * h + np.exp(p["gamma"]) * (now @ (p["B"]["real"] + 1j * p["B"]["imag"]))
        y.append((h @ (p["C"]["real"] + 1j * p["C"]["imag"])).real + now @ p["D"]["weight"])
    return np.stack(y)


def mamba(p, config, x):
    B, C, delta = (affine(p[name], x) for name in ("B", "C", "delta"))
    h, y = np.zeros(p["A_log"].shape), []
    for t, step in enumerate(softplus(delta)):
        h = np.exp(-step[:, None] * np.exp(p["A_log"])) * h + (step * x[t])[:, None] * B[t]
        y.append(h @ C[t] + p["D"] * x[t])
    return np.stack(y)


def by_heads(p, x, dt, B, C):
    """x (L, H, P), dt (L, H), B and C (L, R)."""
    steps = softplus(dt + p["dt_bias"])
    h, y = np.zeros((*x.shape[1:], B.shape[1])), []
    for t, step in enumerate(steps):
        h = np.exp(-step * np.exp(p["A_log"]))[:, None, None] * h
        h = h + (step[:, None] * x[t])[:, :, None] * B[t]
        y.append(h @ C[t] + p["D"][:, None] * x[t])
    return np.stack(y)


def ssd(p, config, x):
    C, B, value, dt = (affine(p[name], x) for name in ("query", "key", "value", "dt"))
    return by_heads(p, value.reshape(len(x), config.heads, -1), dt, B, C).reshape(x.shape)


def mamba2(p, config, x):
    z, dt = affine(p["z"], x), affine(p["dt"], x)
    inner, B, C = (convolved(p[f"conv_{name}"], affine(p[name], x)) for name in "xBC")
    y = by_heads(p, inner.reshape(len(x), config.heads, -1), dt, B, C).reshape(z.shape)
    return affine(p["out"], rms(p["norm"], y * silu(z), config.epsilon))


def gdn(p, config, x):
    heads = (len(x), config.heads, -1)
    q, k, v = (
        convolved(p[f"conv_{name}"], affine(p[name], x)).reshape(heads)
        for name in ("query", "key", "value")
    )
    q, k = (a / np.sqrt((a**2).sum(-1, keepdims=True) + 1e-6) for a in (q, k))
    decay = np.exp(-np.exp(p["A_log"]) * softplus(affine(p["decay"], x) + p["dt_bias"]))
    beta = sigmoid(affine(p["beta"], x) + p["beta_bias"])
    y = np.zeros_like(v)
    for head in range(config.heads):
        S = np.zeros((v.shape[-1], k.shape[-1]))
        for t in range(len(x)):
            key, b = k[t, head], beta[t, head]
            S = decay[t, head] * (S - b * np.outer(S @ key, key)) + b * np.outer(v[t, head], key)
            y[t, head] = S @ q[t, head] / np.sqrt(len(key))
    y = rms(p["norm"], y, config.epsilon) * silu(affine(p["gate"], x).reshape(heads))
    return affine(p["out"], y.reshape(x.shape))


@functools.cache
def by_hand(cell):
    """The formula of the module's docstring, a sequence at a time."""
    function = {"lru": lru, "mamba": mamba, "ssd": ssd, "mamba2": mamba2, "gdn": gdn}[cell]
    config = SMALL[cell]
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), parameters(cell))
    outputs = []
    for h in np.asarray(example(), np.float64):
        h = affine(params["in"], h)
        for i in range(config.layers):
            p, turn = params[f"layer_{i}"], slice(None, None, -1 if i % 2 else 1)
            n = normalized(p["norm"], h, config.epsilon)
            n = normalized(p["norm_cell"], n, config.epsilon)
            c = gelu(function(p["cell"], config, n[turn])[turn])
            h = h + affine(p["value"], c) * sigmoid(affine(p["gate"], c))
            n = normalized(p["norm_mlp"], h, config.epsilon)
            h = h + gelu(affine(p["mlp_out"], gelu(affine(p["mlp_in"], n))))
        h = normalized(params["norm"], h, config.epsilon)
        outputs.append(affine(params["out"], h))
    return np.stack(outputs)


@functools.partial(jax.jit, static_argnames=("cell", "dtype", "implementation"))
def apply(params, x, cell, dtype=jnp.float32, implementation=None):
    return ssm.apply(params, SMALL[cell], x, dtype=dtype, implementation=implementation)


@functools.partial(jax.jit, static_argnames=("cell", "dtype", "implementation"))
def gradients(params, x, cell, dtype, implementation):
    """Of mean(output^2), by name."""

    def loss(params, x):
        y = apply(params, x, cell, dtype=dtype, implementation=implementation)
        return jnp.square(at_least_float32(y)).mean()

    by_params, by_x = jax.grad(loss, (0, 1))(params, x)
    named = jax.tree.leaves_with_path({**by_params, "x": by_x})
    return {jax.tree_util.keystr(path): gradient for path, gradient in named}


@functools.cache
def gradients_in_float64(cell):
    with jax.enable_x64(True):
        params, x = jax.tree.map(lambda a: a.astype(jnp.float64), (parameters(cell), example()))
        return jax.tree.map(np.asarray, gradients(params, x, cell, jnp.float64, DEFINITION))


@pytest.mark.parametrize("cell", CELLS)
def test_default_config_has_the_suite_parameter_count(cell):
    with jax.enable_x64(True):  # float32 nevertheless
        params = jax.eval_shape(lambda: ssm.init(jax.random.key(0), ssm.Config(cell)))
    assert sum(x.size for x in jax.tree.leaves(params)) == SIZES[cell]
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(jnp.float32)}


def test_decays_and_steps_start_in_their_ranges():
    params = ssm.init(jax.random.key(0), ssm.Config("lru", layers=1))["layer_0"]["cell"]
    size = np.exp(-np.exp(params["nu"]))
    assert 0.9 <= size.min() < 0.93
    assert 0.98 < size.max() <= 0.999
    np.testing.assert_allclose(np.exp(params["gamma"]), np.sqrt(1 - size**2), rtol=1e-3)
    assert 0 < np.exp(params["theta"]).min() < np.exp(params["theta"]).max() <= np.pi / 10
    params = ssm.init(jax.random.key(0), ssm.Config("mamba", layers=1))["layer_0"]["cell"]
    step = softplus(np.asarray(params["delta"]["bias"], np.float64))
    assert 0.00099 < step.min() < 0.002
    assert 0.05 < step.max() < 0.101
    np.testing.assert_allclose(np.exp(params["A_log"][7]), np.arange(1, 129), rtol=1e-6)


@pytest.mark.parametrize("cell", CELLS)
def test_float64_output_is_the_formula(cell):
    with jax.enable_x64(True):
        params, x = jax.tree.map(lambda a: a.astype(jnp.float64), (parameters(cell), example()))
        for implementation in (DEFINITION, None):
            y = apply(params, x, cell, jnp.float64, implementation)
            assert y.dtype == np.float64
            np.testing.assert_allclose(y, by_hand(cell), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("cell", CELLS)
def test_gradients_are_those_of_the_formula(cell):
    """In every implementation and dtype they are so operation by operation: see tests/ops."""
    expected = gradients_in_float64(cell)
    plain = gradients(parameters(cell), example(), cell, jnp.float32, DEFINITION)
    ours = gradients(parameters(cell), example(), cell, jnp.float32, None)
    # A rounding anywhere reaches the gradients of all layers before, small ones, too.
    inherent = 2.0**-22 * max(np.abs(gradient).max() for gradient in expected.values())
    for name, gradient in expected.items():
        assert_within_budget(name, ours[name], gradient, plain[name], inherent=inherent)


def test_remat_changes_no_gradient():
    params, config, x = parameters("gdn"), SMALL["gdn"], example()

    def gradient(remat):
        def loss(params):
            return jnp.sum(jnp.sin(ssm.apply(params, config, x, remat=remat)))

        return jax.tree.leaves(jax.jit(jax.grad(loss))(params))

    for ours, expected in zip(gradient(True), gradient(False), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cell", CELLS)
def test_output_is_the_formula(cell):
    """In Triton: that of XLA is in the tests above."""
    dtype = jnp.float16 if cell in ("mamba", "ssd") else jnp.float32
    y = apply(parameters(cell), example(), cell, dtype, "triton")
    plain = apply(parameters(cell), example(), cell, dtype, DEFINITION)
    assert y.dtype == dtype
    assert_within_budget("output", y, by_hand(cell), plain)


def test_default_is_the_implementation_of_the_platform():
    default = apply(parameters("mamba2"), example(), "mamba2")
    named = apply(parameters("mamba2"), example(), "mamba2", implementation="xla")
    assert (default == named).all()


@pytest.mark.parametrize("shape", [(0, 7, 3), (1, 1, 3)])
@pytest.mark.parametrize("cell", CELLS)
def test_few_positions(cell, shape):
    y = ssm.apply(parameters(cell), SMALL[cell], jnp.ones(shape))
    assert y.shape == shape
    assert jnp.isfinite(y).all()


@pytest.mark.parametrize("cell", ["mamba"])
def test_one_trace_serves_jit_vmap_and_remat(cell):
    x = jnp.stack([example(), example()[::-1] / 2])

    @jax.jit
    def gradient(x):
        return jax.grad(lambda x: jnp.sin(apply(parameters(cell), x, cell)).sum())(x)

    expected = np.stack([gradient(part) for part in x])
    mapped = jax.jit(jax.vmap(jax.checkpoint(gradient)))
    np.testing.assert_allclose(mapped(x), expected, rtol=2e-5, atol=2e-5)


def test_wrong_arguments():
    params, config, x = parameters("ssd"), SMALL["ssd"], example()
    with pytest.raises(ValueError, match=r"x must have shape \(B, L, I\) with I=3, got \(2, 7, 2"):
        ssm.apply(params, config, x[..., 1:])
    with pytest.raises(TypeError, match="x must be floating, got int32"):
        ssm.apply(params, config, x.astype(jnp.int32))
    with pytest.raises(TypeError, match="dtype must be floating, got int8"):
        ssm.apply(params, config, x, dtype=jnp.int8)
    with pytest.raises(ValueError, match="implementation must be None, 'triton' or 'xla'"):
        ssm.apply(params, config, x, implementation="fastest")


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"cell": "mamba3"}, "cell must be one of lru, mamba, ssd, mamba2, gdn"),
        ({"state": 0}, "state must be at least 1"),
        ({"layers": 0}, "layers must be at least 1"),
        ({"head_width": 7}, "head_width must divide what is cut in heads"),
    ],
)
def test_wrong_config(change, rule):
    with pytest.raises(ValueError, match=rule):
        dataclasses.replace(SMALL["mamba2"], **change)
