"""The report's steps: how they end, what is written, what a second run does."""

import json
import os
import time
from pathlib import Path

import pytest

from tools import gpu_report
from tools.gpu_report import Step, run

PASS = ("-c", "print('three\\nfour')")
FAIL = ("-c", "raise SystemExit('no')")
SLEEP = ("-c", "import time; print('began', flush=True); time.sleep(60)")


@pytest.fixture
def out(tmp_path):
    (tmp_path / "logs").mkdir()
    return tmp_path


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(gpu_report, "RESERVE", 0)


def statuses(results):
    return {name: result["status"] for name, result in results.items()}


def test_every_step_runs_and_is_logged(out):
    steps = [Step("good one", PASS), Step("bad", FAIL), Step("last", PASS)]
    results = run(steps, out, 60, {})
    assert statuses(results) == {"good one": "passed", "bad": "failed", "last": "passed"}
    assert results["good one"]["last line"] == "four"
    assert results["bad"]["last line"] == "no"
    assert (out / "logs" / "good_one.txt").read_text() == "three\nfour\n"
    assert json.loads((out / "summary.json").read_text()) == results
    assert "| good one | passed" in (out / "summary.md").read_text()


def test_time_cuts_a_step_and_leaves_out_the_rest(out):
    start = time.monotonic()
    steps = [
        Step("long", SLEEP, 0.05),
        Step("next", SLEEP, 0.05),
        Step("report", PASS, always=True),
    ]
    results = run(steps, out, 40, {})
    assert statuses(results) == {"long": "cut", "next": "not started", "report": "passed"}
    assert time.monotonic() - start < 30


def test_children_of_a_step_end_with_it(out):
    program = (
        "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', "
        "'import time; time.sleep(60)']); print(p.pid, flush=True); time.sleep(60)"
    )
    run([Step("parent", ("-c", program))], out, 6, {})
    child = int((out / "logs" / "parent.txt").read_text().split()[0])
    for _ in range(50):
        try:
            state = Path(f"/proc/{child}/stat").read_text().split()[2]
        except FileNotFoundError:
            return
        if state == "Z":  # ended, and nobody has asked for its status
            return
        time.sleep(0.1)
    pytest.fail("it still runs")


def test_second_run_continues(out):
    marks = out / "marks"
    program = f"open({str(marks)!r}, 'a').write('x')"
    steps = [Step("a", ("-c", program)), Step("b", FAIL), Step("c", ("-c", program), always=True)]
    first = run(steps, out, 60, {})
    second = run([*steps[:1], Step("b", PASS), steps[2]], out, 60, first)
    assert statuses(second) == {"a": "passed", "b": "passed", "c": "passed"}
    assert marks.read_text() == "xxx"  # a once, c each time


def test_main_reads_what_an_earlier_run_wrote(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_report, "matrix", lambda out: [Step("a", PASS), Step("b", FAIL)])
    out = tmp_path / "new" / "folder"
    assert gpu_report.main(["--out", str(out), "--minutes", "1"]) == 1
    assert "| a      | passed" in capsys.readouterr().out
    before = os.stat(out / "logs" / "a.txt").st_mtime_ns
    assert gpu_report.main(["--out", str(out)]) == 1
    assert os.stat(out / "logs" / "a.txt").st_mtime_ns == before


@pytest.mark.parametrize("text", ["[]", "{", '{"a": 1}', '{"a": {"status": null}}'])
def test_malformed_summary_is_refused_and_kept(tmp_path, capsys, text):
    (tmp_path / "summary.json").write_text(text)
    with pytest.raises(SystemExit) as error:
        gpu_report.main(["--out", str(tmp_path)])
    assert error.value.code == 2
    assert "is not a summary of this tool" in capsys.readouterr().err
    assert (tmp_path / "summary.json").read_text() == text


def test_unusable_options(tmp_path, capsys):
    (tmp_path / "file").touch()
    for arguments in (["--out", str(tmp_path / "file")], ["--out", str(tmp_path), "--minutes=0"]):
        with pytest.raises(SystemExit) as error:
            gpu_report.main(arguments)
        assert error.value.code == 2
    assert "must be above 0" in capsys.readouterr().err


def test_matrix_names_what_exists(tmp_path):
    folders = {p.name for p in (gpu_report.ROOT / "tests" / "ops").iterdir() if p.is_dir()}
    assert set(gpu_report.TESTS) == folders - {"__pycache__"}
    assert len(set(gpu_report.BENCH)) == 12
    names = [step.name for step in gpu_report.matrix(tmp_path)]
    assert len(set(names)) == len(names)
