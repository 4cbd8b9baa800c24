"""Values and gradients of linear_scan against float64, for every implementation."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

from tests.ops.linear.oracle import NAMES, Problem, check, inputs, results, segment_ids
from tjk.ops.linear import linear_scan, linear_scan_step, reference


@pytest.mark.parametrize("reverse", [False, True])
def test_reference_is_the_formula(reverse):
    p = Problem(L=9, complex=True, segments=True)
    a, x, state = inputs(p).values()
    ids = segment_ids(p)
    with jax.enable_x64(True):
        y, last = reference.linear_scan(a, x, initial_state=state, segment_ids=ids, reverse=reverse)
    for b in range(p.B):
        h, before = state[b], None
        for t in range(p.L)[:: -1 if reverse else 1]:
            h = np.zeros_like(h) if before is not None and ids[b, t] != before else h
            h = a[b, t] * h + x[b, t]
            before = ids[b, t]
            np.testing.assert_allclose(y[b, t], h, rtol=1e-12)
        np.testing.assert_allclose(last[b], h, rtol=1e-12)


def test_reference_gradients():
    with jax.enable_x64(True):
        for p in (Problem(L=5), Problem(L=5, complex=True, varying=False)):
            a, x, state = (jnp.asarray(v) for v in inputs(p).values())
            check_grads(
                lambda a, x, s: reference.linear_scan(a, x, initial_state=s),
                (a, x, state),
                order=1,
                modes=["rev"],
            )


@pytest.mark.parametrize("L", [1, 7, 64, 65])
@pytest.mark.parametrize("complex", [False, True])
def test_lengths(implementation, complex, L):
    dtype = "complex64" if complex else "float32"
    check(Problem(B=1, L=L, complex=complex), dtype, implementation)


@pytest.mark.parametrize("varying", [False, True])
def test_long(implementation, varying):
    """Many parts."""
    L = 1000 if implementation == "xla" else 130
    check(Problem(B=1, L=L, D=2, complex=True, varying=varying), "complex64", implementation)


@pytest.mark.parametrize("D", [1, 33, 130])
def test_widths(implementation, D):
    check(Problem(L=9, D=D, varying=False), "float32", implementation)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("decays", [None, "float32"])
@pytest.mark.parametrize("varying", [False, True])
def test_dtypes(implementation, varying, decays, dtype):
    check(Problem(L=20, varying=varying), dtype, implementation, decays)


FLAGS = ("complex", "varying", "state", "segments", "reverse")


@settings(max_examples=5, deadline=None, derandomize=True, phases=[Phase.generate])
@given(st.fixed_dictionaries({name: st.booleans() for name in FLAGS}))
def test_flags(implementation, flags):
    dtype = "complex64" if flags["complex"] else "float32"
    check(Problem(B=1, L=70, **flags), dtype, implementation)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("varying", [False, True])
def test_segments_across_parts(implementation, varying, reverse):
    p = Problem(B=1, L=70, segments=True, varying=varying, reverse=reverse)
    check(p, "float32", implementation)


def arrays(**changes):
    return tuple(
        jnp.asarray(a, "complex64") for a in inputs(Problem(complex=True, **changes)).values()
    )


def test_reverse_is_the_flipped_sequence(implementation):
    a, x, state = arrays()
    options = {"initial_state": state, "return_final_state": True, "implementation": implementation}
    y, last = linear_scan(a, x, reverse=True, **options)
    flipped, expected = linear_scan(a[:, ::-1], x[:, ::-1], **options)
    np.testing.assert_array_equal(y, flipped[:, ::-1])
    np.testing.assert_array_equal(last, expected)


@pytest.mark.parametrize("reverse", [False, True])
def test_segments_are_separate_calls(implementation, reverse):
    a, x, _ = arrays()
    ids = jnp.broadcast_to(jnp.where(jnp.arange(40) < 17, 4, 2), (2, 40))
    options = {"reverse": reverse, "implementation": implementation}
    together = linear_scan(a, x, segment_ids=ids, **options)
    parts = [linear_scan(a[:, p], x[:, p], **options) for p in (slice(17), slice(17, None))]
    np.testing.assert_allclose(together, jnp.concatenate(parts, 1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("reverse", [False, True])
def test_two_calls_with_the_state_passed_are_one(implementation, reverse):
    a, x, state = arrays()
    options = {"reverse": reverse, "return_final_state": True, "implementation": implementation}
    together, last = linear_scan(a, x, initial_state=state, **options)
    places = [slice(0, 23), slice(23, None)]
    parts = {}
    for i in (1, 0) if reverse else (0, 1):
        parts[i], state = linear_scan(
            a[:, places[i]], x[:, places[i]], initial_state=state, **options
        )
    both = jnp.concatenate([parts[0], parts[1]], 1)
    np.testing.assert_allclose(both, together, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(state, last, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", ["complex64", "bfloat16"])
@pytest.mark.parametrize("varying", [False, True])
def test_steps_are_the_scan(varying, dtype):
    p = Problem(complex=dtype == "complex64", varying=varying)
    a, x, state = (jnp.asarray(v) for v in inputs(p).values())
    exact = "complex64" if p.complex else "float32"
    a, x, state = a.astype(dtype), x.astype(dtype), state.astype(exact)
    y, last = linear_scan(a, x, initial_state=state, return_final_state=True)
    step = jax.jit(linear_scan_step)
    for t in range(p.L):
        now, state = step(state, a[:, t] if varying else a, x[:, t])
        epsilon = float(jnp.finfo(dtype).eps)
        right = y[:, t].astype(exact)
        np.testing.assert_allclose(now.astype(exact), right, 4 * epsilon, 4 * epsilon)
    np.testing.assert_allclose(state, last, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("decay", [1e-30, 0.5, 1 - 1e-6])
def test_long_sequences_stay_finite(decay):
    a = jnp.full((1, 65536, 2), decay, jnp.float32)
    x = jnp.ones_like(a)

    def loss(a, x):
        y, state = linear_scan(a, x, return_final_state=True, implementation="xla")
        return jnp.mean(y) + jnp.sum(state)

    value, gradients = jax.jit(jax.value_and_grad(loss, (0, 1)))(a, x)
    assert all(np.isfinite(v).all() for v in (value, *gradients))
    last = (1 - decay**65536) / (1 - decay)
    y = linear_scan(a, x, implementation="xla")
    np.testing.assert_allclose(y[0, -1], last, rtol=5e-3)  # float32 has 1 - 1e-6 to 5 %


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_runs_give_the_same_bits(implementation, dtype):
    p = dataclasses.replace(Problem(), segments=True)
    runs = [results(implementation, p, dtype) for _ in range(2)]
    for name, a, b in zip(NAMES, *runs):
        np.testing.assert_array_equal(np.float32(a), np.float32(b), name)
