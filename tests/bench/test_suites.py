"""The matrix: the seed's on a GPU, minutes on a CPU, or what the options select."""

import json
from pathlib import Path

import jax
import pytest

import bench
from bench.case import Selection
from bench.suites import SUITES, key, transformer

SEED = Path(bench.__file__).parent / "baselines" / "rtx3090_probjax.json"
NAMES_IN_SEED = {"tjk": "probjax_default", "jax_xla": "jax_xla", "jax_cudnn": "jax_cudnn"}


def test_full_matrix_is_the_seed_file_rows():
    seed = [r for r in json.loads(SEED.read_text())["results"] if r["suite"] == "transformer"]
    for ours, theirs in NAMES_IN_SEED.items():
        cases = transformer.cases(Selection(full=True, implementations=(ours,)))
        expected = [key(r, without=("attention",)) for r in seed if r["attention"] == theirs]
        assert [key(c, without=("attention",)) for c in cases] == expected


def test_quick_matrix_has_both_dtypes_and_the_short_lengths():
    cases = list(transformer.cases(Selection(full=False, implementations=("tjk", "jax_xla"))))
    for attention in ("tjk", "jax_xla"):
        for dtype in ("float32", "bfloat16"):
            ran = [
                (c["tokens"], c["op"])
                for c in cases
                if (c["attention"], c["dtype"]) == (attention, dtype)
            ]
            assert ran == [(256, "forward"), (256, "train_step"), (1024, "forward")]


def test_selection_replaces_the_sizes():
    selection = Selection(
        full=False,
        dtypes=("bfloat16",),
        tokens=(16, 1024),
        batch=(1, 2),
        model_dim=(32,),
        implementations=("jax_cudnn",),
    )
    sizes = [
        (c["attention"], c["dtype"], c["tokens"], c["batch"], c["model_dim"], c["op"])
        for c in transformer.cases(selection)
    ]
    assert sizes == [
        ("jax_cudnn", "bfloat16", tokens, batch, 32, op)
        for tokens in (16, 1024)
        for batch in (1, 2)
        for op in ("forward", "train_step")
    ]


def test_cudnn_needs_16_bits_and_a_gpu():
    cases = list(transformer.cases(Selection(full=True, implementations=("jax_cudnn",))))
    assert {c["dtype"] for c in cases} == {"bfloat16"}
    assert "cuDNN needs an NVIDIA GPU" in transformer.unavailable(cases[0], "cpu")
    assert transformer.unavailable(cases[0], "gpu") is None
    assert transformer.unavailable({**cases[0], "attention": "tjk"}, "cpu") is None


def case_of(**changes):
    return {**next(iter(transformer.cases(Selection(full=True)))), **changes}


def test_problem_has_the_seed_parameter_count_and_the_case_dtype():
    problem = jax.eval_shape(lambda: vars(transformer.problem(case_of()))["params"])
    assert sum(x.size for x in jax.tree.leaves(problem)) == 3_159_040
    small = transformer.problem(case_of(tokens=5, batch=3, model_dim=32, dtype="bfloat16"))
    assert small.inputs[0].shape == (3, 5, 32)
    assert small.inputs[0].dtype == "bfloat16"
    assert {x.dtype.name for x in jax.tree.leaves(small.params)} == {"float32"}


def test_inputs_of_both_dtypes_are_the_same_numbers():
    sizes = {"tokens": 5, "batch": 3, "model_dim": 32}
    float32, bfloat16 = (
        transformer.problem(case_of(dtype=dtype, **sizes)).inputs[0]
        for dtype in ("float32", "bfloat16")
    )
    assert (float32 == bfloat16.astype("float32")).all()


@pytest.mark.parametrize(("width", "heads"), [(256, 4), (512, 8), (32, 1), (96, 1), (320, 5)])
def test_heads_are_64_wide_where_that_divides(width, heads):
    params = jax.eval_shape(
        lambda: transformer.problem(case_of(tokens=2, batch=1, model_dim=width)).params
    )
    assert params["block_0"]["mlp_in"]["weight"].shape == (width, 4 * width)
    assert transformer._heads(width) == heads


@pytest.mark.parametrize("suite", SUITES.values(), ids=SUITES)
def test_cases_carry_the_fields_of_their_suite_in_order(suite):
    for case in suite.cases(Selection(full=True)):
        assert tuple(case) == ("suite", *suite.FIELDS)
        assert case[suite.KEY] in suite.IMPLEMENTATIONS
        assert case["op"] in ("forward", "train_step")
