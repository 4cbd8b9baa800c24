"""One command for a machine with a GPU that nobody has prepared.

    python -m tools.gpu_report --out DIR --minutes 8

It runs the native tests, the benchmark's matrix and candidates of tile sizes, each in a process of
its own and the most important first, until the time is used. Everything is written as it goes:
`summary.md` says at any moment what ran and how it ended, so that a run that was cut is a result.
Running it again with the same DIR continues. It needs what `pip install '.[cuda13,test]'` brings,
and a checkout, because the tests are not installed.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate
from tqdm import tqdm

from bench.whole_file import FileError, check_writable, replacing

ROOT = Path(__file__).parents[1]

# Folders of tests/ops, and the benchmark's suites with their dtype: first what most depends on.
TESTS = (
    *("attention", "selective", "ssd", "delta_rule", "linear", "grouped", "moe"),
    *("convolution", "normalization", "decode", "routing"),
)
BENCH = (
    *(("transformer", "bfloat16"), ("ssm", "bfloat16"), ("moe", "bfloat16")),
    *(("attention", "bfloat16"), ("transformer", "float32"), ("ssm", "float32")),
    *(("moe", "float32"), ("diffusion", "bfloat16"), ("unet", "bfloat16")),
    *(("diffusion", "float32"), ("unet", "float32"), ("attention", "float32")),
)
# Shares of the time after which tests, and then the benchmark, leave the rest to what follows.
TESTS_UNTIL, BENCH_UNTIL = 0.35, 0.85
# Seconds kept for report and pictures, and those that an interrupted process has to end.
RESERVE, GRACE = 25, 5


@dataclass(frozen=True)
class Step:
    """A process to run.

    Attributes:
        name: of the step, and of its log.
        command: arguments of this Python.
        until: share of the time after which it is interrupted.
        environment: what it gets besides ours.
        always: whether to run it however little time is left, and again although it passed.
    """

    name: str
    command: tuple[str, ...]
    until: float = 1.0
    environment: tuple[tuple[str, str], ...] = ()
    always: bool = False


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.gpu_report",
        description="Tests, measures and tunes on the GPU that is here, as far as the time goes.",
        epilog="Exit status: 0 when nothing failed; 1 when a step did; 2 for unusable options. "
        "docs/gpu_report.md describes what is written.",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for everything")
    parser.add_argument("--minutes", type=float, default=8.0, help="in all (default: %(default)g)")
    parser.add_argument(
        "--rehearse", action="store_true", help="a little of each step, on the CPU, in minutes"
    )
    options = parser.parse_args(arguments)
    if not options.minutes > 0:
        parser.error("--minutes must be above 0")
    options.out = options.out.resolve()  # the processes run in the checkout
    try:
        for folder in (options.out, options.out / "logs"):
            folder.mkdir(parents=True, exist_ok=True)
        check_writable(options.out / "summary.json")
        done = _read(options.out / "summary.json")
        steps = rehearsal(options.out) if options.rehearse else matrix(options.out)
        results = run(steps, options.out, 60 * options.minutes, done)
    except (FileError, OSError) as error:
        parser.error(str(error))
    print((options.out / "summary.md").read_text(encoding="utf-8"))
    return 1 if any(r["status"] == "failed" for r in results.values()) else 0


def matrix(out: Path) -> list[Step]:
    """Everything, in order of importance."""
    parallel = f"--numprocesses={min(8, os.cpu_count() or 1)}"
    shared = (("XLA_PYTHON_CLIENT_PREALLOCATE", "false"),)  # several test processes, one card
    return [
        _machine(out),
        *(_tests(folder, (parallel, "--dist=loadfile"), shared) for folder in TESTS),
        *(_bench(out, suite, dtype) for suite, dtype in BENCH),
        Step("tiles", ("-m", "tools.tiles", "--out", str(out / "tiles.json"))),
        *_reports(out),
    ]


def rehearsal(out: Path) -> list[Step]:
    """A step of each kind that a CPU can run."""
    small = ("--tokens=16", "--batch=1", "--samples=2", "--model-dim=16")
    interpreted = (("TRITON_INTERPRET", "1"), ("JAX_PLATFORMS", "cpu"))
    tiles = ("-m", "tools.tiles", "--rehearse", "--out", str(out / "tiles.json"))
    return [
        _machine(out),
        _tests("convolution", ("-k", "test_wrong_arguments")),
        *(_bench(out, "transformer", dtype, small) for dtype in ("float32", "bfloat16")),
        Step("tiles", tiles, environment=interpreted),
        *_reports(out),
    ]


def _machine(out: Path) -> Step:
    program = (
        "import json, sys; from bench import machine; json.dump({'device': machine.device(), "
        "'versions': machine.versions(), 'git': machine.git()}, open(sys.argv[1], 'w'), indent=2)"
    )
    return Step("machine", ("-c", program, str(out / "machine.json")))


def _tests(
    folder: str, options: tuple[str, ...], environment: tuple[tuple[str, str], ...] = ()
) -> Step:
    command = ("-m", "pytest", "--quiet", f"tests/ops/{folder}", *options)
    return Step(f"tests {folder}", command, TESTS_UNTIL, environment)


def _bench(out: Path, suite: str, dtype: str, options: tuple[str, ...] = ()) -> Step:
    path = str(out / f"bench_{suite}_{dtype}.json")
    chosen = ("--suite", suite, "--dtype", dtype, *options, "--resume", "--out", path)
    return Step(f"bench {suite} {dtype}", ("-m", "bench", *chosen), BENCH_UNTIL)


def _reports(out: Path) -> list[Step]:
    """Of the result files there are once everything else has run."""
    program = (
        "import pathlib, runpy, sys; name, out, *rest = sys.argv[1:]; "
        "files = sorted(map(str, pathlib.Path(out).glob('bench_*.json'))); "
        "sys.argv = [name, *files, *rest]; runpy.run_module(name, run_name='__main__')"
    )
    return [
        Step(kind, ("-c", program, f"bench.{kind}", str(out), "--out", str(path)), always=True)
        for kind, path in (("report", out / "report.md"), ("plot", out / "pictures"))
    ]


def run(
    steps: Sequence[Step], out: Path, seconds: float, done: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Runs what has not passed yet, and writes the summary after each step.

    Args:
        steps: in order.
        out: folder of the summary and the logs.
        seconds: for all of them.
        done: results of an earlier run.

    Returns:
        By name {"status", "seconds", "last line"}; the status is "passed", "failed", "cut" (by the
        time) or "not started".
    """
    start = time.monotonic()
    results = {s.name: done.get(s.name, {"status": "not started"}) for s in steps}
    _write(out, results)
    for step in (progress := tqdm(steps, unit="step", file=sys.stderr)):
        progress.set_postfix_str(step.name)
        if results[step.name]["status"] == "passed" and not step.always:
            continue
        end = seconds if step.always else min(step.until * seconds, seconds - RESERVE)
        left = start + end - time.monotonic()
        if left > 0 or step.always:
            results[step.name] = _run(step, out, max(left, RESERVE) if step.always else left)
        _write(out, results)
    return results


