"""Values and gradients of ssd_scan against float64, for every implementation."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ops.ssd.oracle import Problem, cast, check, check_float32, compiled, gradients, inputs
from tjk.ops.ssd import ssd_scan

ALL = Problem(L=20, H=4, G=2, segments=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("reverse", [False, True])
def test_dtypes(implementation, dtype, reverse):
    check(dataclasses.replace(ALL, reverse=reverse), dtype, implementation)


def test_tf32(implementation):
    check(ALL, "float32", implementation, precision=None)


@pytest.mark.parametrize(
    "problem",
    [
        Problem(L=1),
        Problem(L=7, P=1, R=1, H=1),
        Problem(L=65, H=1, P=16, R=16, chunk=32),
        Problem(L=65, H=1, P=20, R=40, chunk=None, z=False),
        Problem(L=16, H=33, P=2, R=3, G=3, z=False),
        Problem(B=2, L=20, H=3, P=33, R=17, z=False),
        Problem(L=18, H=1, P=130, R=70, z=False),
    ],
    ids=str,
)
def test_shapes(implementation, problem):
    check_float32(problem, implementation)


@pytest.mark.parametrize("chunk", [None, 128])
def test_a_thousand_tokens(chunk):
    """Decays of the definition multiply 1000 times where ours add up in logarithms."""
    problem = Problem(L=1000, H=3, P=8, R=16, chunk=chunk, segments=True)
    check(problem, "float32", "xla", inherent=1e-6)


def _pairwise() -> list[tuple[bool, ...]]:
    """Few settings of seven flags in which each pair of flags takes all four values."""
    settings = [tuple(bool(n >> i & 1) for i in range(3)) for n in range(8)]
    rows = [(a, b, c, a ^ b, a ^ c, b ^ c, a ^ b ^ c) for a, b, c in settings]
    for i, j in itertools.combinations(range(7), 2):
        assert len({(row[i], row[j]) for row in rows}) == 4
    return rows


@pytest.mark.parametrize("flags", _pairwise(), ids=str)
def test_flags(implementation, flags):
    names = "D", "z", "bias", "softplus", "state", "segments", "reverse"
    check_float32(Problem(L=21, **dict(zip(names, flags))), implementation)


def _flipped(arrays):
    over_time = "x", "dt", "B", "C", "z", "segment_ids", "d_y"
    return arrays | {name: arrays[name][:, ::-1] for name in over_time}


def test_reverse_is_the_scan_of_flipped_inputs(implementation):
    arrays = cast(inputs(ALL), "float32")
    forward = compiled(ALL, implementation)(arrays)
    backward = compiled(dataclasses.replace(ALL, reverse=True), implementation)(_flipped(arrays))
    for name in ("y", "d_x", "d_dt", "d_B", "d_C", "d_z"):
        np.testing.assert_allclose(forward[name], backward[name][:, ::-1], rtol=1e-5, atol=1e-5)
    for name in ("state", "d_A", "d_D", "d_dt_bias", "d_initial_state"):
        np.testing.assert_allclose(forward[name], backward[name], rtol=1e-5, atol=1e-5)


def test_segments_are_separate_scans(implementation):
    """With an id that comes back: neighbours decide, not equality."""
    problem = Problem(L=39, segments=True)
    arrays = cast(inputs(problem), "float32")
    arrays["segment_ids"] = jnp.repeat(jnp.array([[3, 1, 3]], jnp.int32), 13, axis=1)
    together = compiled(problem, implementation)(arrays)
    options = {"dt_softplus": True, "chunk_size": 16, "precision": "highest"}
    options |= {"implementation": implementation, "return_final_state": True}
    scan = jax.jit(functools.partial(ssd_scan, **options))
    shared = {name: arrays[name] for name in ("A", "D", "dt_bias")}
    for start in (0, 13, 26):
        part = {name: arrays[name][:, start : start + 13] for name in ("x", "dt", "B", "C", "z")}
        first = arrays["initial_state"] * float(start == 0)
        y, state = scan(**part, **shared, initial_state=first)
        np.testing.assert_allclose(together["y"][:, start : start + 13], y, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(together["state"], state, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("reverse", [False, True])
def test_two_halves_are_the_whole(implementation, reverse):
    """The state passes on, and its gradient back."""
    problem = Problem(L=44, reverse=reverse)
    arrays = cast(inputs(problem), "float32")
    whole = compiled(problem, implementation)(arrays)

    def halves(**arrays):
        assert arrays.pop("segment_ids") is None
        state, outputs = arrays.pop("initial_state"), {}
        parts = (slice(0, 19), slice(19, 44))
        for part in reversed(parts) if reverse else parts:
            cut = {name: arrays[name][:, part] for name in ("x", "dt", "B", "C", "z")}
            options = {"return_final_state": True, "chunk_size": 16, "precision": "highest"}
            outputs[part.start], state = ssd_scan(
                **arrays | cut,
                **problem.flags(),
                **options,
                initial_state=state,
                implementation=implementation,
            )
        return jnp.concatenate((outputs[0], outputs[19]), axis=1), state

    for name, value in jax.jit(functools.partial(gradients, halves))(arrays).items():
        scale = np.abs(whole[name]).max()
        np.testing.assert_allclose(value, whole[name], rtol=1e-5, atol=2e-6 * scale, err_msg=name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_runs_give_the_same_bits(implementation, dtype):
    arrays = cast(inputs(ALL), dtype)
    run = compiled(ALL, implementation)
    for a, b in zip(*(jax.tree.leaves(run(arrays)) for _ in range(2))):
        np.testing.assert_array_equal(np.float32(a), np.float32(b))


def test_steps_of_float32_with_inputs_of_16_bits(implementation):
    """dt keeps all its digits: the results are those of the rounded inputs and that dt."""
    problem = Problem(L=20, z=False)
    arrays = cast(inputs(problem), "bfloat16") | {
        "dt": jnp.asarray(inputs(problem)["dt"], "float32")
    }
    actual = compiled(problem, implementation)(arrays)
    assert actual["d_dt"].dtype == jnp.float32
    wide = {name: a if a is None else a.astype(jnp.float32) for name, a in arrays.items()}
    exact = compiled(problem, implementation)(wide)
    np.testing.assert_allclose(actual["y"].astype(jnp.float32), exact["y"], rtol=2e-2, atol=2e-2)
    np.testing.assert_allclose(actual["d_dt"], exact["d_dt"], rtol=2e-2, atol=5e-2)
