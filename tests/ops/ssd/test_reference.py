"""The definition itself, against NumPy and against finite differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from tests.ops.ssd.oracle import Problem, cast, compiled, definition, inputs
from tjk.ops.ssd import reference


@pytest.mark.parametrize("reverse", [False, True])
def test_definition(reverse):
    """Values and gradients in float64 against those of a loop in NumPy."""
    problem = Problem(B=2, L=9, H=4, G=2, segments=True, reverse=reverse)
    expected, _ = definition(inputs(problem), **problem.flags())
    with jax.enable_x64(True):
        actual = compiled(problem, "reference")(cast(inputs(problem), "float64"))
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-11, atol=1e-11, err_msg=name)


def test_gradients():
    problem = Problem(L=4, P=2, R=3, segments=True)
    with jax.enable_x64(True):
        arrays = cast(inputs(problem), "float64")
        ids = arrays["segment_ids"]
        operands = {k: v for k, v in arrays.items() if not k.startswith(("d_", "seg"))}

        def f(operands):
            y, state = reference.ssd_scan(**operands, segment_ids=ids, **problem.flags())
            return jnp.sin(y).sum() + jnp.sin(state).sum()

        check_grads(f, (operands,), order=1, modes=("rev",))
