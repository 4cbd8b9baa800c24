"""Pictures and the report in Markdown: the command lines, on files made by hand."""

import json
import sys

import pytest
from matplotlib import image

from bench import pictures, plot, report
from bench.case import Selection
from bench.suites import SUITES
from tests.bench.documents import SEED_PATH, case_of, document_of


@pytest.fixture
def path(make_row, tmp_path):
    """A file of every suite's quick matrix, with a failure and a row that was skipped."""
    cases = [c for suite in SUITES.values() for c in suite.cases(Selection(full=False))]
    rows = [make_row(case, 1.0 + n) for n, case in enumerate(cases)]
    rows[0] = cases[0] | {"error": "OutOfMemory: a | b"}
    rows[1] = cases[1] | {"skipped": "cannot be"}
    path = tmp_path / "gpu_nn.json"
    path.write_text(json.dumps(document_of(rows)))
    return path


def test_each_suite_has_three_pictures(path, tmp_path, capsys):
    out = tmp_path / "deep" / "pictures"
    assert plot.main([str(path), "--out", str(out)]) == 0
    expected = {f"{s}_{what}.png" for s in SUITES for what in ("time", "speedup", "memory")}
    assert {file.name for file in out.iterdir()} == expected
    assert len(capsys.readouterr().out.splitlines()) == len(expected)
    for file in out.iterdir():
        pixels = image.imread(file)
        assert 400 < pixels.shape[1] < 2000
        assert pixels[..., :3].std() > 0.02  # not blank


def test_several_files_share_the_pictures(path, tmp_path):
    out = tmp_path / "pictures"
    assert plot.main([str(path), str(SEED_PATH), "--out", str(out)]) == 0
    assert (out / "transformer_time.png").exists()


def test_legend_names_card_and_implementation(path):
    documents = [json.loads(file.read_text()) for file in (path, SEED_PATH)]
    figure = pictures._figure("unet", pictures.TIME, ["a", "b"], documents)
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["A CPU, tjk", "A CPU, jax_xla", "NVIDIA GeForce RTX 3090, probjax"]
    axes = figure.axes[0]
    assert axes.get_ylabel() == "time, ms per call"
    assert axes.get_title() == "float32 forward"
    assert "unet (batch 8) on A CPU and NVIDIA GeForce RTX 3090" in figure.get_suptitle()


def test_file_without_times_has_no_picture(tmp_path, capsys):
    path = tmp_path / "empty.json"
    path.write_text(json.dumps(document_of([case_of() | {"error": "no"}])))
    assert plot.main([str(path), "--out", str(tmp_path / "pictures")]) == 1
    assert "no row of these files has a time" in capsys.readouterr().err


def test_failed_drawing_leaves_the_old_picture_and_nothing_else(path, tmp_path, monkeypatch):
    out = tmp_path / "pictures"
    out.mkdir()
    (out / "transformer_time.png").write_bytes(b"old")

    def fail(self, file, **options):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pictures.Figure, "savefig", fail)
    with pytest.raises(SystemExit) as stopped:
        plot.main([str(path), "--out", str(out)])
    assert stopped.value.code == 2
    assert [file.name for file in out.iterdir()] == ["transformer_time.png"]
    assert (out / "transformer_time.png").read_bytes() == b"old"


def test_missing_matplotlib_is_said(path, tmp_path, monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "bench.pictures")
    monkeypatch.delattr("bench.pictures")
    monkeypatch.setitem(sys.modules, "matplotlib.axes", None)
    with pytest.raises(SystemExit) as stopped:
        plot.main([str(path), "--out", str(tmp_path / "pictures")])
    assert stopped.value.code == 2
    assert "pip install matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize("main", [plot.main, report.main])
def test_wrong_files_are_refused(path, main, tmp_path, capsys):
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    for arguments in ([str(broken)], [str(tmp_path / "missing.json")]):
        with pytest.raises(SystemExit) as stopped:
            main([*arguments, "--out", str(tmp_path / "out")])
        assert stopped.value.code == 2
        assert "cannot read" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([str(path), "--out", str(path / "below")])
    assert "cannot write" in capsys.readouterr().err


def test_report_in_markdown(path, tmp_path, capsys):
    out = tmp_path / "report.md"
    assert report.main([str(path), str(SEED_PATH), "--out", str(out)]) == 0
    text = out.read_text()
    assert report.main([str(path), str(SEED_PATH)]) == 0
    assert capsys.readouterr().out == text
    for suite in SUITES:
        assert f"\n## {suite} [1]\n" in text
    assert "\n## transformer [2]\n" in text
    assert "**The cards differ" in text
    assert "OutOfMemory: a | b" in text
    tables = [part for part in text.split("\n\n") if part.startswith("|")]
    assert len(tables) == 1 + len(SUITES) + 5 + 5
    for table in tables:
        lines = table.replace("\\|", "").splitlines()
        assert len({line.count("|") for line in lines}) == 1, table
    assert "| 41.0 |" not in text
    assert sum(line.startswith("|") for line in text.splitlines()) > 136 + 127
