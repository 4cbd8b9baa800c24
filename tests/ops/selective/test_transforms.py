"""selective_scan under JAX's transformations, and its errors."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ops.selective.oracle import Problem, cast, everything
from tjk import executors
from tjk.launch import recording
from tjk.ops.selective import selective_scan, selective_scan_step

PROBLEM = everything(L=5)


@pytest.fixture
def scan(implementation):
    return functools.partial(
        selective_scan,
        delta_softplus=True,
        return_final_state=True,
        implementation=implementation,
    )


def arguments(problem=PROBLEM, seed=0):
    given = cast(problem, "float32", seed=seed)
    del given["d_y"], given["d_state"]
    return given


def total(outputs):
    return sum(jnp.sum(jnp.sin(x)) for x in outputs)


def assert_close(actual, expected):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "mapped", [("x", "A"), ("delta", "D", "initial_state"), tuple(arguments())]
)
def test_gradient_of_vmap(scan, mapped):
    """And so of the values: the gradients of the sum of what vmap returns."""
    given, other = arguments(), arguments(seed=1)
    axes = {k: 0 if k in mapped else None for k in given}
    stacked = {k: jnp.stack([x, other[k]]) if k in mapped else x for k, x in given.items()}
    second = {k: other[k] if k in mapped else x for k, x in given.items()}

    @jax.jit
    def mapped_total(stacked):
        return jnp.sum(jax.vmap(lambda a: total(scan(**a)), (axes,))(stacked))

    value, gradients = jax.value_and_grad(mapped_total)(stacked)
    one = jax.jit(jax.value_and_grad(lambda a: total(scan(**a))))
    (value_1, gradients_1), (value_2, gradients_2) = one(given), one(second)
    np.testing.assert_allclose(value, value_1 + value_2, rtol=1e-5)
    expected = {
        k: jnp.stack([gradients_1[k], gradients_2[k]])
        if k in mapped
        else gradients_1[k] + gradients_2[k]
        for k in given
    }
    assert_close(gradients, expected)


def test_vmap_folds_into_the_batch():
    """One launch of each kernel serves all that is mapped, the weights as well."""
    given = arguments()
    stacked = {k: jnp.stack([x, x, x]) for k, x in given.items()}

    def loss(a):
        return total(selective_scan(**a, delta_softplus=True, return_final_state=True,
                                    implementation="triton"))  # fmt: skip

    with executors.target(86), recording() as launches:
        jax.eval_shape(jax.grad(lambda a: jnp.sum(jax.vmap(loss)(a))), stacked)
    assert [launch.name for launch in launches] == [
        *("selective_states", "selective_states", "selective_gradients")
    ]
    assert all(launch.outputs[0].shape[0] in (0, 3) for launch in launches)


def test_remat_in_a_loop(scan):
    given = arguments()

    def plain(a):
        return total(scan(**a))

    def wrapped(a):
        body = jax.checkpoint(lambda carry, _: (carry, plain(a)))
        return jax.lax.scan(body, None, jnp.arange(1))[1][0]

    assert_close(jax.jit(jax.grad(wrapped))(given), jax.jit(jax.grad(plain))(given))


def _launches(policy) -> list[str]:
    names = jax.checkpoint_policies.save_only_these_names("selective_scan_states")

    def loss(a):
        return jnp.sum(selective_scan(**a, implementation="triton"))

    loss = {"none": jax.checkpoint(loss), "names": jax.checkpoint(loss, policy=names)}[policy]
    problem = Problem()
    with executors.target(86):
        text = jax.jit(jax.value_and_grad(loss)).trace(arguments(problem)).lower(
            lowering_platforms=("cuda",)
        ).as_text()  # fmt: skip
    return re.findall(r"custom_call @triton_kernel_call", text)


@pytest.mark.parametrize(("policy", "count"), [("names", 3), ("none", 4)])
def test_remat_by_name_keeps_the_states(native, policy, count):
    """One launch is the forward pass, two the backward pass; the first is run again, or not."""
    assert len(native.submit(_launches, policy).result()) == count


@pytest.mark.parametrize("sizes", [{"B": 0}, {"L": 0}, {"D": 0}])
def test_nothing(scan, sizes):
    problem = Problem(**{"B": 2, "L": 3, "D": 4, "R": 5, "state": True} | sizes)
    given = arguments(problem)
    y, state = scan(**given)
    assert y.shape == given["x"].shape
    np.testing.assert_array_equal(state, given["initial_state"])
    _, state = scan(**given | {"initial_state": None})
    assert not state.any()
    assert state.shape == given["initial_state"].shape
    assert state.dtype == jnp.float32


def test_float64_is_xla_only():
    with jax.enable_x64(True):
        given = cast(PROBLEM, "float64")
        del given["d_y"], given["d_state"]
        y, state = selective_scan(**given, return_final_state=True)
        assert y.dtype == state.dtype == jnp.float64
        with pytest.raises(NotImplementedError, match="does not take float64"):
            selective_scan(**given, implementation="triton")


def ones(*shape, dtype=jnp.float32):
    return jnp.ones(shape, dtype)


WRONG = {
    "x": ({"x": ones(1, 5)}, ValueError, "x must have shape (B, L, D), got (1, 5)"),
    "delta": ({"delta": ones(1, 5, 4)}, ValueError, "delta must have shape (B, L, D) with B=1"),
    "A": ({"A": ones(4, 2)}, ValueError, "A must have shape (D, R) with D=3, got (4, 2)"),
    "R": ({"A": ones(3, 257)}, ValueError, "A must have shape (D, R) with R from 1 to 256"),
    "B": ({"B": ones(1, 5, 3)}, ValueError, "B must have shape (B, L, R) with B=1, L=5, R=2"),
    "C": ({"C": ones(1, 4, 2)}, ValueError, "C must have shape (B, L, R) with B=1, L=5, R=2"),
    "D": ({"D": ones(2)}, ValueError, "D must have shape (D,) with D=3, got (2,)"),
    "z": ({"z": ones(1, 5, 2)}, ValueError, "z must have shape (B, L, D) with"),
    "bias": ({"delta_bias": ones(2)}, ValueError, "delta_bias must have shape (D,) with D=3"),
    "state": (
        {"initial_state": ones(1, 2, 3)},
        ValueError,
        "initial_state must have shape (B, D, R) with B=1, D=3, R=2, got (1, 2, 3)",
    ),
    "kind": ({"x": ones(1, 5, 3, dtype=int)}, TypeError, "x must have dtype float32 or bfloat16"),
    "dtypes": (
        {"B": ones(1, 5, 2, dtype=jnp.bfloat16)},
        TypeError,
        "B must have dtype float32, got bfloat16",
    ),
    "narrow delta": (
        {"delta": ones(1, 5, 3, dtype=jnp.bfloat16)},
        TypeError,
        "delta must have dtype float32, got bfloat16",
    ),
    "narrow state": (
        {"initial_state": ones(1, 3, 2, dtype=jnp.bfloat16)},
        TypeError,
        "initial_state must have dtype float32, got bfloat16",
    ),
    "ids": ({"segment_ids": ones(1, 5)}, TypeError, "segment_ids must be integers, got float32"),
    "ids' shape": (
        {"segment_ids": ones(1, 4, dtype=jnp.int32)},
        ValueError,
        "segment_ids must have shape (B, L) with B=1, L=5",
    ),
    "implementation": ({"implementation": "cuda"}, ValueError, "implementation must be None"),
}


@pytest.mark.parametrize(("change", "error", "message"), WRONG.values(), ids=WRONG)
def test_wrong_arguments(change, error, message):
    with pytest.raises(error, match=re.escape(f"selective_scan: {message}")):
        selective_scan(**arguments() | change)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": ones(1, 5, 3)}, ValueError, "x must have shape (B, D), got (1, 5, 3)"),
        ({"state": ones(1, 3)}, ValueError, "state must have shape (B, D, R) with B=1, D=3, R=2"),
        ({"B": ones(1, 2, dtype=jnp.float16)}, TypeError, "B must have dtype float32, got float16"),
    ],
)
def test_wrong_arguments_of_a_step(change, error, message):
    given = {
        **{"state": ones(1, 3, 2), "x": ones(1, 3), "delta": ones(1, 3)},
        **{"A": ones(3, 2), "B": ones(1, 2), "C": ones(1, 2)},
    }
    with pytest.raises(error, match=re.escape(f"selective_scan_step: {message}")):
        selective_scan_step(**given | change)
