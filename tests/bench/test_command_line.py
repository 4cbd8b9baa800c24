"""`python -m bench`: every option, what survives a kill, and exit statuses."""

import collections
import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import bench
import bench.__main__
from bench.__main__ import main
from bench.check import CheckFailed
from bench.suites import moe, transformer

ROOT = Path(bench.__file__).parents[1]
SEED = ROOT / "bench" / "baselines" / "rtx3090_probjax.json"
pytestmark = pytest.mark.usefixtures("two_blocks")

CASE_FIELDS = ("suite", *transformer.FIELDS)
# The seed has ssm in float32 only, and one implementation of ssm and unet.
FULL = 42 + 42 + 24 + 20 * 4 + 8 * 2 + 192
QUICK = {"transformer": 17, "diffusion": 10, "moe": 9, "ssm": 30, "unet": 6, "attention": 32}
TINY = ["--tokens", "8", "--batch", "1", "--model-dim", "16", "--samples", "2"]


def results(path):
    return json.loads(path.read_text())["results"]


def sizes(asked):
    return [
        (c["attention"], c["dtype"], c["tokens"], c["batch"], c["model_dim"], c["op"])
        for c, _ in asked
    ]


def usage_error(capsys, *arguments):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    return capsys.readouterr().err


def table_of(document):
    """A reader of the seed's file: what it needs it takes by name, and rows may be errors."""
    assert document["device"]["gpu"] or document["device"]["backend"] == "cpu"
    assert document["config"]["batch"] + document["config"]["model_dim"] > 0
    fields = ("suite", "attention", "dtype", "tokens", "batch", "model_dim", "op", "params")
    times = ("finite", "compile_s", "inner", "median_ms", "q1_ms", "q3_ms")
    return {
        tuple(row[field] for field in fields): row.get("error") or [row[time] for time in times]
        for row in document["results"]
        if row["suite"] == "transformer"
    }


def test_run_measures_writes_and_reports(make_row, tmp_path, capsys):
    path = tmp_path / "gpu_nn.json"
    selected = [
        "--suite",
        "transformer",
        "--dtype",
        "bfloat16",
        "--implementation",
        "tjk",
        "--implementation",
        "jax_xla",
    ]
    assert main([*TINY, *selected, "--out", str(path), "--compare", str(SEED)]) == 0
    document, seed = json.loads(path.read_text()), json.loads(SEED.read_text())
    assert document["schema_version"] == 1
    assert document["device"]["backend"] == "cpu"
    assert document["device"]["cpu_cores"] == os.cpu_count()
    assert document["versions"]["jax"] == jax.__version__
    assert set(document["versions"]) >= {"python", "jaxlib", "jax_triton", "triton", "tjk"}
    assert set(document["git"]) == {"commit", "dirty"}
    assert document["config"] == {
        "output": str(path),
        "suites": ["transformer"],
        "dtypes": ["bfloat16"],
        "tokens": [8],
        "batch": 1,
        "model_dim": 16,
        "implementations": ["tjk", "jax_xla"],
        "samples": 2,
        "matrix": "quick",
    }
    assert [(row["attention"], row["op"], len(row["samples_ms"])) for row in results(path)] == [
        ("tjk", "forward", 2),
        ("tjk", "train_step", 2),
        ("jax_xla", "forward", 2),
        ("jax_xla", "train_step", 2),
    ]
    printed = capsys.readouterr()
    assert "geometric mean of the speedups over jax_xla" in printed.out
    assert f"Theirs: NVIDIA GeForce RTX 3090, {SEED}" in printed.out
    assert "0 of 42 rows of theirs have a time in ours, too" in printed.out
    assert "4/4" in printed.err

    assert (len(table_of(seed)), len(table_of(document))) == (42, 4)
    seed_row = next(row for row in seed["results"] if row["suite"] == "transformer")
    for row in document["results"]:
        assert list(row)[: len(seed_row)] == list(seed_row)
        assert list(row) == list(make_row({field: row[field] for field in CASE_FIELDS}))
        assert [type(row[key]) for key in seed_row] == [type(value) for value in seed_row.values()]
    assert {k for k in seed["device"] if not k.startswith("torch")} <= set(document["device"])


