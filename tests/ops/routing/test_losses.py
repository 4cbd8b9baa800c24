"""The router's losses against their formulas in NumPy, with gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.numerics import assert_within_budget
from tjk import ops

load_balance_loss, router_z_loss = jax.jit(ops.load_balance_loss), jax.jit(ops.router_z_loss)


def inputs(M, E, k, dtype="float32"):
    """Logits, and experts of which some are out of range."""
    rng = np.random.default_rng(0)
    logits = jnp.asarray(2 * rng.standard_normal((M, E)), dtype)
    return logits, rng.integers(-1, E + 1, (M, k), dtype=np.int32)


def softmax(x):
    shares = np.exp(x - x.max(1, keepdims=True))
    return shares / shares.sum(1, keepdims=True)


def balance(x, experts):
    """The loss and its gradient; who is out of range is an assignment, but to no expert."""
    M, E = x.shape
    f = np.array([(experts == e).sum() for e in range(E)], x.dtype) / x.dtype.type(experts.size)
    p = softmax(x)
    return E * (f @ p.mean(0)), E / M * p * (f - (p @ f)[:, None])


def z_loss(x):
    """The loss and its gradient."""
    peak = x.max(1)
    z = peak + np.log(np.exp(x - peak[:, None]).sum(1))
    return (z**2).mean(), 2 / len(x) * z[:, None] * softmax(x)


def check(loss, formula, logits):
    """Fails unless value and gradient are within the budget of the formula in float32."""
    actual = jax.jit(jax.value_and_grad(loss))(logits)
    assert (actual[0].shape, actual[0].dtype) == ((), jnp.float32)
    assert actual[1].dtype == logits.dtype
    exact, plain = (formula(np.asarray(logits, dtype)) for dtype in ("float64", "float32"))
    for name, ours, right, near in zip(("loss", "d_logits"), actual, exact, plain):
        # Sums of M and of E terms in another order than NumPy's: a few roundings for each.
        inherent = 4 * float(jnp.finfo(jnp.float32).eps) * np.abs(right).max()
        near = jnp.asarray(near, ours.dtype)
        assert_within_budget(name, ours, np.asarray(right), near, inherent=inherent)


CASES = [
    (1, 1, 1, "float32"),
    (7, 5, 2, "float32"),
    (130, 33, 3, "float32"),
    (64, 8, 8, "bfloat16"),
    (64, 8, 2, "float16"),
]


@pytest.mark.parametrize(("M", "E", "k", "dtype"), CASES)
def test_load_balance(M, E, k, dtype):
    logits, experts = inputs(M, E, k, dtype)
    check(
        functools.partial(load_balance_loss, experts=experts),
        functools.partial(balance, experts=experts),
        logits,
    )


@pytest.mark.parametrize(("M", "E", "k", "dtype"), CASES)
def test_router_z(M, E, k, dtype):
    check(router_z_loss, z_loss, inputs(M, E, k, dtype)[0])


@pytest.mark.parametrize("k", [1, 2, 4])
def test_balanced_load_is_1(k):
    """Whatever k is, and whatever the logits are, so long as each expert is taken as often."""
    logits, _ = inputs(8, 4, k)
    experts = jnp.asarray((np.arange(8)[:, None] + np.arange(k)) % 4, jnp.int32)
    assert float(load_balance_loss(logits, experts)) == pytest.approx(1, rel=1e-6)


def test_all_to_one_is_the_number_of_experts():
    logits = 1e3 * (np.arange(5, dtype=np.float32) == 3)[None].repeat(6, axis=0)
    experts = jnp.full((6, 2), 3, jnp.int32)
    assert float(load_balance_loss(logits, experts)) == 5


def test_load_balance_falls_along_its_gradient():
    logits, _ = inputs(64, 8, 1)

    @jax.jit
    def loss(logits):
        return load_balance_loss(logits, ops.route_top_k(logits, 2)[1])

    before, gradient = jax.jit(jax.value_and_grad(loss))(logits)
    assert float(loss(logits - 10 * gradient)) < float(before)


def test_z_of_equal_logits():
    assert float(router_z_loss(jnp.full((3, 4), 2.0))) == pytest.approx((2 + np.log(4)) ** 2)


def test_large_logits():
    logits = jnp.array([[1e4, 0.0], [-1e4, -1e4]])
    exact = z_loss(np.asarray(logits, np.float64))[0]
    assert float(router_z_loss(logits)) == pytest.approx(exact, rel=1e-6)


def test_no_tokens():
    logits, experts = jnp.zeros((0, 4)), jnp.zeros((0, 2), jnp.int32)
    assert float(load_balance_loss(logits, experts)) == 0
    assert float(router_z_loss(logits)) == 0


def test_float64():
    with jax.enable_x64(True):
        logits, experts = inputs(7, 5, 2, "float64")
        for actual, exact in (
            (load_balance_loss(logits, experts), balance(np.asarray(logits), experts)[0]),
            (router_z_loss(logits), z_loss(np.asarray(logits))[0]),
        ):
            assert actual.dtype == jnp.float64
            np.testing.assert_allclose(actual, exact, rtol=1e-13)
        assert load_balance_loss(jnp.float32(logits), experts).dtype == jnp.float32
        assert router_z_loss(jnp.bfloat16(logits)).dtype == jnp.float32


def test_vmap():
    logits, experts = inputs(14, 5, 2)
    logits, experts = logits.reshape(2, 7, 5), jnp.asarray(experts.reshape(2, 7, 2))
    for loss, arguments in ((load_balance_loss, (logits, experts)), (router_z_loss, (logits,))):
        expected = [loss(*(x[i] for x in arguments)) for i in range(2)]
        np.testing.assert_allclose(jax.jit(jax.vmap(loss))(*arguments), expected, rtol=1e-6)
