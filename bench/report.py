"""Tables for a terminal, and `python -m bench.report`: result files as a report in Markdown."""

import argparse
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from bench import cells, groups, machine, store
from bench.cells import WIDTH
from bench.comparison import comparison
from bench.groups import Groups
from bench.markdown import markdown
from bench.store import Document
from bench.whole_file import FileError, replacing

INTERVAL = "±: to the farther end of the 95 % confidence interval"
SPREAD = f"~: the quartiles are more than {cells.WIDE} of the median apart"


def report(document: Document, other: Document | None = None, other_name: str = "") -> str:
    """One table per suite of the document; then, if there is another, the comparison with it."""
    parts = [_suite(name, document) for name in groups.suites(document["results"])]
    parts += _failures(document)
    if other is not None:
        parts.append(comparison(document, other, other_name))
    return "\n\n".join(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line of `python -m bench.report` and returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.report",
        description="Writes result files as one report in Markdown.",
        epilog="Exit status: 0; 2 for options or files that cannot be used.",
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="result files")
    parser.add_argument("--out", type=Path, metavar="FILE.md", help="write here, not to the output")
    options = parser.parse_args(arguments)
    try:
        names = [str(path) for path in options.files]
        text = markdown(names, [store.read(path) for path in options.files])
        if options.out is None:
            print(text)
        else:
            with replacing(options.out) as file:
                file.write(f"{text}\n".encode())
    except FileError as error:
        parser.error(str(error))
    return 0


def _suite(name: str, document: Document) -> str:
    grouped = groups.groups(name, document["results"])
    paths = [group.get(groups.subject(group), {}).get("path", "-") for group in grouped.values()]
    case_columns, constants = cells.case_columns(name, grouped, paths)
    times, speedups = _times(name, grouped), _speedups(name, grouped)
    card = machine.label(document["device"])
    title = f"{cells.titled(name, constants)}: median milliseconds per call on {card}"
    lines = textwrap.wrap(title, WIDTH)
    together = cells.table(case_columns | times | speedups)
    if max(len(line) for line in together.splitlines()) <= WIDTH:
        lines.append(together)
    else:
        lines += [cells.table(case_columns | times), cells.table(case_columns | speedups)]
    for baseline, mean, count in groups.mean_speedups(name, grouped):
        lines.append(
            f"geometric mean of the speedups over {baseline}: {cells.times(mean)} ({count} rows)"
        )
    text = "\n".join(lines)
    notes = [note for note in (INTERVAL, SPREAD) if note[0] in text]
    if speedups and groups.subjects(grouped) != [groups.OURS]:
        notes.insert(0, f"speedups are those of {' and '.join(groups.subjects(grouped))}")
    return "\n".join([text, *notes])


def _times(suite: str, grouped: Groups) -> dict[str, list[str]]:
    return {
        _wrapped(name): [
            "~" * cells.is_wide(group.get(name)) + cells.milliseconds(group.get(name))
            for group in grouped.values()
        ]
        for name in groups.implementations(suite, grouped)
    }


def _speedups(suite: str, grouped: Groups) -> dict[str, list[str]]:
    """A column for each implementation that stands beside a case's subject."""
    return {
        f"speedup\n{_wrapped(name)}": [
            cells.speedup(groups.speedup(group, name)) for group in grouped.values()
        ]
        for name in groups.implementations(suite, grouped)
        if any(
            name in group and groups.subject(group) not in (name, None)
            for group in grouped.values()
        )
    }


def _failures(document: Document) -> list[str]:
    return [
        "\n".join(
            [
                *textwrap.wrap(textwrap.shorten(reason, 3 * WIDTH), WIDTH),
                *(f"  {case}" for case in cases),
            ]
        )
        for reason, cases in groups.failures(document["results"]).items()
    ]


def _wrapped(implementation: str) -> str:
    return implementation.replace("_", "\n")


if __name__ == "__main__":
    sys.exit(main())