def test_run_of_the_moe_suite(make_row, tmp_path, capsys):
    path = tmp_path / "gpu_nn.json"
    tiny = ["--suite", "moe", "--tokens", "8", "--model-dim", "16", "--samples", "2"]
    selected = ["--dtype", "float32", "--implementation", "tjk", "--implementation", "blocked"]
    assert main([*tiny, *selected, "--out", str(path), "--compare", str(SEED)]) == 0
    config = json.loads(path.read_text())["config"]
    sizes = {"experts": 8, "top_k": 2, "d_model": 16, "d_hidden": 32}
    assert {name: config[name] for name in sizes} == sizes
    assert not {"batch", "model_dim"} & config.keys()
    assert config["tokens"] == [8]
    assert config["implementations"] == ["tjk", "blocked"]
    assert [(row["impl"], row["op"], row["params"]) for row in results(path)] == [
        (impl, op, 16 * 8 + 3 * 8 * 16 * 32)
        for impl in ("tjk", "blocked")
        for op in ("forward", "train_step")
    ]
    seed_row = next(r for r in json.loads(SEED.read_text())["results"] if r["suite"] == "moe")
    for row in results(path):
        assert list(row)[: len(seed_row)] == list(seed_row)
        assert list(row) == list(make_row({field: row[field] for field in ("suite", *moe.FIELDS)}))
        assert [type(row[key]) for key in seed_row] == [type(value) for value in seed_row.values()]
    printed = capsys.readouterr().out
    assert "geometric mean of the speedups over blocked" in printed
    assert "0 of 8 rows of theirs have a time in ours, too" in printed


def test_quick_matrix_is_the_default_on_a_cpu_and_full_is_asked_for(measured):
    main([])
    assert collections.Counter(case["suite"] for case, _ in measured) == QUICK
    measured.clear()
    main(["--quick"])
    assert len(measured) == sum(QUICK.values())
    measured.clear()
    main(["--full"])
    assert len(measured) == FULL


def test_full_matrix_is_the_default_on_a_gpu(measured, monkeypatch):
    monkeypatch.setattr(bench.__main__.jax, "default_backend", lambda: "gpu")
    main([])
    assert len(measured) == FULL


def test_options_that_select_may_be_repeated(measured):
    selected = ["--suite", "transformer", "--suite", "transformer", "--samples", "4"]
    for option, values in {
        "--dtype": ("bfloat16", "float32"),
        "--tokens": ("8", "16", "8"),
        "--batch": ("1", "2"),
        "--model-dim": ("32", "64"),
        "--implementation": ("jax_xla", "tjk"),
    }.items():
        selected += [word for value in values for word in (option, value)]
    main(selected)
    assert {samples for _, samples in measured} == {4}
    assert sorted(sizes(measured)) == sorted(
        (attention, dtype, tokens, batch, width, op)
        for attention in ("tjk", "jax_xla")
        for dtype in ("float32", "bfloat16")
        for tokens in (8, 16)
        for batch in (1, 2)
        for width in (32, 64)
        for op in ("forward", "train_step")
    )


