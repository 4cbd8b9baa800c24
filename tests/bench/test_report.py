"""Tables for a terminal, against numbers worked out by hand."""

import pytest

from bench.case import Selection
from bench.cells import WIDTH
from bench.report import report
from bench.suites import SUITES, moe, transformer
from tests.bench.documents import case_of, document_of


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
    assert cells(text, "      32") == ["32", "2", "forward", "triton", "2", "1234", "617x"]


def test_baseline_alone_has_no_speedup(make_row):
    text = report(document_of([make_row(case_of(attention="jax_xla"))]))
    assert cells(text, "forward") == ["forward", "2"]
    assert "speedup" not in text.split("\n", 1)[1]


def test_speedup_has_the_farther_end_of_its_interval(make_row):
    """Rounds of ratio 2 but for one of 3: the interval is from 2 up to what draws make of it."""
    ours = make_row(case_of()) | {"samples_ms": [1.0] * 9, "median_ms": 1.0}
    theirs = [2.0] * 6 + [2.2] * 3
    theirs = make_row(case_of(attention="jax_xla")) | {"samples_ms": theirs, "median_ms": 2.0}
    text = report(document_of([ours, theirs]))
    assert cells(text, "forward")[3:] == ["2.00x", "±0.20"]
    assert "±: to the farther end of the 95 % confidence interval" in text
    few = report(document_of([ours, theirs | {"samples_ms": [2.0] * 5}]))
    assert cells(few, "forward")[3:] == ["2.00x"]
    assert "±" not in few


@pytest.mark.parametrize(("q3", "cell"), [(2.19, "2"), (2.21, "~2")])
def test_wide_quartiles_are_marked(make_row, q3, cell):
    text = report(document_of([make_row(case_of()) | {"q1_ms": 2.0, "q3_ms": q3}]))
    assert cells(text, "forward") == ["forward", cell]
    assert ("~: the quartiles are more than 10 % of the median apart" in text) == (q3 > 2.2)


@pytest.mark.parametrize("suite", SUITES)
def test_full_matrix_fits_the_width(make_row, suite):
    cases = list(SUITES[suite].cases(Selection(full=True)))
    samples = [12345.6 + i for i in range(9)]
    rows = [
        make_row(case, 12345.6 * n) | {"samples_ms": samples} for n, case in enumerate(cases, 1)
    ]
    for measured in (rows, [{**case, "error": "no"} for case in cases]):
        text = report(document_of(measured))
        assert max(len(line) for line in text.splitlines()) <= WIDTH
        assert text.startswith(f"{suite} (")


def test_tables_that_do_not_fit_side_by_side_follow_each_other(make_row):
    several = transformer.cases(Selection(full=True, batch=(1, 8), model_dim=(32, 256)))
    rows = [make_row(c, 12345.6) | {"samples_ms": [1.0, 2.0, 3.0] * 3} for c in several]
    text = report(document_of(rows))
    assert max(len(line) for line in text.splitlines()) <= WIDTH
    assert text.count("train_step") == 2 * 6 * 4


def test_moe_has_a_speedup_over_each_baseline(make_row):
    medians = {"tjk": 2.0, "blocked": 3.0, "ragged_dot": 8.0}
    cases = moe.cases(Selection(full=True, dtypes=("bfloat16",), tokens=(32768,)))
    text = report(document_of([make_row(c, medians[c["impl"]]) for c in cases]))
    sizes = "tokens 32768, experts 8, top_k 2, d_model 512, d_hidden 1024"
    assert text.startswith(f"moe (dtype bfloat16, {sizes}, path xla): ")
    assert cells(text, "forward")[1:] == ["2", "3", "8", "1.50x", "4.00x"]
    assert "geometric mean of the speedups over blocked: 1.50x (2 rows)" in text
    assert "geometric mean of the speedups over ragged_dot: 4.00x (2 rows)" in text


def test_tjk_flex_is_the_subject_where_tjk_has_no_row(make_row):
    cases = SUITES["attention"].cases(Selection(full=True, dtypes=("float32",), tokens=(1024,)))
    medians = {"tjk": 1.0, "tjk_flex": 2.0, "jax_xla": 8.0}
    text = report(document_of([make_row(case, medians[case["impl"]]) for case in cases]))
    alibi = next(line for line in text.splitlines() if "alibi" in line and "forward" in line)
    assert alibi.split()[-2:] == ["-", "4.00x"]
    assert "speedups are those of tjk and tjk_flex" in text
