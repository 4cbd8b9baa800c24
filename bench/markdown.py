"""Result files as one report in Markdown."""

from collections.abc import Sequence

from bench import cells, comparison, groups, machine
from bench.store import Document

METHOD = f"""\
Times are medians and, in brackets, quartiles of the samples, in milliseconds per call; *wide* marks
quartiles more than {cells.WIDE} of the median apart. Speedups are ratios of medians, with 95 %
confidence intervals where the file has samples. Peak memory is that of the arguments, results and
temporaries of the compiled program."""


def markdown(names: Sequence[str], documents: Sequence[Document]) -> str:
    """Where the numbers come from, each file's tables by suite, and the files by case."""
    cards = dict.fromkeys(machine.label(document["device"]) for document in documents)
    labels = [f"[{number}]" for number in range(1, len(names) + 1)]
    parts = [f"# Benchmark on {' and '.join(cards)}", _origins(names, documents, labels)]
    parts += [*_warnings(documents, labels), METHOD]
    for label, document in zip(labels, documents):
        suffix = f" {label}" if len(documents) > 1 else ""
        for suite in groups.suites(document["results"]):
            parts += [f"## {suite}{suffix}", *_suite(suite, document)]
        reasons = groups.failures(document["results"])
        if reasons:
            parts += [f"## Not measured{suffix}", *(_reason(*item) for item in reasons.items())]
    if len(documents) > 1:
        parts += _comparison(documents, labels)
    return "\n\n".join(parts)


def _origins(names: Sequence[str], documents: Sequence[Document], labels: Sequence[str]) -> str:
    """A column for each file: device, versions, commit, and how many rows have what."""
    columns = []
    for name, document in zip(names, documents):
        rows = document["results"]
        column = {"file": name, "device": machine.label(document["device"])}
        column |= groups.software(document)
        column["measured rows"] = str(sum(groups.is_measured(row) for row in rows))
        column["failed rows"] = str(sum("error" in row for row in rows))
        column["skipped rows"] = str(sum("skipped" in row for row in rows))
        columns.append(column)
    properties = list(dict.fromkeys(name for column in columns for name in column))
    shown = [[column.get(name, "-") for name in properties] for column in columns]
    everything = {"": properties, **dict(zip(labels, shown))}
    return cells.table(everything, "github", left=everything)


def _warnings(documents: Sequence[Document], labels: Sequence[str]) -> list[str]:
    if len(documents) == 1:
        return []
    differing = comparison.software_differences(documents, labels)
    text = [f"{differing}."] if differing else []
    if not all(groups.same_card(documents[0], document) for document in documents):
        text.append(f"**The cards differ: {comparison.NO_SPEEDUP}.**")
    return text


def _suite(suite: str, document: Document) -> list[str]:
    """A line for each row, the implementations of a case together."""
    grouped = groups.groups(suite, document["results"])
    order = groups.implementations(suite, grouped)
    rows = [
        (case, name, group) for case, group in grouped.items() for name in order if name in group
    ]
    paths = [group[name].get("path", "-") for _, name, group in rows]
    columns, constants = cells.case_columns(suite, [case for case, _, _ in rows], paths)
    columns["implementation"] = [name for _, name, _ in rows]
    columns["ms"] = [cells.milliseconds(group[name]) for _, name, group in rows]
    columns["quartiles"] = [cells.quartiles(group[name]) for _, name, group in rows]
    columns[f"speedup of {' or '.join(groups.subjects(grouped))}"] = [
        cells.speedup_with_interval(groups.speedup(group, name)) for _, name, group in rows
    ]
    columns["peak MiB"] = [cells.mebibytes(group[name]) for _, name, group in rows]
    columns = {name: column for name, column in columns.items() if set(column) != {"-"}}
    means = [
        f"- Geometric mean of the speedups over {name}: {cells.times(mean)} ({count} rows)"
        for name, mean, count in groups.mean_speedups(suite, grouped)
    ]
    card = machine.label(document["device"])
    where = f"On {card}: {constants}." if constants else f"On {card}."
    text = [where, cells.table(columns, "github"), "\n".join(means)]
    return [part for part in text if part]


def _reason(reason: str, cases: Sequence[str]) -> str:
    text = " ".join(reason.split()).replace("`", "'")
    return "\n".join([f"`{text}`", "", *(f"- {case}" for case in cases)])


def _comparison(documents: Sequence[Document], labels: Sequence[str]) -> list[str]:
    rows = [row for document in documents[1:] for row in document["results"]]
    parts = [
        "## Comparison",
        f"Each row of the files after {labels[0]}, in median milliseconds per call, beside the row "
        "of the same case and of the implementation whose place it takes.",
    ]
    for suite in groups.suites(rows):
        found = comparison.lines(suite, documents)
        columns, constants = comparison.table(suite, found, documents, labels)
        summary = comparison.summary(found, documents, labels)
        parts += [f"### {suite}, compared", *([f"Everywhere: {constants}."] if constants else [])]
        parts += [cells.table(columns, "github"), "\n".join(f"- {line}" for line in summary)]
    return parts
