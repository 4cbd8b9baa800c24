"""The command line: `python -m bench --help`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from bench import machine, store
from bench.case import DTYPES, OPS, Case, Selection
from bench.check import Checker
from bench.measure import measure
from bench.report import report
from bench.suites import SUITES, key, ssm
from bench.whole_file import FileError, check_writable

IMPLEMENTATIONS = tuple(dict.fromkeys(i for s in SUITES.values() for i in s.IMPLEMENTATIONS))

DESCRIPTION = "Times the model suites, ours against plain JAX's, and prints tables."
EPILOG = """\
--suite, --dtype, --tokens, --resolution, --batch, --model-dim, --cell and --implementation may be
repeated.
Exit status: 0 when a row was measured and no check failed; 1 when none was, or a result was
outside its error budget; 2 for options or files that cannot be used; 130 when interrupted.
docs/benchmark.md describes the method and the file."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.list:
        print(_listing())
        return 0
    if options.resume and options.out is None:
        parser.error("--resume needs --out")
    selection = _selection(options)
    cases = [
        case
        for name in dict.fromkeys(options.suite or SUITES)
        for case in SUITES[name].cases(selection)
    ]
    if not cases:
        parser.error("no case of the matrix matches these options: see --list")
    try:
        other = store.read(options.compare) if options.compare else None
        document = _header(cases, selection, options)
        rows = {}
        if options.resume and options.out.exists():
            rows = store.rows_to_continue(options.out, document)
        if options.out is not None and not options.dry_run:
            check_writable(options.out)
    except FileError as error:
        parser.error(str(error))
    todo = [case for case in cases if "median_ms" not in rows.get(key(case), {})]
    if options.dry_run:
        print(_plan(cases, todo))
        return 0
    try:
        _run(cases, todo, rows, document, options)
    except KeyboardInterrupt:
        print("interrupted: --resume continues", file=sys.stderr)
        return 130
    except FileError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    print(report(document, other, str(options.compare)))
    return _status(document["results"])


def _run(
    cases: list[Case],
    todo: list[Case],
    rows: dict[tuple, dict[str, Any]],
    document: store.Document,
    options: argparse.Namespace,
) -> None:
    checker = Checker()
    document["results"] = list(rows.values())
    with tqdm(total=len(todo), unit="row", file=sys.stderr) as progress:
        for group in _groups(todo):
            progress.set_postfix_str(" ".join(str(value) for value in _case_key(group[0])))
            rows |= {key(row): row for row in measure(group, options.samples, checker)}
            document["results"] = [rows[key(case)] for case in cases if key(case) in rows]
            if options.out is not None:
                store.write(options.out, document)
            progress.update(len(group))


def _groups(cases: list[Case]) -> list[list[Case]]:
    """The cases that differ in the implementation only, together, in the order of their first."""
    groups: dict[tuple, list[Case]] = {}
    for case in cases:
        groups.setdefault(_case_key(case), []).append(case)
    return list(groups.values())


def _case_key(case: Case) -> tuple:
    return key(case, without=(SUITES[case["suite"]].KEY,))


def _status(rows: list[dict[str, Any]]) -> int:
    measured = any("median_ms" in row for row in rows)
    failed = any(row.get("error", "").startswith("CheckFailed") for row in rows)
    return 0 if measured and not failed else 1


def _selection(options: argparse.Namespace) -> Selection:
    full = options.full or (not options.quick and jax.default_backend() == "gpu")
    return Selection(
        full=full,
        dtypes=tuple(dict.fromkeys(options.dtype)),
        tokens=tuple(dict.fromkeys(options.tokens)),
        resolutions=tuple(dict.fromkeys(options.resolution)),
        batch=tuple(dict.fromkeys(options.batch)),
        model_dim=tuple(dict.fromkeys(options.model_dim)),
        cells=tuple(dict.fromkeys(options.cell)),
        implementations=tuple(dict.fromkeys(options.implementation)),
    )


def _header(cases: list[Case], selection: Selection, options: argparse.Namespace) -> store.Document:
    def values(field: str) -> list[Any]:
        return list(dict.fromkeys(case[field] for case in cases if field in case))

    def one_or_all(field: str) -> Any:
        return values(field)[0] if len(values(field)) == 1 else values(field)

    sizes = dict.fromkeys(
        field
        for case in cases
        for field in case
        if field not in ("suite", SUITES[case["suite"]].KEY, "dtype", "tokens", "op")
    )
    return {
        "schema_version": store.SCHEMA_VERSION,
        "device": machine.device(),
        "versions": machine.versions(),
        "git": machine.git(),
        "config": {
            "output": None if options.out is None else str(options.out),
            "suites": values("suite"),
            "dtypes": values("dtype"),
            "tokens": values("tokens"),
            **{size: one_or_all(size) for size in sizes},
            "implementations": list(
                dict.fromkeys(case[SUITES[case["suite"]].KEY] for case in cases)
            ),
            "samples": options.samples,
            "matrix": "full" if selection.full else "quick",
        },
        "results": [],
    }


def _plan(cases: list[Case], todo: list[Case]) -> str:
    def what(case: Case) -> str:
        if case not in todo:
            return "kept"
        reason = SUITES[case["suite"]].unavailable(case, jax.default_backend())
        return "run" if reason is None else f"skip ({reason})"

    return "\n".join(f"{' '.join(str(v) for v in key(case))}: {what(case)}" for case in cases)


def _listing() -> str:
    lines = [f"dtypes: {', '.join(DTYPES)}", f"operations: {', '.join(OPS)}"]
    for name, suite in SUITES.items():
        lines.append(f"suite {name}: {suite.KEY} {', '.join(suite.IMPLEMENTATIONS)}")
        for matrix, full in (("full", True), ("quick", False)):
            cases = list(suite.cases(Selection(full=full)))
            size = "tokens" if "tokens" in suite.FIELDS else "resolution"
            sizes = dict.fromkeys(str(case[size]) for case in cases)
            lines.append(f"  {matrix}: {len(cases)} rows, {size} {', '.join(sizes)}")
    return "\n".join(lines)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    def select(option: str, text: str, **kwargs: Any) -> None:
        parser.add_argument(option, action="append", default=[], help=text, **kwargs)

    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write results here, after every row"
    )
    select("--suite", "models to time (default: all)", choices=tuple(SUITES))
    select("--dtype", "of activations and operands (default: both)", choices=DTYPES)
    select("--tokens", "number of tokens, both operations", type=_positive, metavar="T")
    select("--resolution", "of images, both operations", type=_positive, metavar="R")
    select("--batch", "batch size, of suites that have one", type=_positive, metavar="B")
    select("--model-dim", "model width (default: the suite's)", type=_positive, metavar="D")
    select("--cell", "of the ssm suite (default: all)", choices=ssm.CELLS)
    select("--implementation", "ours or a baseline (default: all)", choices=IMPLEMENTATIONS)
    parser.add_argument(
        "--samples", type=_positive, default=9, metavar="N", help="per row (default: 9)"
    )
    matrix = parser.add_mutually_exclusive_group()
    matrix.add_argument("--full", action="store_true", help="whole matrix (default on a GPU)")
    matrix.add_argument("--quick", action="store_true", help="minutes on a CPU (default there)")
    parser.add_argument(
        "--resume", action="store_true", help="keep the measured rows that --out already has"
    )
    parser.add_argument("--dry-run", action="store_true", help="list what would run, run nothing")
    parser.add_argument("--list", action="store_true", help="list suites and implementations")
    parser.add_argument(
        "--compare", type=Path, metavar="FILE", help="compare with every row of another result file"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
