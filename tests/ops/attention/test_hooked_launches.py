"""The machine code of attention with functions compiled in, and which tiles it visits."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ops.attention.machine_code import hot_loop
from tjk import executors
from tjk.executors import compiler
from tjk.executors.architectures import SHARED_MEMORY
from tjk.launch import recording
from tjk.ops import flash_attention, flex_attention, masks
from tjk.ops.attention.hooks import table
from tjk.ops.attention.triton import visited_tiles

B, T, N, H = 8, 1024, 4, 64


def _call(name, array):
    """flex_attention with one of the usual functions, or what is written by hand, and its array."""
    options = {
        "alibi": {"score_mod": lambda x, b, h, q, k: x - array[h] * (q - k)},
        "soft cap": {"score_mod": lambda x, *at: 50 * jnp.tanh(x / 50)},
        "relative positions": {"score_mod": lambda x, b, h, q, k: x + array[h, q - k + T - 1]},
        "causal": {"mask_mod": masks.causal},
        "nothing": {"score_mod": lambda x, *at: x},
    }
    if name == "documents":
        options[name] = {"mask_mod": masks.document(array)}
    if name in options:
        return lambda *x: flex_attention(*x, implementation="triton", **options[name])
    by_hand = {"causal by hand": {"is_causal": True}, "nothing by hand": {}}[name]
    return lambda *x: flash_attention(*x, implementation="triton", **by_hand)


ARRAYS = {
    "alibi": ((N,), "float32"),
    "relative positions": ((N, 2 * T - 1), "float32"),
    "documents": ((B, T), "int32"),
}


def _launches(arch, dtype, name):
    x = jax.ShapeDtypeStruct((B, T, N, H), dtype)
    array = jax.ShapeDtypeStruct(*ARRAYS.get(name, ((1,), "int32")))
    floats = (0, 1, 2, 3) if array.dtype == jnp.float32 else (0, 1, 2)

    def loss(query, key, value, array):
        return jnp.sum(_call(name, array)(query, key, value).astype(jnp.float32))

    with executors.target(arch), recording() as launches:
        jax.eval_shape(jax.grad(loss, floats), x, x, x, array)
    return launches


def _facts(arch, dtype, name) -> list[dict]:
    return [
        {
            "name": launch.name,
            "spill": binary.spill_bytes,
            "fits": binary.shared_bytes <= SHARED_MEMORY[arch],
            "float64": binary.float64,
            "tensor core": binary.tensor_core,
        }
        for launch in _launches(arch, dtype, name)
        for binary in [compiler.compile(launch, arch)]
    ]


@pytest.mark.parametrize(
    ("arch", "dtype"),
    [
        *((80, "bfloat16"), (86, "float32"), (89, "bfloat16")),
        *((90, "bfloat16"), (100, "float32"), (120, "bfloat16")),
    ],
)
@pytest.mark.parametrize("name", ["alibi", "soft cap", "relative positions", "documents"])
def test_usual_functions(native, arch, dtype, name):
    facts = native.submit(_facts, arch, dtype, name).result()
    assert [launch["name"] for launch in facts] == ["attention_forward", "attention_backward"]
    for launch in facts:
        assert launch["spill"] == 0, launch
        assert launch["fits"], launch
        assert launch["float64"] == 0, launch
        assert launch["tensor core"] > 0, launch


def _lengths(arch, dtype, name) -> list[list[int]]:
    """Instructions of each hot loop, with functions and by hand, in the same tiles."""
    result = []
    pairs = zip(
        _launches(arch, dtype, name), _launches(arch, dtype, f"{name} by hand"), strict=True
    )
    for launch, by_hand in pairs:
        tile = {k: v for k, v in launch.constexprs if k.startswith("BLOCK_")}
        by_hand = dataclasses.replace(
            by_hand, constexprs=dict(by_hand.constexprs) | tile, num_warps=launch.num_warps
        )
        result.append([len(hot_loop(compiler.compile(x, arch))) for x in (launch, by_hand)])
    return result


@pytest.mark.parametrize("name", ["causal", "nothing"])
def test_loop_is_as_long_as_by_hand(native, name):
    lengths = native.submit(_lengths, 80, "bfloat16", name).result()
    for ours, by_hand in lengths:
        assert 0 < ours <= 1.1 * by_hand, lengths


@pytest.mark.parametrize("tile", [(128, 64), (64, 64), (64, 32), (32, 64)], ids=str)
@pytest.mark.parametrize("by_key", [False, True])
def test_causal_mask_visits_what_causal_attention_does(tile, by_key):
    kinds = masks.block_mask(masks.causal, 1000, 900).kinds
    counts, blocks = table(kinds, (1000, 900), tile, by_key)
    rows, columns = blocks.shape[2:]
    sizes = (-(-1000 // tile[0]), -(-900 // tile[1]))
    assert (rows, columns) == (sizes[::-1] if by_key else sizes)
    m, n = tile
    # By hand, from the first query that sees a key of the tile, or to the last key that one sees.
    first = [j * n // m for j in range(sizes[1])]
    end = [-(-min(900, (i + 1) * m) // n) for i in range(sizes[0])]
    by_hand = [max(0, sizes[0] - x) for x in first] if by_key else end
    np.testing.assert_array_equal(counts[0, 0], by_hand)
    if not by_key:
        assert int(counts.sum()) == visited_tiles(1000, 900, (None, 0), m, n)
    # Those on the diagonal, and no others, ask the mask.
    asked = np.asarray(blocks[0, 0]) % 2 == 1
    for i in range(rows):
        for entry in np.asarray(blocks[0, 0, i, : int(counts[0, 0, i])]):
            query, key = (entry // 2, i) if by_key else (i, entry // 2)
            full = (key + 1) * n - 1 <= query * m
            partly = (min((key + 1) * n, 900) - 1) > query * m
            assert (entry % 2 == 1) == (partly and not full) or entry % 2 == 1
    assert asked.any()


def test_window_visits_few_tiles():
    kinds = masks.block_mask(masks.sliding_window(256, 0), 4096, 4096).kinds
    for tile in ((128, 64), (32, 64)):
        counts, blocks = table(kinds, (4096, 4096), tile, False)
        assert int(counts.sum()) <= 0.15 * blocks.size
