"""Values and gradients of gated_delta_rule against float64, for every implementation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.ops.delta_rule.oracle import NAMES, Shape, cast, check, compiled, inputs, segments
from tjk.ops.delta_rule import gated_delta_rule, gated_delta_rule_step, tiles

SMALL = Shape(B=1, L=37, H=2, K=16, V=16)


@pytest.mark.parametrize(
    ("dtype", "l2_normalize"),
    [("float32", False), ("float32", True), ("bfloat16", True), ("float16", False)],
)
def test_dtypes(implementation, dtype, l2_normalize):
    check(SMALL, dtype, implementation, chunk_size=16, l2_normalize=l2_normalize)


def test_gates_in_16_bits():
    check(SMALL, "bfloat16", "xla", gates="bfloat16", chunk_size=16, l2_normalize=True)
    operands = cast(SMALL, "bfloat16", "bfloat16")
    results = compiled("xla", chunk_size=16, l2_normalize=True)(*operands, None)
    for name, x, like in zip(NAMES[2:], results[2:], operands):
        assert x.dtype == like.dtype, name


@pytest.mark.parametrize("L", [1, 7, 64, 65])
def test_lengths(implementation, L):
    shape = Shape(B=1, L=L, H=1, K=8, V=8)
    check(shape, "float32", implementation, precision="highest", l2_normalize=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_long_sequence(dtype):
    check(Shape(B=1, L=1000, H=3, K=8, V=8), dtype, "xla", l2_normalize=True)


@pytest.mark.parametrize(
    "shape",
    [
        Shape(B=1, L=20, H=1, K=3, V=1),
        Shape(B=1, L=20, H=1, K=33, V=40),
    ],
    ids=str,
)
def test_widths(implementation, shape):
    check(shape, "float32", implementation, precision="highest", chunk_size=16)


def test_wide_heads_in_triton():
    """16 columns of the state at a time, queries and keys in four blocks."""
    shape = Shape(B=1, L=17, H=1, K=100, V=24)
    check(shape, "float32", "triton", precision="highest", chunk_size=16, l2_normalize=True)


@pytest.mark.parametrize("chunk_size", [32, 128])
def test_chunk_sizes(chunk_size):
    shape = Shape(B=1, L=131, H=1, K=8, V=8)
    check(shape, "float32", "xla", chunk_size=chunk_size, l2_normalize=True)


def test_a_chunk_by_halves_in_triton():
    """64 tokens are inverted by halves of halves, with and without TF32."""
    shape = Shape(B=1, L=100, H=1, K=16, V=16)
    for precision in ({}, {"precision": "highest"}):
        check(shape, "float32", "triton", chunk_size=128, l2_normalize=True, **precision)


def test_parts_of_several_chunks():
    """Four parts of time, of two chunks each but for the last."""
    shape = Shape(B=1, L=100, H=3, K=8, V=8)
    assert tiles.parts(3, 7) == 4
    options = {"precision": "highest", "l2_normalize": True, "chunk_size": 16}
    check(shape, "float32", "triton", ids=segments(shape, (70,)), **options)


@settings(max_examples=3, deadline=None, derandomize=True, phases=[Phase.generate])
@given(st.data())
def test_flags_together(implementation, data):
    flag = st.booleans()
    L = data.draw(st.sampled_from([5, 33, 48]))
    shape = Shape(B=2, L=L, H=data.draw(st.integers(1, 3)), K=8, V=8)
    changes = data.draw(st.sampled_from([None, (1, 3), (4,), (3, L - 1)]))
    check(
        shape,
        "float32",
        implementation,
        ids=None if changes is None else segments(shape, changes),
        initial=data.draw(flag),
        scale=data.draw(st.sampled_from([None, 0.0, -1.5])),
        l2_normalize=data.draw(flag),
        reverse=data.draw(flag),
        chunk_size=16,
        precision="highest",
    )


@pytest.mark.parametrize("reverse", [False, True])
def test_segments(implementation, reverse):
    """Changes inside a chunk, at its border, one after the other, and in one sequence only."""
    shape = Shape(B=2, L=50, H=1, K=8, V=8)
    ids = segments(shape, (5, 6, 16, 30, 34))
    options = {"reverse": reverse, "precision": "highest", "chunk_size": 16, "l2_normalize": True}
    check(shape, "float32", implementation, ids=ids, **options)


def _run(implementation, operands, ids=None, **options):
    """o and the final state of q, k, v, g, beta and an initial state."""
    *five, state = operands
    options = {"chunk_size": 16, "precision": "highest", "l2_normalize": True} | options
    return gated_delta_rule(
        *five,
        initial_state=state,
        segment_ids=ids,
        return_final_state=True,
        implementation=implementation,
        **options,
    )


def _close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-5)


def test_segments_are_separate_calls(implementation):
    operands = cast(SMALL, "float32")[:6]
    o, state = _run(implementation, operands, segments(SMALL, (21,)))
    first = [x[:, :21] for x in operands[:5]]
    second = [x[:, 21:] for x in operands[:5]]
    _close(o[:, :21], _run(implementation, (*first, operands[5]))[0])
    expected = _run(implementation, (*second, None))
    _close(o[:, 21:], expected[0])
    _close(state, expected[1])


@pytest.mark.parametrize("reverse", [False, True])
def test_two_calls_are_one(implementation, reverse):
    operands = cast(SMALL, "float32")[:6]
    o, state = _run(implementation, operands, reverse=reverse)
    cut = [slice(18, None), slice(None, 18)] if reverse else [slice(None, 18), slice(18, None)]
    carried = operands[5]
    for part in cut:
        pieces = (*(x[:, part] for x in operands[:5]), carried)
        piece, carried = _run(implementation, pieces, reverse=reverse)
        _close(o[:, part], piece)
    _close(state, carried)


def test_reverse_is_flipped(implementation):
    operands = cast(SMALL, "float32")[:6]
    flipped = [jnp.flip(x, 1) for x in operands[:5]]
    o, state = _run(implementation, operands, reverse=True)
    expected = _run(implementation, (*flipped, operands[5]))
    np.testing.assert_array_equal(o, jnp.flip(expected[0], 1))
    np.testing.assert_array_equal(state, expected[1])


def test_steps_are_the_scan():
    operands = cast(SMALL, "float32")[:6]
    o, last = _run("xla", operands, scale=0.3)
    tokens = tuple(jnp.moveaxis(x, 1, 0) for x in operands[:5])

    def step(state, token):
        return gated_delta_rule_step(state, *token, scale=0.3, l2_normalize=True)[::-1]

    state, steps = jax.lax.scan(step, operands[5], tokens)
    _close(jnp.moveaxis(steps, 0, 1), o)
    _close(state, last)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_runs_give_the_same_bits(implementation, dtype):
    operands = cast(SMALL, dtype)
    run = compiled(implementation, chunk_size=16, l2_normalize=False)
    for a, b in zip(run(*operands, None), run(*operands, None)):
        np.testing.assert_array_equal(np.float32(a), np.float32(b))


@pytest.mark.parametrize("extreme", ["a reset", "minus infinity", "zero"])
def test_extreme_decays(implementation, extreme):
    """Decays of 0 and 1: values and gradients stay finite, and what follows keeps its digits."""
    operands = cast(SMALL, "float32")
    g = operands[3]
    value = {"a reset": -1e9, "minus infinity": -jnp.inf, "zero": 0.0}[extreme]
    operands[3] = jnp.zeros_like(g) if extreme == "zero" else g.at[:, 5].set(value)
    options = {"l2_normalize": True, "precision": "highest", "chunk_size": 16}
    results = compiled(implementation, **options)(*operands, None)
    if extreme != "zero":
        rest = [x[:, 5:] for x in operands[:5]]
        o = _run(implementation, (*rest, None))[0]
        _close(results[0][:, 5:], o)
    for name, x in zip(NAMES, results):
        assert jnp.isfinite(x).all(), name


def test_65536_tokens():
    """Decays near 0 and near 1, time steps up to 100, and identical keys."""
    shape = Shape(B=1, L=65536, H=2, K=4, V=4)
    q, k, v, _, _, state, d_o, d_state = inputs(shape)
    delta = np.geomspace(1e-6, 100, shape.L)[None, :, None]
    g = -np.concatenate((delta, 1e-7 * delta), axis=2)
    beta = np.full(g.shape, 2.0)
    k[:, 1000:2000] = k[:, 1000:1001]
    operands = [jnp.asarray(x, "float32") for x in (q, k, v, g, beta, state, d_o, d_state)]
    for name, x in zip(NAMES, compiled("xla", l2_normalize=True)(*operands, None)):
        assert jnp.isfinite(x).all(), name
