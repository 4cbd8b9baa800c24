"""Bias, mask, segments, soft cap, dropout and sinks of flash_attention, alone and in pairs."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.ops.attention.oracle import Shape, check
from tjk.ops import flash_attention

SHAPE = Shape(B=2, T=45, S=70, N=4, K=2, H=16, V=24)


def normal(*shape, seed=2):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def bernoulli(*shape):
    return jnp.asarray(np.random.default_rng(3).random(shape) > 0.3)


def ids(*lengths):
    """Segment numbers of such lengths, the same in both batches but for their order."""
    numbers = np.repeat(np.arange(len(lengths)), lengths)
    return jnp.asarray(np.stack((numbers, numbers[::-1])), jnp.int32)


FEATURES = {
    "bias": {"bias": normal(2, 4, 45, 70)},
    "bias of a head": {"bias": normal(1, 4, 1, 70)},
    "bias of a query": {"bias": normal(2, 1, 45, 1)},
    "bias in bfloat16": {"bias": normal(1, 1, 45, 70).astype(jnp.bfloat16)},
    "mask": {"mask": bernoulli(2, 1, 45, 70)},
    "mask of keys": {"mask": bernoulli(1, 1, 1, 70)},
    "segments": {"segment_ids": (ids(20, 1, 24), ids(30, 10, 30))},
    "cap": {"logits_soft_cap": 0.7},
    "dropout": {"dropout_rate": 0.3, "dropout_key": jax.random.key(0)},
    "sinks": {"sinks": jnp.array([-1.0, 0.0, 2.0, -jnp.inf])},
    "causal": {"is_causal": True},
    "window": {"local_window_size": (20, 7)},
    "lengths": {
        "query_seq_lengths": jnp.array([30, 45], jnp.int32),
        "key_value_seq_lengths": jnp.array([70, 9], jnp.int32),
    },
}


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
def test_each(implementation, features):
    check(SHAPE, "float32", implementation, precision="highest", **features)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtypes(implementation, dtype):
    names = ("bias of a head", "segments", "cap", "sinks")
    features = {k: v for name in names for k, v in FEATURES[name].items()}
    check(SHAPE, dtype, implementation, **features)


PAIRS = [
    (a, b)
    for a, b in itertools.combinations(FEATURES, 2)
    if not set(FEATURES[a]) & set(FEATURES[b])
]


@settings(max_examples=8, deadline=None, derandomize=True, phases=[Phase.generate])
@given(pair=st.sampled_from(PAIRS), scale=st.sampled_from([None, -0.3]))
def test_pairs(implementation, pair, scale):
    features = FEATURES[pair[0]] | FEATURES[pair[1]]
    check(SHAPE, "float32", implementation, precision="highest", scale=scale, **features)


@pytest.mark.parametrize("name", ["mask", "segments", "cap", "dropout", "sinks"])
def test_deterministic(name):
    features = FEATURES[name] | {"deterministic": True}
    check(SHAPE, "float32", "triton", precision="highest", **features)


def test_odd_widths(implementation):
    shape = Shape(B=2, T=45, S=70, N=4, K=1, H=80, V=33)
    features = FEATURES["bias of a head"] | FEATURES["cap"] | FEATURES["dropout"]
    check(shape, "float32", implementation, precision="highest", **features)


def test_one_key_of_dropout_is_one_mask():
    """Weights of 1 / S times values of 1 show the share that each query keeps."""
    zeros, ones = jnp.zeros((1, 64, 2, 16)), jnp.ones((1, 64, 2, 16))
    options = {"dropout_rate": 0.4, "dropout_key": jax.random.key(3)}
    kept = [
        flash_attention(zeros, zeros, ones, implementation=name, **options)
        for name in ("xla", "triton")
    ]
    np.testing.assert_allclose(*kept, rtol=1e-6)
    other = flash_attention(zeros, zeros, ones, **options | {"dropout_key": jax.random.key(4)})
    assert np.mean(np.asarray(kept[0]) != np.asarray(other)) > 0.8


@pytest.mark.parametrize("rate", [0.01, 0.5, 0.9])
def test_rate_of_dropout(rate):
    """The number kept is binomial: within five standard deviations, in all, per row and column."""
    B, N, T = 2, 3, 512
    zeros = jnp.zeros((B, T, N, 1))
    # Each key has a column of its own: what is left of the identity are the weights themselves.
    value = jnp.broadcast_to(jnp.eye(T)[None, :, None, :], (B, T, N, T))
    options = {"dropout_rate": rate, "dropout_key": jax.random.key(5), "implementation": "xla"}
    weights = flash_attention(zeros, zeros, value, **options) * T
    kept = np.asarray(weights) > 0
    np.testing.assert_allclose(np.asarray(weights)[kept], 1 / (1 - rate), rtol=1e-5)
    for axes in ((0, 1, 2, 3), (0, 2, 3), (0, 1, 2), (1, 2, 3), (0, 1, 3)):
        count = np.prod([kept.shape[axis] for axis in axes])
        deviation = np.abs(kept.mean(axes) - (1 - rate)) * np.sqrt(count / (rate * (1 - rate)))
        assert deviation.max() < 5, axes
    # Neighbours are dropped independently of one another.
    for axis in (0, 1, 2, 3):
        first, second = (np.take(kept, r, axis) for r in (np.arange(1), np.arange(1, 2)))
        both = np.mean(first & second)
        assert abs(both - (1 - rate) ** 2) < 5 / np.sqrt(first.size), axis


def test_segments_are_separate_calls(implementation):
    rng = np.random.default_rng(0)
    query, key, value = (jnp.float32(rng.standard_normal((1, 90, 2, 16))) for _ in range(3))
    segment_ids = jnp.asarray(np.repeat([[4, 1, 7]], [31, 40, 19], axis=1), jnp.int32)
    options = {"is_causal": True, "implementation": implementation, "precision": "highest"}
    whole = flash_attention(query, key, value, segment_ids=segment_ids, **options)
    for begin, end in ((0, 31), (31, 71), (71, 90)):
        part = flash_attention(*(x[:, begin:end] for x in (query, key, value)), **options)
        np.testing.assert_allclose(whole[:, begin:end], part, rtol=2e-5, atol=2e-6)


def test_a_sink_takes_what_keys_leave(implementation):
    """Of equal logits each takes 1 / (S + 1)."""
    zeros, ones = jnp.zeros((1, 5, 1, 16)), jnp.ones((1, 7, 1, 16))
    sinks = jnp.zeros(1)
    output = flash_attention(zeros, 0 * ones, ones, sinks=sinks, implementation=implementation)
    np.testing.assert_allclose(output, 7 / 8, rtol=1e-6)
