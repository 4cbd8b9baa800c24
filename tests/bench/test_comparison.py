"""Rows of several files beside each other."""

import re

import pytest

from bench import comparison, groups
from bench.cells import WIDTH
from bench.suites import SUITES
from tests.bench.documents import SEED, case_of, document_of

GPU = {"device_kind": "gpu", "gpu": SEED["device"]["gpu"]}


def _ours(row):
    """What this benchmark calls a row of the earlier library's."""
    names = {"probjax_default": "tjk", "probjax_flex": "tjk_flex", "pallas": "tjk"}
    key = SUITES[row["suite"]].KEY
    name = row.get(key, "tjk")
    return {**row, key: names.get(name, name)}


@pytest.fixture(scope="module")
def measured():
    """Each row of the earlier file, measured here in half the time."""
    rows = [_ours(row) for row in SEED["results"]]
    return [r | {"median_ms": r["median_ms"] / 2} if "median_ms" in r else r for r in rows]


def test_each_row_of_the_other_file_has_a_line(measured):
    text = comparison.comparison(document_of(measured), SEED, "seed.json")
    assert max(len(line) for line in text.splitlines()) <= WIDTH
    lines = [line for line in text.splitlines() if re.search(r" (forward|train_step) ", line)]
    assert len(lines) == len(SEED["results"]) == 136
    with_times = [line.split()[-3:] for line in lines if not line.endswith("-")]
    assert len(with_times) == sum("median_ms" in row for row in SEED["results"]) == 134
    for ours, theirs, ratio in with_times:
        assert float(theirs) / float(ours) == pytest.approx(2, rel=2e-3)
        assert ratio == "2"
    for named in ("tjk / probjax_default", "tjk_flex / probjax_flex", "tjk / pallas", "jax_cudnn"):
        assert f" {named} " in text
    assert len([line for line in lines if "tjk / probjax " in line]) == 20 + 8
    assert text.count("41 of 42 rows of theirs have a time in ours, too") == 2


def test_other_card_is_said_and_no_mean_is_made_of_it(measured):
    text = comparison.comparison(document_of(measured), SEED, "seed.json")
    assert "Theirs: NVIDIA GeForce RTX 3090, seed.json" in text
    assert comparison.NO_SPEEDUP in text
    assert text.count("theirs / ours, cards differ") == 5
    assert "geometric mean" not in text


def test_same_card_is_no_other(measured):
    text = comparison.comparison(document_of(measured, **GPU), SEED, "seed.json")
    assert "cards differ" not in text
    assert comparison.NO_SPEEDUP not in text
    assert "geometric mean of theirs / ours for tjk: 2 (" in text


def test_cpus_of_unequal_size_are_two_cards(make_row):
    rows = [make_row(case_of())]
    two, four = (document_of(rows, cpu_cores=cores) for cores in (2, 4))
    assert groups.same_card(two, two)
    assert not groups.same_card(two, four)


def test_row_that_is_missing_or_failed_has_no_ratio(make_row):
    theirs = [make_row(case_of(tokens=tokens)) for tokens in (8, 16, 32)]
    ours = [make_row(case_of(tokens=8), 1.0), {**case_of(tokens=16), "error": "no"}]
    text = comparison.comparison(document_of(ours), document_of(theirs), "before.json")
    cells = {line.split()[0]: line.split()[-3:] for line in text.splitlines() if "forward" in line}
    assert cells == {"8": ["1", "2", "2"], "16": ["error", "2", "-"], "32": ["-", "2", "-"]}


def test_software_that_differs_is_named(make_row):
    rows = [make_row(case_of())]
    ours = document_of(rows) | {"versions": {"jax": "2", "numpy": "1"}}
    theirs = document_of(rows) | {"versions": {"jax": "1", "numpy": "1"}}
    text = comparison.comparison(ours, theirs, "before.json")
    assert "Software differs (ours / theirs): jax 2 / 1\n" in text
    assert "Software differs" not in comparison.comparison(ours, ours, "before.json")
