"""Tables of a result file: per suite the milliseconds, the speedups and their geometric mean."""

import math
import textwrap
from collections.abc import Iterable
from typing import Any

from tabulate import tabulate

from bench import machine
from bench.store import Document
from bench.suites import SUITES, key

WIDTH = 120
OURS = "tjk"
UNNAMED = "time"  # of a file whose suite has one implementation, and does not name it

Row = dict[str, Any]
Group = dict[str, Row]  # the rows of one case, by implementation


def report(document: Document, other: Document | None = None, other_name: str = "") -> str:
    """One table per suite of the document, beside the columns of another file if there is one."""
    parts = [_suite(name, document, other, other_name) for name in _suites(document["results"])]
    return "\n\n".join([*parts, *_failures(document["results"])])


def geometric_mean(values: Iterable[float]) -> float:
    """exp(mean(log(values))); the values are positive and at least one."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def speedups(groups: Iterable[Group], baseline: str) -> list[float]:
    """median(baseline) / median(tjk) of every case for which both were measured."""
    measured = [
        [group[name]["median_ms"] for name in (baseline, OURS) if _is_measured(group.get(name))]
        for group in groups
    ]
    return [pair[0] / pair[1] for pair in measured if len(pair) == 2]


def _suites(rows: list[Row]) -> list[str]:
    return [name for name in SUITES if any(row["suite"] == name for row in rows)]


def _suite(name: str, document: Document, other: Document | None, other_name: str) -> str:
    groups = _groups(name, document["results"])
    case_columns, constants = _case_columns(name, groups)
    columns = case_columns | _columns(name, groups)
    theirs = _their_columns(name, groups, other) if other is not None else {}
    lines = [f"{name} ({constants}): median milliseconds per call on {_where(document)}"]
    together = _table(columns | theirs)
    if _width(together) <= WIDTH:
        lines.append(together)
    else:
        lines += [_table(columns), _table(case_columns | theirs)]
    lines += _means(name, groups)
    if other is None:
        return "\n".join(lines)
    if theirs:
        place = "here" if other["device"] == document["device"] else "elsewhere"
        lines.append(f"[1] measured {place} ({_where(other)}): {other_name}")
    else:
        lines.append(f"[1] none of these cases is in {other_name}")
    return "\n".join(lines)


def _where(document: Document) -> str:
    return machine.label(document["device"])


def _groups(suite: str, rows: list[Row]) -> dict[tuple, Group]:
    """Rows of the suite by case, and there by implementation, in the file's order."""
    name = SUITES[suite].KEY
    groups: dict[tuple, Group] = {}
    for row in rows:
        if row["suite"] == suite:
            groups.setdefault(key(row, without=(name,)), {})[row.get(name, UNNAMED)] = row
    return groups


def _case_columns(suite: str, groups: dict[tuple, Group]) -> tuple[dict[str, list[str]], str]:
    """Columns of what is measured and of the path that ran; those of one value become text."""
    fields = ["suite", *(f for f in SUITES[suite].FIELDS if f != SUITES[suite].KEY)]
    values = {field: [str(case[i]) for case in groups] for i, field in enumerate(fields)}
    values["path"] = [group.get(OURS, {}).get("path", "-") for group in groups.values()]
    constant = [f for f in values if f != "op" and len(set(values[f])) == 1]
    columns = {f: cells for f, cells in values.items() if f not in constant}
    return columns, ", ".join(f"{f} {values[f][0]}" for f in constant if f != "suite")


def _columns(suite: str, groups: dict[tuple, Group]) -> dict[str, list[str]]:
    present = [i for i in SUITES[suite].IMPLEMENTATIONS if any(i in g for g in groups.values())]
    columns = {_wrapped(i): [_milliseconds(g.get(i)) for g in groups.values()] for i in present}
    if OURS in present:
        for baseline in present:
            if baseline != OURS:
                ratios = [speedups([g], baseline) for g in groups.values()]
                cells = [f"{ratio[0]:.2f}x" if ratio else "-" for ratio in ratios]
                columns[f"speedup\n{_wrapped(baseline)}"] = cells
    return columns


def _their_columns(suite: str, groups: dict[tuple, Group], other: Document) -> dict[str, list[str]]:
    theirs = _groups(suite, other["results"])
    names = dict.fromkeys(name for case in groups for name in theirs.get(case, ()))
    return {
        f"[1]\n{_wrapped(name)}": [_milliseconds(theirs.get(case, {}).get(name)) for case in groups]
        for name in names
    }


def _means(suite: str, groups: dict[tuple, Group]) -> list[str]:
    lines = []
    for baseline in SUITES[suite].IMPLEMENTATIONS:
        ratios = speedups(groups.values(), baseline)
        if baseline != OURS and ratios:
            mean = geometric_mean(ratios)
            lines.append(
                f"geometric mean of the speedups over {baseline}: {mean:.2f}x ({len(ratios)} rows)"
            )
    return lines


def _failures(rows: list[Row]) -> list[str]:
    """Each distinct reason once, with the rows that it concerns."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        for outcome in ("error", "skipped"):
            if outcome in row:
                reason = textwrap.shorten(f"{outcome}: {row[outcome]}", 3 * WIDTH)
                reasons.setdefault(reason, []).append(" ".join(str(v) for v in key(row)))
    return [
        "\n".join([*textwrap.wrap(reason, WIDTH), *(f"  {case}" for case in cases)])
        for reason, cases in reasons.items()
    ]


def _is_measured(row: Row | None) -> bool:
    return row is not None and "median_ms" in row


def _milliseconds(row: Row | None) -> str:
    if row is None:
        return "-"
    if not _is_measured(row):
        return "error" if "error" in row else "skipped"
    return f"{row['median_ms']:.4g}" if row["median_ms"] < 1000 else f"{row['median_ms']:.0f}"


def _wrapped(implementation: str) -> str:
    return implementation.replace("_", "\n")


def _table(columns: dict[str, list[str]]) -> str:
    align = ["left" if f in ("dtype", "op", "path") else "right" for f in columns]
    return tabulate(columns, headers="keys", disable_numparse=True, colalign=align)


def _width(table: str) -> int:
    return max(len(line) for line in table.splitlines())