def test_without_out_nothing_is_written(measured, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([]) == 0
    assert list(tmp_path.iterdir()) == []
    assert "geometric mean" in capsys.readouterr().out


def test_list_and_dry_run_measure_nothing(measured, tmp_path, capsys):
    path = tmp_path / "out.json"
    assert main(["--list"]) == 0
    listed = capsys.readouterr().out
    assert "suite transformer: attention tjk, tjk_flex, jax_xla, jax_cudnn" in listed
    assert "full: 42 rows, tokens 256, 1024, 4096" in listed
    assert "suite moe: impl tjk, blocked, ragged_dot" in listed
    assert "full: 24 rows, tokens 4096, 32768\n  quick: 9 rows, tokens 2048" in listed
    assert main(["--dry-run", "--out", str(path)]) == 0
    planned = capsys.readouterr().out.splitlines()
    assert len(planned) == sum(QUICK.values())
    assert planned[0] == "transformer tjk float32 256 8 256 forward: run"
    assert planned[17 + 10] == "moe tjk float32 2048 8 2 512 1024 forward: run"
    assert "unet tjk float32 32 8 forward: run" in planned
    assert sum("skip (cuDNN needs an NVIDIA GPU" in line for line in planned) == 2 + 1 + 4
    assert measured == []
    assert not path.exists()


def test_resume_runs_what_failed_or_is_missing(measured, tmp_path, capsys):
    path = tmp_path / "out.json"
    assert main(["--out", str(path)]) == 0
    document = json.loads(path.read_text())
    kept = document["results"]
    failed = {k: v for k, v in kept[1].items() if not k.endswith("_ms")} | {"error": "X: lost"}
    document["results"] = [kept[0], failed, *kept[3:]]
    path.write_text(json.dumps(document))
    measured.clear()
    assert main(["--out", str(path), "--resume", "--dry-run"]) == 0
    planned = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[-1] for line in planned[-len(kept) :]] == [
        "kept",
        "run",
        "run",
        *["kept"] * (len(kept) - 3),
    ]
    assert main(["--out", str(path), "--resume"]) == 0
    assert [case["op"] for case, _ in measured] == ["train_step", "forward"]
    assert results(path) == kept
    assert all("error" not in row for row in results(path))


def test_resume_of_a_missing_file_starts_one(measured, tmp_path):
    path = tmp_path / "out.json"
    assert main(["--out", str(path), "--resume"]) == 0
    assert len(results(path)) == len(measured) == sum(QUICK.values())


def test_resume_continues_no_other_sizes(measured, tmp_path, capsys):
    path = str(tmp_path / "out.json")
    assert main(["--suite", "moe", "--model-dim", "16", "--out", path]) == 0
    complaint = usage_error(
        capsys, "--suite", "moe", "--model-dim", "32", "--out", path, "--resume"
    )
    assert "its config.d_model is 16, now it is 32" in complaint
    complaint = usage_error(capsys, "--model-dim", "16", "--out", path, "--resume")
    assert "its config.suites is ['moe'], now it is ['transformer', 'diffusion'" in complaint


def test_full_disk_ends_the_run_and_keeps_the_file(measured, tmp_path, monkeypatch, capsys):
    path = tmp_path / "out.json"
    synced = []

    def fsync(descriptor):
        synced.append(descriptor)
        if len(synced) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    assert main(["--out", str(path)]) == 2
    assert "cannot write" in (complaint := capsys.readouterr().err)
    assert "No space left on device" in complaint
    assert len(results(path)) == 6
    assert list(tmp_path.iterdir()) == [path]


def test_files_that_cannot_be_used_stop_before_any_measuring(measured, tmp_path, capsys):
    path = tmp_path / "out.json"
    path.write_text("{")
    assert "cannot read" in usage_error(capsys, "--out", str(path), "--resume")
    assert path.read_text() == "{"
    assert "cannot read" in usage_error(capsys, "--compare", str(path))
    nowhere = str(tmp_path / "missing" / "out.json")
    assert "cannot write" in usage_error(capsys, "--out", nowhere)
    assert "--resume needs --out" in usage_error(capsys, "--resume")
    path.write_text(SEED.read_text())
    assert "schema_version" in usage_error(capsys, "--out", str(path), "--resume")
    assert path.read_text() == SEED.read_text()
    assert measured == []


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--suite", "unknown"], "invalid choice: 'unknown'"),
        (["--dtype", "float8"], "invalid choice: 'float8'"),
        (["--tokens", "0"], "must be at least 1, got 0"),
        (["--samples", "many"], "invalid"),
        (["--full", "--quick"], "not allowed with"),
        (["--dtype", "float32", "--implementation", "jax_cudnn"], "no case of the matrix"),
        (["--suite", "moe", "--batch", "4"], "no case of the matrix"),
        (["--suite", "moe", "--implementation", "jax_xla"], "no case of the matrix"),
    ],
)
def test_wrong_options(measured, capsys, arguments, complaint):
    assert complaint in usage_error(capsys, *arguments)
    assert measured == []


