"""The result file: read whole or not at all, written whole or not at all."""

import json
from pathlib import Path

import pytest

import bench
from bench import store, whole_file
from bench.case import Selection
from bench.suites import transformer

SEED = Path(bench.__file__).parent / "baselines" / "rtx3090_probjax.json"

UNET = {
    **{"suite": "unet", "impl": "tjk", "dtype": "float32", "resolution": 32, "batch": 8},
    **{"op": "forward", "median_ms": 1.5, "samples_ms": [1.0, 1.5, 2.0]},
}


def _of(rows, **others):
    """The text of a file of these rows."""
    return json.dumps({"device": {"device_kind": "A"}, "config": {}, "results": rows} | others)


@pytest.fixture
def document(make_row):
    cases = list(transformer.cases(Selection(full=False)))
    return {
        "schema_version": store.SCHEMA_VERSION,
        "device": {"device_kind": "cpu", "jax": "0.0.0"},
        "versions": {"jax": "0.0.0"},
        "git": {"commit": "f00", "dirty": False},
        "config": {"output": "a.json", "samples": 9},
        "results": [make_row(case) for case in cases[:3]],
    }


def test_written_file_reads_back_and_leaves_nothing_beside_it(tmp_path, document):
    path = tmp_path / "out.json"
    whole_file.check_writable(path)
    assert list(tmp_path.iterdir()) == []
    store.write(path, document)
    assert store.read(path) == document
    assert list(tmp_path.iterdir()) == [path]


def test_failed_write_keeps_the_old_file(tmp_path, document):
    path = tmp_path / "out.json"
    store.write(path, document)
    with pytest.raises(ValueError, match="nan"):
        store.write(path, {**document, "results": [{"median_ms": float("nan")}]})
    assert store.read(path) == document


@pytest.mark.parametrize("place", ["missing/out.json", "."])
def test_unwritable_path(tmp_path, place):
    with pytest.raises(whole_file.FileError, match="cannot write"):
        whole_file.check_writable(tmp_path / place)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (None, "cannot read"),
        ("{", "cannot read"),
        ("[]", "no dict named 'device'"),
        ('{"device": {}, "config": {}}', "no list named 'results'"),
        ('{"device": {}, "config": [], "results": []}', "no dict named 'config'"),
        ('{"device": {}, "config": {}, "results": []}', "its device has no name"),
        (_of([{}]), "row 0 names no suite"),
        (_of([], versions=[]), "its 'versions' is no dict"),
        (_of([UNET, UNET | {"suite": "gan"}]), "row 1 names the suite 'gan', which is none of"),
        (_of([UNET | {"resolution": "32"}]), "row 0 has '32' in resolution"),
        (_of([{k: v for k, v in UNET.items() if k != "batch"}]), "row 0 has None in batch"),
        (_of([UNET | {"impl": 3}]), "row 0 has 3 in impl"),
        (_of([UNET | {"error": 3}]), "row 0 has 3 in error"),
        (_of([UNET | {"median_ms": 0}]), "row 0 has 0 in median_ms"),
        (_of([UNET | {"median_ms": "fast"}]), "row 0 has 'fast' in median_ms"),
        (_of([UNET | {"samples_ms": 3.0}]), "row 0 has 3.0 in samples_ms"),
        (_of([UNET | {"samples_ms": [1.0, -1.0]}]), "row 0 has -1.0 in samples_ms"),
    ],
)
def test_malformed_file(tmp_path, text, complaint):
    path = tmp_path / "out.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(whole_file.FileError, match=complaint):
        store.read(path)


def test_rows_to_continue_are_found_by_case(tmp_path, document):
    path = tmp_path / "out.json"
    store.write(path, document)
    moved = {**document, "config": {**document["config"], "output": "elsewhere.json"}}
    rows = store.rows_to_continue(path, moved)
    assert list(rows.values()) == document["results"]
    assert ("transformer", "tjk", "float32", 256, 8, 256, "train_step") in rows


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"device": {"device_kind": "cpu", "jax": "0.0.1"}}, "device.jax is '0.0.0', now it is"),
        ({"device": {"device_kind": "gpu", "jax": "0.0.0"}}, "device.device_kind is 'cpu'"),
        ({"versions": {"jax": "1"}}, "versions.jax is '0.0.0', now it is '1'"),
        ({"git": {"commit": "f00", "dirty": True}}, "git.dirty is False, now it is True"),
        ({"config": {"samples": 3}}, "config.samples is 9, now it is 3"),
        ({"schema_version": 2}, "schema_version is 1, now it is 2"),
    ],
)
def test_rows_of_another_origin_are_not_continued(tmp_path, document, change, complaint):
    path = tmp_path / "out.json"
    store.write(path, document)
    before = path.read_bytes()
    with pytest.raises(whole_file.FileError, match=complaint):
        store.rows_to_continue(path, document | change)
    assert path.read_bytes() == before


@pytest.mark.parametrize("row", [{"suite": "transformer"}, {"suite": "unknown"}])
def test_rows_without_a_case_are_not_continued(tmp_path, document, row):
    path = tmp_path / "out.json"
    store.write(path, {**document, "results": [row]})
    with pytest.raises(whole_file.FileError, match="not a result file"):
        store.rows_to_continue(path, document)


def test_seed_file_reads_but_is_not_continued(document):
    assert len(store.read(SEED)["results"]) == 136
    with pytest.raises(whole_file.FileError, match="schema_version is None"):
        store.rows_to_continue(SEED, document)
