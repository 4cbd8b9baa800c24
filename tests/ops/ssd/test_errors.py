"""What ssd_scan and ssd_scan_step refuse, and in which words."""

import re

import jax
import jax.numpy as jnp
import pytest

from tjk.ops.ssd import ssd_scan, ssd_scan_step

SHAPES = {
    "x": (2, 8, 4, 5),
    "dt": (2, 8, 4),
    "A": (4,),
    "B": (2, 8, 2, 6),
    "C": (2, 8, 2, 6),
    "D": (4,),
    "z": (2, 8, 4, 5),
    "dt_bias": (4,),
    "initial_state": (2, 4, 5, 6),
}


def arguments():
    return {name: jnp.ones(shape) for name, shape in SHAPES.items()}


WRONG = {
    "x": ({"x": jnp.ones((2, 8, 4))}, ValueError, "x must have shape (B, L, H, P), got (2, 8, 4)"),
    "dt": ({"dt": jnp.ones((2, 8))}, ValueError, "dt must have shape (B, L, H) with B=2, L=8, H=4"),
    "A": ({"A": jnp.ones((4, 6))}, ValueError, "A must have shape (H,) with H=4, got (4, 6)"),
    "B": ({"B": jnp.ones((2, 7, 2, 6))}, ValueError, "B must have shape (B, L, G, R) with B=2"),
    "C": ({"C": jnp.ones((2, 8, 2, 5))}, ValueError, "C must have shape (B, L, G, R) with"),
    "D": ({"D": jnp.ones((4, 5))}, ValueError, "D must have shape (H,) with H=4, got (4, 5)"),
    "z": ({"z": jnp.ones((2, 8, 4, 6))}, ValueError, "z must have shape (B, L, H, P) with"),
    "bias": ({"dt_bias": jnp.ones(3)}, ValueError, "dt_bias must have shape (H,) with H=4"),
    "state": (
        {"initial_state": jnp.ones((2, 4, 6, 5))},
        ValueError,
        "initial_state must have shape (B, H, P, R) with B=2, H=4, P=5, R=6, got (2, 4, 6, 5)",
    ),
    "groups": (
        {"B": jnp.ones((2, 8, 3, 6)), "C": jnp.ones((2, 8, 3, 6))},
        ValueError,
        "B's groups must divide the 4 heads of x, got G=3",
    ),
    "no group": (
        {"B": jnp.ones((2, 8, 0, 6)), "C": jnp.ones((2, 8, 0, 6))},
        ValueError,
        "B's groups must divide the 4 heads of x, got G=0",
    ),
    "dtype": ({"x": jnp.ones((2, 8, 4, 5), int)}, TypeError, "x must have dtype float32 or"),
    "dtypes": (
        {"C": jnp.ones((2, 8, 2, 6), jnp.bfloat16)},
        TypeError,
        "C must have the dtype of x (float32), got bfloat16",
    ),
    "dtype of dt": (
        {"dt": jnp.ones((2, 8, 4), jnp.bfloat16)},
        TypeError,
        "dt must have dtype float32, got bfloat16",
    ),
    "dtype of A": (
        {"A": jnp.ones(4, jnp.bfloat16)},
        TypeError,
        "A must have dtype float32, got bfloat16",
    ),
    "dtype of the state": (
        {"initial_state": jnp.ones((2, 4, 5, 6), jnp.bfloat16)},
        TypeError,
        "initial_state must have dtype float32, got bfloat16",
    ),
    "chunk": ({"chunk_size": 48}, ValueError, "chunk_size must be None or a power of two from 16"),
    "large chunk": ({"chunk_size": 512}, ValueError, "chunk_size must be None or a power of two"),
    "segments": (
        {"segment_ids": jnp.zeros((2, 8))},
        TypeError,
        "segment_ids must be integers, got float32",
    ),
    "shape of segments": (
        {"segment_ids": jnp.zeros((2, 7), int)},
        ValueError,
        "segment_ids must have shape (B, L) with B=2, L=8",
    ),
    "precision": ({"precision": "fast"}, ValueError, "precision must be None, 'default'"),
    "implementation": ({"implementation": "cuda"}, ValueError, "implementation must be None"),
}


@pytest.mark.parametrize(("change", "error", "message"), WRONG.values(), ids=WRONG)
def test_wrong_arguments(change, error, message):
    with pytest.raises(error, match=re.escape(f"ssd_scan: {message}")):
        ssd_scan(**arguments() | change)


WRONG_STEP = {
    "x": ({"x": jnp.ones((2, 8, 4, 5))}, ValueError, "x must have shape (B, H, P), got"),
    "state": ({"state": jnp.ones((2, 4, 6))}, ValueError, "state must have shape (B, H, P, R)"),
    "B": ({"B": jnp.ones((2, 8, 2, 6))}, ValueError, "B must have shape (B, G, R) with B=2, got"),
    "dtype": (
        {"state": jnp.ones((2, 4, 5, 6), jnp.bfloat16)},
        TypeError,
        "state must have dtype float32, got bfloat16",
    ),
}


@pytest.mark.parametrize(("change", "error", "message"), WRONG_STEP.values(), ids=WRONG_STEP)
def test_wrong_arguments_of_a_step(change, error, message):
    token = {name: a[:, 0] if a.ndim > 2 else a for name, a in arguments().items()}
    token["state"] = jnp.ones(SHAPES["initial_state"])
    del token["initial_state"]
    with pytest.raises(error, match=re.escape(f"ssd_scan_step: {message}")):
        ssd_scan_step(**token | change)


@pytest.mark.parametrize(("P", "R", "what"), [(257, 6, "head width"), (5, 300, "state")])
def test_wide_heads_are_xla_only(P, R, what):
    wide = {"x": (1, 2, 4, P), "dt": (1, 2, 4), "A": (4,), "B": (1, 2, 2, R), "C": (1, 2, 2, R)}
    wide = {name: jnp.ones(shape) for name, shape in wide.items()}
    assert ssd_scan(**wide).shape == (1, 2, 4, P)
    with pytest.raises(NotImplementedError, match=f"does not take a {what} above 256"):
        ssd_scan(**wide, implementation="triton")


def test_float64_is_xla_only():
    with jax.enable_x64(True):
        wide = {name: a.astype(jnp.float64) for name, a in arguments().items()}
        y, state = ssd_scan(**wide, return_final_state=True)
        assert y.dtype == state.dtype == jnp.float64
        with pytest.raises(NotImplementedError, match="does not take float64"):
            ssd_scan(**wide, implementation="triton")
