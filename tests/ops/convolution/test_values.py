"""Values and gradients of causal_conv1d against float64, for every implementation."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

from tests.ops.convolution.oracle import NAMES, Problem, check, inputs, results, segment_ids
from tjk.ops.convolution import causal_conv1d, causal_conv1d_step, reference


def test_reference_is_the_formula():
    p = Problem(L=6, segments=True)
    x, weight, bias, state = (inputs(p)[name] for name in ("x", "weight", "bias", "initial_state"))
    ids = segment_ids(p)
    with jax.enable_x64(True):
        y, last = reference.causal_conv1d(
            x, weight, bias, initial_state=state, activation="silu", segment_ids=ids
        )
    for b in range(p.B):
        window = state[b]
        for t in range(p.L):
            if t > 0 and ids[b, t] != ids[b, t - 1]:
                window = np.zeros_like(window)
            window = np.concatenate([window, x[b, t][None]])
            total = (window * weight.T).sum(0) + bias
            np.testing.assert_allclose(y[b, t], total / (1 + np.exp(-total)), rtol=1e-12)
            window = window[1:]
        np.testing.assert_allclose(last[b], window, rtol=1e-12)


def test_reference_gradients():
    with jax.enable_x64(True):
        arguments = {k: jnp.asarray(a) for k, a in inputs(Problem(L=5)).items()}
        state = arguments.pop("initial_state")
        check_grads(
            lambda x, w, b, s: reference.causal_conv1d(x, w, b, activation="silu", initial_state=s),
            (*arguments.values(), state),
            order=1,
            modes=["rev"],
        )


@pytest.mark.parametrize("L", [1, 2, 7, 64, 65, 1000])
def test_lengths(implementation, L):
    """In the interpreter 130 positions, which are two parts, in place of 1000."""
    L = min(L, 130) if implementation == "triton" else L
    check(Problem(B=1, L=L), "float32", implementation)


@pytest.mark.parametrize("D", [1, 64, 130])
@pytest.mark.parametrize("W", [2, 3])
def test_widths(implementation, D, W):
    check(Problem(L=9, D=D, W=W), "float32", implementation)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("weights", [None, "float32"])
def test_dtypes(implementation, dtype, weights):
    check(Problem(), dtype, implementation, weights)


FLAGS = {
    "bias": [True, False],
    "activation": ["silu", None],
    "state": [True, False],
    "segments": [True, False],
    "reverse": [True, False],
}


@settings(max_examples=6, deadline=None, derandomize=True, phases=[Phase.generate])
@given(st.fixed_dictionaries({name: st.sampled_from(values) for name, values in FLAGS.items()}))
def test_flags(implementation, flags):
    check(Problem(B=1, L=20, **flags), "float32", implementation)


@pytest.mark.parametrize("L", [2, 40])
@pytest.mark.parametrize("reverse", [False, True])
def test_segments_with_a_state(implementation, reverse, L):
    check(Problem(L=L, segments=True, reverse=reverse), "float32", implementation)


def arrays(p=None):
    arguments = {k: jnp.asarray(a, "float32") for k, a in inputs(p or Problem()).items()}
    return tuple(arguments.values())


def test_reverse_is_the_flipped_sequence(implementation):
    x, weight, bias, state = arrays()
    options = {"initial_state": state, "return_final_state": True, "implementation": implementation}
    y, last = causal_conv1d(x, weight, bias, reverse=True, **options)
    flipped, expected = causal_conv1d(x[:, ::-1], weight, bias, **options)
    np.testing.assert_allclose(y, flipped[:, ::-1], rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(last, expected)


@pytest.mark.parametrize("reverse", [False, True])
def test_segments_are_separate_calls(implementation, reverse):
    x, weight, bias, _ = arrays()
    ids = jnp.broadcast_to(jnp.where(jnp.arange(40) < 17, 4, 2), (2, 40))
    options = {"reverse": reverse, "implementation": implementation}
    together = causal_conv1d(x, weight, bias, segment_ids=ids, **options)
    parts = [causal_conv1d(part, weight, bias, **options) for part in (x[:, :17], x[:, 17:])]
    np.testing.assert_allclose(together, jnp.concatenate(parts, 1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("cut", [1, 2, 20])
@pytest.mark.parametrize("reverse", [False, True])
def test_two_calls_with_the_state_passed_are_one(implementation, reverse, cut):
    x, weight, bias, state = arrays()
    ids = jnp.asarray(segment_ids(Problem(segments=True)))
    options = {"reverse": reverse, "return_final_state": True, "implementation": implementation}
    together, last = causal_conv1d(x, weight, bias, segment_ids=ids, initial_state=state, **options)
    places = (slice(cut, None), slice(0, cut)) if reverse else (slice(0, cut), slice(cut, None))
    parts = []
    for place in places:
        y, state = causal_conv1d(
            x[:, place], weight, bias, segment_ids=ids[:, place], initial_state=state, **options
        )
        parts.append(y)
        # A following call begins in the segment that this one ended in; here a change lies between.
        edge = (cut, cut - 1) if reverse else (cut - 1, cut)
        changed = ids[:, edge[0]] != ids[:, edge[1]]
        if len(parts) == 1:
            state = jnp.where(changed[:, None, None], 0.0, state)
    both = jnp.concatenate(parts[::-1] if reverse else parts, 1)
    np.testing.assert_allclose(both, together, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(state, last)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_are_the_convolution(dtype):
    x, weight, bias, state = arrays()
    x = x.astype(dtype)
    y, last = causal_conv1d(
        x, weight, bias, activation="silu", initial_state=state, return_final_state=True
    )
    step = jax.jit(lambda state, x: causal_conv1d_step(state, x, weight, bias, activation="silu"))
    for t in range(x.shape[1]):
        now, state = step(state, x[:, t])
        assert now.dtype == x.dtype
        epsilon = float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(np.float32(now), np.float32(y[:, t]), epsilon, epsilon)
    np.testing.assert_array_equal(state, last)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_runs_give_the_same_bits(implementation, dtype):
    p = dataclasses.replace(Problem(), segments=True)
    runs = [results(implementation, p, dtype) for _ in range(2)]
    for name, a, b in zip(NAMES, *runs):
        np.testing.assert_array_equal(np.float32(a), np.float32(b), name)


def test_what_is_not_finite_stays_in_its_window_and_segment(implementation):
    x, weight, bias, _ = arrays()
    ids = jnp.broadcast_to(jnp.arange(40) // 12, (2, 40))
    y = causal_conv1d(
        x.at[:, 10].set(jnp.nan), weight, bias, segment_ids=ids, implementation=implementation
    )
    assert np.isnan(y[:, 10:12]).all()
    assert np.isfinite(np.delete(np.asarray(y), [10, 11], axis=1)).all()
