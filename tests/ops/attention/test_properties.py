"""Random shapes and flags against the reference."""

import jax.numpy as jnp
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.ops.attention.oracle import Shape, check

SIZES = st.sampled_from([1, 2, 3, 17, 31, 32, 33, 63, 65])
WIDTHS = st.sampled_from([1, 5, 16, 24, 33, 48, 72])


@st.composite
def problems(draw):
    key_heads = draw(st.sampled_from([1, 2]))
    shape = Shape(
        B=draw(st.integers(1, 2)),
        T=draw(SIZES),
        S=draw(SIZES),
        N=key_heads * draw(st.sampled_from([1, 2, 3])),
        K=key_heads,
        H=draw(WIDTHS),
        V=draw(WIDTHS),
    )

    def lengths(size):
        values = st.lists(st.integers(0, size), min_size=shape.B, max_size=shape.B)
        return draw(st.none() | values.map(lambda x: jnp.array(x, jnp.int32)))

    bound = st.integers(-5, 40)
    flags = {
        "is_causal": draw(st.booleans()),
        "local_window_size": draw(st.none() | st.tuples(bound, bound)),
        "query_seq_lengths": lengths(shape.T),
        "key_value_seq_lengths": lengths(shape.S),
        "deterministic": draw(st.booleans()),
        "scale": draw(st.none() | st.floats(-2, 2, width=32)),
    }
    return shape, flags


@settings(max_examples=8, deadline=None, derandomize=True, phases=[Phase.generate])
@given(problems())
def test_random_problems(implementation, problem):
    shape, flags = problem
    check(shape, "float32", implementation, precision="highest", **flags)