@pytest.mark.parametrize(
    ("failing", "status"),
    [
        ({"train_step": "OutOfMemory: 24 GiB"}, 0),
        ({"train_step": f"{CheckFailed.__name__}: output: error 1 exceeds 0.1"}, 1),
        ({"train_step": "OutOfMemory: 24 GiB", "forward": "OutOfMemory: 24 GiB"}, 1),
    ],
)
def test_exit_status(monkeypatch, make_row, failing, status, capsys):
    def measure(cases, samples, checker):
        error = failing.get(cases[0]["op"])
        return [make_row(case) if error is None else {**case, "error": error} for case in cases]

    monkeypatch.setattr(bench.__main__, "measure", measure)
    assert main([]) == status
    assert "error" in capsys.readouterr().out


def test_failing_case_does_not_stop_the_run(monkeypatch, tmp_path):
    real = transformer.problem

    def problem(case):
        if case["attention"] == "tjk" or case["op"] == "train_step":
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return real(case)

    monkeypatch.setattr(transformer, "problem", problem)
    path = tmp_path / "out.json"
    assert main([*TINY, "--suite", "transformer", "--dtype", "bfloat16", "--out", str(path)]) == 0
    reason = "RuntimeError: RESOURCE_EXHAUSTED: out of memory"
    assert [row.get("error") for row in results(path)] == [
        *(reason, reason),  # tjk
        *(None, reason),  # tjk_flex
        *(None, reason),  # jax_xla
        *(None, None),  # jax_cudnn
    ]
    assert ["median_ms" in row for row in results(path)] == [row in (2, 4) for row in range(8)]
    assert ["skipped" in row for row in results(path)] == [row >= 6 for row in range(8)]


def test_interrupt_keeps_the_rows(monkeypatch, make_row, tmp_path, capsys):
    def measure(cases, samples, checker):
        if cases[0]["op"] == "train_step":
            raise KeyboardInterrupt
        return [make_row(case) for case in cases]

    monkeypatch.setattr(bench.__main__, "measure", measure)
    path = tmp_path / "out.json"
    assert main(["--out", str(path)]) == 130
    assert [row["attention"] for row in results(path)] == ["tjk", "tjk_flex", "jax_xla"]
    assert "--resume continues" in capsys.readouterr().err


PROGRAM = """
import os, signal, sys
import bench.__main__ as program

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def measure(cases, samples, checker):
    for case in cases:
        print(*case.values())
    if os.environ["DIES"] == "measuring" and case["tokens"] == 1024:
        die()
    return [{**case, "median_ms": 1.0} for case in cases]

def fsync(descriptor):
    if os.environ["DIES"] == "writing" and len(document["results"]) == 6:
        die()

def write(path, given, write=program.store.write):
    global document
    document = given
    write(path, given)

program.measure, program.store.write, os.fsync = measure, write, fsync
sys.exit(program.main(sys.argv[1:]))
"""


def run_program(path, *arguments, dies):
    environment = {**os.environ, "DIES": dies, "JAX_PLATFORMS": "cpu"}
    suites = ["--suite", "transformer", "--suite", "moe", "--dtype", "float32"]
    command = [sys.executable, "-c", PROGRAM, *suites, "--out", str(path), *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(("dies", "rows"), [("measuring", 6), ("writing", 3)])
def test_file_survives_a_kill_and_resumes(tmp_path, dies, rows):
    path = tmp_path / "out.json"
    killed = run_program(path, dies=dies)
    assert killed.returncode == -9, killed.stderr
    assert len(results(path)) == rows
    resumed = run_program(path, "--resume", dies="never")
    assert resumed.returncode == 0, resumed.stderr
    suites = ("transformer ", "moe ")
    ran = [line for line in resumed.stdout.splitlines() if line.startswith(suites)]
    assert len([line for line in ran if "(" not in line]) == 15 - rows
    assert len(results(path)) == 15
    assert os.listdir(tmp_path) == ["out.json"]
