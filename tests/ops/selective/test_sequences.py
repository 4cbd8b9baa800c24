"""Identities between calls of selective_scan: directions, segments, pieces, single steps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ops.selective.oracle import Problem, cast, everything
from tjk.ops.selective import selective_scan, selective_scan_step

PROBLEM = everything(L=9)
OVER_TIME = ("x", "delta", "B", "C", "z")


@functools.cache
def compiled(implementation):
    """One jitted function for all tests, so that equal shapes are compiled once."""
    options = {"delta_softplus": True, "return_final_state": True}
    scan = functools.partial(selective_scan, **options, implementation=implementation)
    return jax.jit(scan, static_argnames="reverse")


@pytest.fixture
def scan(implementation):
    return compiled(implementation)


def arguments(problem=PROBLEM):
    given = cast(problem, "float32")
    del given["d_y"], given["d_state"]
    return given


def cut(given, start, stop):
    """The arguments of the positions from start to stop."""
    return {k: x[:, start:stop] if k in OVER_TIME else x for k, x in given.items()}


def assert_close(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_reverse_is_the_scan_of_flipped_inputs(scan):
    given = arguments()
    flipped = {k: jnp.flip(x, 1) if k in OVER_TIME else x for k, x in given.items()}
    y, state = scan(**flipped)
    assert_close(scan(**given, reverse=True), (jnp.flip(y, 1), state))


@pytest.mark.parametrize("reverse", [False, True])
def test_segments_are_separate_calls(scan, reverse):
    given = arguments()
    ids = jnp.asarray([[4, 4, 4, 9, 9, 9, 4, 4, 4]])
    y, state = scan(**given, segment_ids=ids, reverse=reverse)
    pieces = [(0, 3), (3, 6), (6, 9)]
    entered = pieces[-1 if reverse else 0]
    results = {
        piece: scan(
            **cut(given, *piece)
            | {"initial_state": given["initial_state"] if piece == entered else None},
            reverse=reverse,
        )
        for piece in pieces
    }
    expected = jnp.concatenate([results[piece][0] for piece in pieces], axis=1)
    assert_close((y, state), (expected, results[pieces[0 if reverse else -1]][1]))


@pytest.mark.parametrize("reverse", [False, True])
def test_two_pieces_are_one_call(scan, reverse):
    given = arguments()
    pieces = [cut(given, 0, 3), cut(given, 3, 9)]
    first, second = pieces[::-1] if reverse else pieces
    y_first, state = scan(**first, reverse=reverse)
    y_second, state = scan(**second | {"initial_state": state}, reverse=reverse)
    y = (y_second, y_first) if reverse else (y_first, y_second)
    assert_close(scan(**given, reverse=reverse), (jnp.concatenate(y, axis=1), state))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_are_the_scan(dtype):
    given = cast(PROBLEM, dtype)
    fixed = {name: given[name] for name in ("A", "D", "delta_bias")}
    options = {"delta_softplus": True}

    @jax.jit
    def steps(state, **tokens):
        def body(state, token):
            y, state = selective_scan_step(state, **token, **fixed, **options)
            return state, y

        tokens = {name: jnp.moveaxis(x, 1, 0) for name, x in tokens.items()}
        state, y = jax.lax.scan(body, state, tokens)
        return jnp.moveaxis(y, 0, 1), state

    tokens = {name: given[name] for name in OVER_TIME}
    ours = steps(given["initial_state"], **tokens)
    scan = selective_scan(
        **tokens,
        **fixed,
        **options,
        initial_state=given["initial_state"],
        return_final_state=True,
        implementation="xla",
    )
    assert ours[0].dtype == scan[0].dtype == jnp.dtype(dtype)
    assert ours[1].dtype == scan[1].dtype == jnp.float32
    epsilon = float(jnp.finfo(dtype).eps)
    for a, b in zip(ours, scan):
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=2 * epsilon, atol=1e-5)


def test_a_bare_step():
    given = arguments(Problem(L=1))
    inputs = [given[name] for name in ("x", "delta", "A", "B", "C")]
    y, state = selective_scan(*inputs, return_final_state=True, implementation="xla")
    x, delta, A, B, C = (a if a.ndim == 2 else a[:, 0] for a in inputs)
    bare = selective_scan_step(jnp.zeros_like(state), x, delta, A, B, C)
    assert_close(bare, (y[:, 0], state))
