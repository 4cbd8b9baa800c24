"""ssd_scan under JAX's transformations; single steps; sequences of no length."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ops.ssd.oracle import Problem, cast, inputs
from tjk import executors
from tjk.launch import recording
from tjk.ops.ssd import ssd_scan, ssd_scan_step

PROBLEM = Problem(L=20, H=2, P=3, R=4)
OPTIONS = {"dt_softplus": True, "chunk_size": 16, "precision": "highest"}


def arguments(seed=0):
    arrays = cast(inputs(PROBLEM, seed), "float32")
    return {name: a for name, a in arrays.items() if a is not None and not name.startswith("d_")}


@pytest.fixture
def scan(implementation):
    return functools.partial(ssd_scan, implementation=implementation, **OPTIONS)


@pytest.mark.parametrize("mapped", [("x",), ("A", "D"), ("dt", "B", "z", "initial_state"), None])
def test_vmap(scan, mapped):
    one, other = arguments(), arguments(1)
    mapped = tuple(one) if mapped is None else mapped
    axes = {name: 0 if name in mapped else None for name in one}
    stacked = {
        name: jnp.stack([a, other[name]]) if name in mapped else a for name, a in one.items()
    }
    y = jax.jit(jax.vmap(lambda arrays: scan(**arrays), (axes,)))(stacked)
    plain = jax.jit(lambda arrays: scan(**arrays))
    second = one | {name: other[name] for name in mapped}
    np.testing.assert_allclose(y[0], plain(one), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(y[1], plain(second), rtol=1e-5, atol=1e-5)


def test_vmap_folds_into_the_batch():
    stacked = {name: jnp.stack([a, a, a]) for name, a in arguments().items()}
    scan = functools.partial(ssd_scan, implementation="triton", **OPTIONS)
    with recording() as launches:
        jax.eval_shape(jax.vmap(lambda arrays: scan(**arrays)), stacked)
    assert [launch.outputs[0].shape[0] for launch in launches] == [3, 3, 3, 3]


def test_gradient_of_vmap_remat_and_scan(scan):
    """Nested, equal to the plain gradient of each."""
    one, other = arguments(), arguments(1)

    def loss(arrays):
        return jnp.sum(jnp.sin(scan(**arrays)))

    def nested(arrays):
        def step(carry, arrays):
            return carry + jax.checkpoint(loss)(arrays), None

        return jax.lax.scan(step, jnp.float32(0), arrays)[0]

    stacked = {name: jnp.stack([a, other[name]])[:, None] for name, a in one.items()}
    ours = jax.jit(jax.grad(lambda a: jax.vmap(nested)(a).sum()))(stacked)
    plain = jax.jit(jax.grad(loss))
    for i, arrays in enumerate((one, other)):
        for name, expected in plain(arrays).items():
            scale = np.abs(expected).max()
            np.testing.assert_allclose(ours[name][i, 0], expected, rtol=1e-5, atol=1e-5 * scale)


def _lowered_launches(policy: str) -> int:
    """Launches in the gradient's program for a GPU, from a process where Triton compiles."""
    names = jax.checkpoint_policies.save_only_these_names("ssd_scan_states")

    def loss(arrays):
        return jnp.sum(ssd_scan(**arrays, **OPTIONS))

    loss = {
        "no remat": loss,
        "nothing": jax.checkpoint(loss),
        "names": jax.checkpoint(loss, policy=names),
    }[policy]
    with executors.target(86):
        traced = jax.jit(jax.value_and_grad(loss)).trace(arguments())
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    return len(re.findall(r"custom_call @triton_kernel_call", text))


@pytest.mark.parametrize(("policy", "count"), [("no remat", 11), ("names", 11), ("nothing", 14)])
def test_remat_by_name_keeps_the_states(native, policy, count):
    """Four launches forward, seven backward with a gate; without states three of four again."""
    assert native.submit(_lowered_launches, policy).result() == count


def test_steps_are_the_scan(scan):
    arrays = arguments()
    y, last = jax.jit(functools.partial(scan, return_final_state=True))(**arrays)
    state = arrays.pop("initial_state")
    over_time = {name: arrays.pop(name) for name in ("x", "dt", "B", "C", "z")}

    def step(state, token):
        y, state = ssd_scan_step(state, **token, **arrays, dt_softplus=True)
        return state, y

    tokens = {name: jnp.moveaxis(a, 1, 0) for name, a in over_time.items()}
    state, ys = jax.jit(lambda s, t: jax.lax.scan(step, s, t))(state, tokens)
    np.testing.assert_allclose(jnp.moveaxis(ys, 0, 1), y, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(state, last, rtol=1e-5, atol=1e-5)


def test_a_step_in_bfloat16():
    """Without the optional arguments; y is rounded, the state is not."""
    arrays = cast(inputs(PROBLEM), "bfloat16")
    token = {name: arrays[name][:, 0] for name in ("x", "dt", "B", "C")}
    y, state = ssd_scan_step(arrays["initial_state"], **token, A=arrays["A"])
    wide = {name: a.astype(jnp.float32) for name, a in token.items()}
    expected, same = ssd_scan_step(arrays["initial_state"], **wide, A=arrays["A"])
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y, expected.astype(jnp.bfloat16))
    np.testing.assert_array_equal(state, same)


@pytest.mark.parametrize("empty", ["L", "B", "R", "P"])
def test_empty(scan, empty):
    sizes = {"B": 2, "L": 3, "H": 2, "P": 4, "G": 1, "R": 5} | {empty: 0}
    shapes = {"x": "BLHP", "dt": "BLH", "A": "H", "B": "BLGR", "C": "BLGR", "D": "H"}
    arrays = {name: jnp.ones(tuple(sizes[axis] for axis in axes)) for name, axes in shapes.items()}
    first = jnp.full(tuple(sizes[axis] for axis in "BHPR"), 3.0)
    y, state = scan(**arrays, initial_state=first, return_final_state=True)
    np.testing.assert_array_equal(y, arrays["x"])  # D is 1
    assert state.shape == first.shape
    if empty == "L":
        np.testing.assert_array_equal(state, first)
    d_arrays = jax.grad(lambda arrays: scan(**arrays).sum())(arrays)
    assert all(np.isfinite(a).all() for a in d_arrays.values())


def test_x64(scan):
    """float32 stays float32 where JAX would make wider numbers."""
    arrays = arguments()
    expected = jax.jit(scan)(**arrays)
    with jax.enable_x64(True):
        y = jax.jit(scan)(**arrays)
    assert y.dtype == jnp.float32
    np.testing.assert_array_equal(y, expected)