def _run(step: Step, out: Path, seconds: float) -> dict[str, Any]:
    start, log = time.monotonic(), out / "logs" / f"{step.name.replace(' ', '_')}.txt"
    with open(log, "w", encoding="utf-8") as file:
        process = subprocess.Popen(
            [sys.executable, *step.command],
            cwd=ROOT,
            env=os.environ | dict(step.environment),
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that its own children end with it
        )
        try:
            status = "failed" if process.wait(seconds) else "passed"
        except subprocess.TimeoutExpired:
            status = "cut"
        finally:
            _end(process)
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return {
        "status": status,
        "seconds": round(time.monotonic() - start, 1),
        "last line": next((line for line in reversed(lines) if line.strip()), "")[:200],
    }


def _end(process: subprocess.Popen) -> None:
    """Ends the process and its children: interrupted first, so that they can leave in order."""
    for stop in (signal.SIGINT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):  # all of them have ended
            os.killpg(process.pid, stop)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """The results of an earlier run; raises FileError for a file that is not a summary."""
    if not path.exists():
        return {}
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        if not all(isinstance(result["status"], str) for result in results.values()):
            raise TypeError("a status is not a string")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FileError(f"{path} is not a summary of this tool: {error}") from None
    return results


def _write(out: Path, results: dict[str, dict[str, Any]]) -> None:
    rows = [{"step": name, **result} for name, result in results.items()]
    table = tabulate(rows, headers="keys", tablefmt="github")
    for name, text in (("summary.json", json.dumps(results, indent=2)), ("summary.md", table)):
        with replacing(out / name) as file:
            file.write(f"{text}\n".encode())


if __name__ == "__main__":
    sys.exit(main())
