"""Candidates of warps and stages, run in Triton's interpreter."""

import json

import jax.numpy as jnp
import pytest

from tests.conftest import ON_GPU
from tjk.executors import target
from tools import tiles


@pytest.fixture(scope="module")
def launch():
    with target(86):
        chosen = next(t for t in tiles.targets(1, 16) if t.name == "linear")
        return tiles.launches(chosen, "float32")[0]


def test_every_target_has_launches_forward_and_backward():
    with target(86):
        for chosen in tiles.targets(2, 256):
            for dtype in ("float32", "bfloat16"):
                found = tiles.launches(chosen, dtype)
                assert len(found) >= 2, chosen.name
                assert len(set(found)) == len(found)


def test_candidates_are_the_launch_and_its_neighbours(launch):
    found = list(tiles.candidates(launch))
    assert found[0] is launch
    assert len(set(found)) == len(found) >= 3
    for candidate in found:
        assert 1 <= candidate.num_warps <= 16
        assert 1 <= candidate.num_stages <= 4


@pytest.mark.skipif(ON_GPU, reason="the interpreter's times")
def test_measure(launch):
    rows = tiles.measure(launch, 1)
    assert len(rows) == len(list(tiles.candidates(launch)))
    assert all(row["ms"] > 0 for row in rows)


@pytest.mark.skipif(ON_GPU, reason="the interpreter's times")
def test_candidates_with_other_outputs_have_no_time(launch, monkeypatch):
    runner = tiles._runner

    def wrong(candidate):
        function = runner(candidate)
        if candidate == launch:
            return function
        return lambda *inputs: [2 * y + 1 for y in function(*inputs)]

    monkeypatch.setattr(tiles, "_runner", wrong)
    first, *others = tiles.measure(launch, 1)
    assert "ms" in first
    assert all("differ" in row["error"] for row in others)


def test_candidates_that_fail_say_so(launch, monkeypatch):
    def broken(candidate):
        raise RuntimeError("out of shared memory")

    monkeypatch.setattr(tiles.executors, "run", broken)
    assert all(row["error"].startswith("RuntimeError: out of") for row in tiles.measure(launch, 1))


def test_nan_never_agrees_with_a_number():
    assert not tiles._agree(jnp.array([jnp.nan, 1.0]), jnp.ones(2))
    assert tiles._agree(jnp.ones(2), jnp.ones(2))


def test_summary_names_the_fastest():
    row = {
        "operation": "causal attention",
        "kernel": "forward",
        "candidates": [
            {"num_warps": 4, "num_stages": 2, "ms": 2.0},
            {"num_warps": 8, "num_stages": 2, "ms": 1.0},
            {"num_warps": 2, "num_stages": 2, "error": "OutOfResources"},
        ],
    }
    assert "8 warps, 2 stages" in tiles.summary([row])
    assert tiles.summary([{**row, "candidates": row["candidates"][2:]}]).count("\n") == 1


def test_main_writes_after_each_launch(tmp_path, monkeypatch, launch, capsys):
    path = tmp_path / "tiles.json"
    seen = []

    def measure(launch, samples):
        seen.append(len(json.loads(path.read_text())["launches"]) if path.exists() else 0)
        return [{"num_warps": 4, "num_stages": 2, "ms": 1.0}]

    monkeypatch.setattr(tiles, "measure", measure)
    with target(86):
        assert tiles.main(["--rehearse", "--out", str(path)]) == 0
    assert seen == list(range(len(seen)))
    assert len(json.loads(path.read_text())["launches"]) == len(seen) >= 4
    with pytest.raises(SystemExit):
        tiles.main(["--out", str(tmp_path)])
    assert "cannot write" in capsys.readouterr().err
