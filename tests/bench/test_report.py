"""Tables, against numbers worked out by hand."""

import json
from pathlib import Path

import pytest

import bench
from bench.case import Selection
from bench.report import WIDTH, geometric_mean, report, speedups
from bench.suites import moe, transformer

SEED = json.loads((Path(bench.__file__).parent / "baselines" / "rtx3090_probjax.json").read_text())
LABEL = "[1] measured elsewhere (NVIDIA GeForce RTX 3090): seed.json"


def document_of(rows, **device):
    return {
        "device": {"device_kind": "cpu", "gpu": None, "cpu": "A CPU", **device},
        "results": rows,
    }


def case_of(**changes):
    return {**next(iter(transformer.cases(Selection(full=True)))), **changes}


@pytest.fixture
def rows(make_row):
    """tjk 2 and 8 ms; jax_xla 6 and 4 ms (3 and 0.5 times); cuDNN skipped, then out of memory."""
    medians = {"tjk": (2.0, 8.0), "jax_xla": (6.0, 4.0)}
    rows = [
        make_row(case_of(attention=attention, dtype="bfloat16", op=op), median)
        for attention, of_ops in medians.items()
        for op, median in zip(("forward", "train_step"), of_ops)
    ]
    cudnn = case_of(attention="jax_cudnn", dtype="bfloat16")
    return [
        *rows,
        {**cudnn, "skipped": "cuDNN needs a GPU"},
        {**cudnn, "op": "train_step", "params": 10, "error": "OutOfMemory: 24.72GiB " + "x" * 999},
    ]


def cells(text, start):
    return next(line for line in text.splitlines() if line.startswith(start)).split()


def test_speedups_and_geometric_mean(rows):
    groups = [
        {row["attention"]: row for row in rows if row["op"] == op}
        for op in ("forward", "train_step")
    ]
    assert speedups(groups, "jax_xla") == [3.0, 0.5]
    assert speedups(groups, "jax_cudnn") == []
    assert geometric_mean([3.0, 0.5]) == pytest.approx(1.5**0.5)
    assert geometric_mean([2.0, 4.0, 8.0]) == pytest.approx(4.0)


def test_table_shows_times_speedups_and_what_failed(rows):
    text = report(document_of(rows))
    title = "transformer (dtype bfloat16, tokens 256, batch 8, model_dim 256, path xla): "
    assert text.startswith(title + "median milliseconds per call on A CPU\n")
    assert cells(text, "forward") == ["forward", "2", "6", "skipped", "3.00x", "-"]
    assert cells(text, "train_step") == ["train_step", "8", "4", "error", "0.50x", "-"]
    assert "geometric mean of the speedups over jax_xla: 1.22x (2 rows)" in text
    assert "over jax_cudnn" not in text
    assert "\nskipped: cuDNN needs a GPU\n  transformer jax_cudnn bfloat16 256 8 256 for" in text
    assert "\nerror: OutOfMemory: 24.72GiB" in text


def test_sizes_and_paths_that_vary_are_columns(make_row):
    rows = [
        make_row(case_of(tokens=16, batch=1)),
        make_row(case_of(tokens=32, batch=2)) | {"path": "triton"},
        make_row(case_of(tokens=32, batch=2, attention="jax_xla"), 1234.5),
    ]
    text = report(document_of(rows))
    header = cells(text, "  tokens")
    assert header == ["tokens", "batch", "op", "path", "tjk", "jax", "speedup"]
    assert cells(text, "      16") == ["16", "1", "forward", "xla", "2", "-", "-"]
    assert cells(text, "      32") == ["32", "2", "forward", "triton", "2", "1234", "617.25x"]


def test_baseline_alone_has_no_speedup(make_row):
    text = report(document_of([make_row(case_of(attention="jax_xla"))]))
    assert cells(text, "forward") == ["forward", "2"]
    assert "speedup" not in text.split("\n", 1)[1]


def test_another_file_adds_its_columns(rows):
    text = report(document_of(rows), SEED, "seed.json")
    assert LABEL in text
    theirs = ["0.5326", "0.5075", "0.7477", "0.582"]
    assert cells(text, "forward") == ["forward", "2", "6", "skipped", "3.00x", "-", *theirs]


def test_file_of_the_same_device_is_not_labelled_as_elsewhere(rows):
    text = report(document_of(rows), document_of(rows), "before.json")
    assert "[1] measured here (A CPU): before.json" in text


def test_full_matrix_beside_another_file_fits_the_width(make_row):
    cases = [*all_cases(), *moe.cases(Selection(full=True))]
    rows = [make_row(case, 1e3 * n + 0.1) for n, case in enumerate(cases, 1)]
    text = report(document_of(rows), SEED, "seed.json")
    assert max(len(line) for line in text.splitlines()) <= WIDTH
    assert text.count("train_step") == 6 + 4


def test_tables_that_do_not_fit_side_by_side_follow_each_other(make_row):
    several = all_cases(batch=(1, 8), model_dim=(32, 256))
    rows = [make_row(case, 12345.6) for case in several]
    text = report(document_of(rows), SEED, "seed.json")
    assert max(len(line) for line in text.splitlines()) <= WIDTH
    assert text.count("train_step") == 2 * 6 * 4
    assert LABEL in text


def test_moe_has_a_speedup_over_each_baseline_and_a_file_of_other_names_beside_it(make_row):
    medians = {"tjk": 2.0, "blocked": 3.0, "ragged_dot": 8.0}
    cases = moe.cases(Selection(full=True, dtypes=("bfloat16",), tokens=(32768,)))
    text = report(document_of([make_row(c, medians[c["impl"]]) for c in cases]), SEED, "seed.json")
    sizes = "tokens 32768, experts 8, top_k 2, d_model 512, d_hidden 1024"
    assert text.startswith(f"moe (dtype bfloat16, {sizes}, path xla): ")
    header = ["op", "tjk", "blocked", "ragged", "speedup", "speedup", "[1]", "[1]", "[1]"]
    assert cells(text, "op") == header
    assert "pallas" in text
    assert cells(text, "forward")[1:] == ["2", "3", "8", "1.50x", "4.00x", "5.064", "15.6", "48.81"]
    assert "geometric mean of the speedups over blocked: 1.50x (2 rows)" in text
    assert "geometric mean of the speedups over ragged_dot: 4.00x (2 rows)" in text
    assert LABEL in text


def all_cases(**sizes):
    return list(transformer.cases(Selection(full=True, **sizes)))
