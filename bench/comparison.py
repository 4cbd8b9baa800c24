"""Rows of result files beside each other, matched by case and by the place of implementations."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from bench import cells, groups, machine
from bench.cells import WIDTH
from bench.groups import Row, implementation, is_measured, place
from bench.statistics import geometric_mean
from bench.store import Document

NO_SPEEDUP = "times of two cards are not a speedup of the software"


@dataclass(frozen=True)
class Line:
    """What each file has for one case and place: its row, or None."""

    case: tuple
    place: str
    rows: tuple[Row | None, ...]

    def names(self) -> str:
        """What the files call the implementation: one name if they agree."""
        names = [self.place, *(implementation(row) for row in self.rows if row is not None)]
        return " / ".join(dict.fromkeys(names))

    def ratio(self, other: int) -> float | None:
        """Another file's time / the first's."""
        first, row = self.rows[0], self.rows[other]
        if first is None or row is None or not (is_measured(first) and is_measured(row)):
            return None
        return row["median_ms"] / first["median_ms"]


def comparison(document: Document, other: Document, other_name: str) -> str:
    """For a terminal: each row of the other file with ours in its place, a table per suite."""
    documents, labels = (document, other), ("ours", "theirs")
    heading = [
        "Comparison: median milliseconds per call",
        f"Ours:   {machine.label(document['device'])}",
        f"Theirs: {machine.label(other['device'])}, {other_name}",
        *([] if groups.same_card(*documents) else [f"Measured on another card: {NO_SPEEDUP}"]),
        *textwrap.wrap(software_differences(documents, labels), WIDTH),
    ]
    parts = ["\n".join(heading)]
    for suite in groups.suites(other["results"]):
        found = lines(suite, documents)
        columns, constants = table(suite, found, documents, labels)
        title = textwrap.wrap(cells.titled(suite, constants), WIDTH)
        means = summary(found, documents, labels)
        parts.append("\n".join([*title, cells.table(columns), *means]))
    return "\n\n".join(parts)


def lines(suite: str, documents: Sequence[Document]) -> list[Line]:
    """One for every row of the files after the first, in their order."""
    rows: list[dict[tuple, Row]] = []
    for document in documents:
        grouped = groups.groups(suite, document["results"])
        rows.append(
            {(c, place(n)): row for c, group in grouped.items() for n, row in group.items()}
        )
    wanted = dict.fromkeys(where for of_file in rows[1:] for where in of_file)
    return [Line(*where, tuple(of_file.get(where) for of_file in rows)) for where in wanted]


def table(
    suite: str, found: Sequence[Line], documents: Sequence[Document], labels: Sequence[str]
) -> tuple[dict[str, list[str]], str]:
    """Columns: case, names, every file's time and its ratio to the first's; and constant sizes."""
    columns, constants = cells.case_columns(suite, [line.case for line in found])
    columns["implementation"] = [line.names() for line in found]
    for i, label in enumerate(labels):
        columns[label] = [cells.milliseconds(line.rows[i]) for line in found]
    for i in range(1, len(labels)):
        ratios = [line.ratio(i) for line in found]
        columns[_ratio_name(documents, labels, i)] = [
            "-" if ratio is None else cells.number(ratio, digits=3) for ratio in ratios
        ]
    return columns, constants


def summary(
    found: Sequence[Line], documents: Sequence[Document], labels: Sequence[str]
) -> list[str]:
    """How many have times; of one card, the geometric mean for each implementation."""
    text = []
    for i in range(1, len(labels)):
        ratios: dict[str, list[float]] = {}
        for line in found:
            if (ratio := line.ratio(i)) is not None:
                ratios.setdefault(line.place, []).append(ratio)
        count = sum(line.rows[i] is not None for line in found)
        both = sum(len(of_place) for of_place in ratios.values())
        text.append(f"{both} of {count} rows of {labels[i]} have a time in {labels[0]}, too")
        if groups.same_card(documents[0], documents[i]):
            text += [
                f"geometric mean of {labels[i]} / {labels[0]} for {name}: "
                f"{cells.number(geometric_mean(of_place), digits=3)} ({len(of_place)} rows)"
                for name, of_place in ratios.items()
            ]
    return text


def software_differences(documents: Sequence[Document], labels: Sequence[str]) -> str:
    """Versions and commits that the files name and do not agree on."""
    named = [groups.software(document) for document in documents]
    differing = [
        f"{name} {' / '.join(values[name] for values in named)}"
        for name in dict.fromkeys(name for values in named for name in values)
        if all(name in values for values in named) and len({v[name] for v in named}) > 1
    ]
    return f"Software differs ({' / '.join(labels)}): {', '.join(differing)}" if differing else ""


def _ratio_name(documents: Sequence[Document], labels: Sequence[str], i: int) -> str:
    same = groups.same_card(documents[0], documents[i])
    return f"{labels[i]} / {labels[0]}" + ("" if same else ", cards differ")
