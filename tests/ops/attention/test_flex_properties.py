"""Random pairs of a score and a mask, with odd head widths and grouped heads, tiles told or not."""

import dataclasses

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.ops.attention.test_flex import MASKS, SCORES, SHAPE, N, S, T, check
from tjk.ops.masks import block_mask

WIDTHS = st.sampled_from([5, 16, 24, 33])


@settings(max_examples=4, deadline=None, derandomize=True, phases=[Phase.generate])
@given(
    score=st.sampled_from(list(SCORES)),
    mask=st.sampled_from(list(MASKS)),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    key_heads=st.sampled_from([1, 2, 4]),
    widths=st.tuples(WIDTHS, WIDTHS),
    told=st.booleans(),
    scale=st.sampled_from([None, 0.3, -1.0]),
)
def test_random_pairs(implementation, score, mask, dtype, key_heads, widths, told, scale):
    make, array = SCORES[score]
    visible = MASKS[mask]
    shape = dataclasses.replace(SHAPE, K=key_heads, H=widths[0], V=widths[1])
    options = {} if scale is None else {"scale": scale}
    if told:
        options["block_mask"] = block_mask(visible, T, S, batch=SHAPE.B, heads=N)
    check(implementation, make, array, visible, dtype=dtype, shape=shape, **options)
