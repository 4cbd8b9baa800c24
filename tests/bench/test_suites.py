"""The matrix: the seed's on a GPU, minutes on a CPU, or what the options select."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

import bench
from bench import attention_rows
from bench.case import Selection
from bench.suites import SUITES, attention, diffusion, key, moe, ssm, transformer, unet
from tjk.nn.moe import router_logits

SEED = Path(bench.__file__).parent / "baselines" / "rtx3090_probjax.json"
NAMES_IN_SEED = {"tjk": "probjax_default", "tjk_flex": "probjax_flex"} | {
    name: name for name in ("jax_xla", "jax_cudnn")
}


@pytest.mark.parametrize("suite", [transformer, diffusion])
def test_full_matrix_is_the_seed_file_rows(suite):
    name = suite.__name__.split(".")[-1]
    seed = [r for r in json.loads(SEED.read_text())["results"] if r["suite"] == name]
    for ours, theirs in NAMES_IN_SEED.items():
        cases = suite.cases(Selection(full=True, implementations=(ours,)))
        expected = [key(r, without=("attention",)) for r in seed if r["attention"] == theirs]
        assert [key(c, without=("attention",)) for c in cases] == expected


def test_quick_matrix_has_both_dtypes_and_the_short_lengths():
    cases = list(transformer.cases(Selection(full=False, implementations=("tjk", "jax_xla"))))
    for name in ("tjk", "jax_xla"):
        for dtype in ("float32", "bfloat16"):
            ran = [
                (c["tokens"], c["op"])
                for c in cases
                if (c["attention"], c["dtype"]) == (name, dtype)
            ]
            train = [(256, "train_step")] if dtype == "float32" else []
            assert ran == [(256, "forward"), *train, (1024, "forward")]


@pytest.mark.parametrize("suite", SUITES.values(), ids=SUITES)
def test_quick_matrix_trains_in_bfloat16_where_asked_for(suite):
    chosen, quick, full = (
        [c for c in suite.cases(selection) if c["dtype"] == "bfloat16"]
        for selection in (Selection(False, ("bfloat16",)), Selection(False), Selection(True))
    )
    assert quick == [c for c in chosen if c["op"] == "forward"]
    assert "train_step" in {c["op"] for c in full}


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


def test_full_moe_matrix_is_the_seed_file_rows():
    seed = [r for r in json.loads(SEED.read_text())["results"] if r["suite"] == "moe"]
    ours = [
        c | {"impl": {"tjk": "pallas"}.get(c["impl"], c["impl"])}
        for c in moe.cases(Selection(full=True))
    ]
    assert [key(c) for c in ours] == [key(r) for r in seed]


def test_quick_moe_matrix_is_shorter():
    full, quick = (list(moe.cases(Selection(full=full))) for full in (True, False))
    assert quick == [
        c | {"tokens": 2048}
        for c in full
        if c["tokens"] == 4096 and (c["dtype"], c["op"]) != ("bfloat16", "train_step")
    ]


def test_selection_replaces_the_sizes_of_moe_and_takes_none_by_batch():
    selection = Selection(
        full=False,
        dtypes=("bfloat16",),
        tokens=(16, 1024),
        model_dim=(32,),
        implementations=("ragged_dot", "jax_cudnn"),
    )
    sizes = [
        (c["impl"], c["dtype"], c["tokens"], c["d_model"], c["d_hidden"], c["op"])
        for c in moe.cases(selection)
    ]
    assert sizes == [
        ("ragged_dot", "bfloat16", tokens, 32, 64, op)
        for tokens in (16, 1024)
        for op in ("forward", "train_step")
    ]
    assert list(moe.cases(Selection(full=True, batch=(8,)))) == []


def test_moe_problem_has_the_seed_parameter_count_and_the_case_dtype():
    case = next(iter(moe.cases(Selection(full=True))))
    problem = jax.eval_shape(lambda: vars(moe.problem(case))["params"])
    assert sum(x.size for x in jax.tree.leaves(problem)) == 12_587_008
    sizes = {"tokens": 5, "d_model": 8, "d_hidden": 16}
    float32, bfloat16 = (moe.problem(case | sizes | {"dtype": d}) for d in ("float32", "bfloat16"))
    assert bfloat16.inputs[0].shape == (5, 8)
    assert bfloat16.inputs[0].dtype == "bfloat16"
    assert (float32.inputs[0] == bfloat16.inputs[0].astype("float32")).all()
    assert {x.dtype.name for x in jax.tree.leaves(bfloat16.params)} == {"float32"}


def test_no_choice_of_an_expert_hangs_on_a_rounding():
    """Float32 products, added up in whatever order, choose the same experts: see the references."""
    case = next(iter(moe.cases(Selection(full=True, tokens=(32768,)))))
    problem = moe.problem(case)
    x, router = (np.float64(a) for a in (problem.inputs[0], problem.params["router"]["weight"]))
    exact = x @ router
    error = np.abs(jax.jit(router_logits)(problem.params, problem.inputs[0]) - exact).max()
    descending = -np.sort(-exact, axis=1)
    gap = (descending[:, 1] - descending[:, 2]).min()
    assert gap > 10 * error


def test_full_ssm_matrix_is_the_seed_file_rows_for_each_dtype():
    seed = [r for r in json.loads(SEED.read_text())["results"] if r["suite"] == "ssm"]
    expected = [key(r, without=("impl",)) for r in seed]
    for dtype in ("float32", "bfloat16"):
        for impl in ("tjk", "jax_xla"):
            selection = Selection(full=True, dtypes=(dtype,), implementations=(impl,))
            cases = [key(c | {"dtype": "float32"}, ("impl",)) for c in ssm.cases(selection)]
            assert cases == expected


def test_quick_ssm_matrix_is_every_cell_on_one_short_sequence():
    cases = list(ssm.cases(Selection(full=False)))
    assert len(cases) == 3 * 2 * 5  # in bfloat16 forward alone
    assert {(c["tokens"], c["batch"]) for c in cases} == {(512, 1)}


def test_full_unet_matrix_is_the_seed_file_rows():
    seed = [r for r in json.loads(SEED.read_text())["results"] if r["suite"] == "unet"]
    for impl in ("tjk", "jax_xla"):
        cases = unet.cases(Selection(full=True, implementations=(impl,)))
        assert [key(c, ("impl",)) for c in cases] == [key(r, ("impl",)) for r in seed]


def test_selection_by_resolution_leaves_the_other_suites_out():
    selection = Selection(full=True, resolutions=(8,), batch=(2,))
    chosen = {
        (c["suite"], c["resolution"], c["batch"])
        for s in SUITES.values()
        for c in s.cases(selection)
    }
    assert chosen == {("unet", 8, 2)}
    for selection in ({"tokens": (16,)}, {"model_dim": (8,)}, {"cells": ("lru",)}):
        assert not list(unet.cases(Selection(full=True, **selection)))


@pytest.mark.parametrize(("suite", "count"), [(diffusion, 5_817_896), (unet, 2_803_968)])
def test_problem_of_noisy_parameters_has_the_seed_parameter_count(suite, count):
    case = next(iter(suite.cases(Selection(full=True))))
    params = jax.eval_shape(lambda: vars(suite.problem(case))["params"])
    assert sum(x.size for x in jax.tree.leaves(params)) == count
    small = case | ({"resolution": 8} if suite is unet else {"tokens": 8}) | {"batch": 2}
    assert all((x != 0).all() for x in jax.tree.leaves(suite.problem(small).params))


def test_selection_by_cell_leaves_the_other_suites_out():
    selection = Selection(full=True, cells=("lru", "gdn"), tokens=(16,), batch=(2,))
    assert {(c["cell"], c["batch"]) for c in ssm.cases(selection)} == {("lru", 2), ("gdn", 2)}
    assert not list(moe.cases(Selection(full=True, cells=("lru",))))
    assert not list(transformer.cases(Selection(full=True, cells=("lru",))))


@pytest.mark.parametrize("cell", ssm.CELLS)
def test_ssm_problem_has_the_seed_parameter_count(cell):
    seed = json.loads(SEED.read_text())["results"]
    (count,) = {r["params"] for r in seed if r.get("cell") == cell}
    case = next(iter(ssm.cases(Selection(full=True, cells=(cell,)))))
    problem = jax.eval_shape(lambda: vars(ssm.problem(case))["params"])
    assert sum(x.size for x in jax.tree.leaves(problem)) == count


def test_attention_matrix():
    full = list(attention.cases(Selection(full=True)))
    assert {c["tokens"] for c in full} == {1024, 4096, 16384}
    for variant in attention.VARIANTS:
        names = {(c["impl"], c["dtype"]) for c in full if c["variant"] == variant}
        expected = {(name, d) for name in ("tjk_flex", "jax_xla") for d in ("float32", "bfloat16")}
        if variant != "alibi":
            expected |= {("tjk", "float32"), ("tjk", "bfloat16")}
        if variant != "soft_cap":
            expected |= {("jax_cudnn", "bfloat16")}
        assert names == expected


@pytest.mark.parametrize("variant", attention.VARIANTS)
def test_attention_variants_are_what_they_say(variant):
    """In float32 every implementation is the definition, and no two variants are the same."""
    sizes = {"variant": variant, "tokens": 700, "batch": 1, "model_dim": 128, "dtype": "float32"}
    results = {}
    for impl in ("tjk", "tjk_flex", "jax_xla"):
        if (impl, variant) != ("tjk", "alibi"):
            problem = attention.problem(sizes | {"impl": impl})
            results[impl] = problem.measured(problem.params, *problem.inputs)
    exact = problem.exact(problem.params, *problem.inputs)
    for name, output in results.items():
        np.testing.assert_allclose(output, exact, rtol=1e-4, atol=1e-5, err_msg=name)
    plain = attention.problem(sizes | {"variant": "causal", "impl": "jax_xla"})
    apart = np.abs(exact - plain.measured(plain.params, *plain.inputs)).max()
    assert (apart > 1e-3) == (variant != "causal")


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
    assert attention_rows.core(width) == {"width": width, "heads": heads, "mlp_width": 4 * width}


@pytest.mark.parametrize("suite", SUITES.values(), ids=SUITES)
def test_cases_carry_the_fields_of_their_suite_in_order(suite):
    for case in suite.cases(Selection(full=True)):
        assert tuple(case) == ("suite", *suite.FIELDS)
        assert case[suite.KEY] in suite.IMPLEMENTATIONS
        assert case["op"] in ("forward", "train_step")
