"""What pictures show: each case's time, speedup and memory, as points of panels."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from bench import groups, machine
from bench.groups import Group, is_measured
from bench.store import SIZES, Document, case_fields

Bar = tuple[float, float, float]  # a value and the ends of its error bar
FAILED = (math.nan,) * 3


@dataclass(frozen=True)
class Series:
    """An implementation of a file."""

    file: int  # its number
    implementation: str


Panel = dict[Series, dict[int, Bar]]  # by size
Where = tuple[str, str]  # kind of case; dtype and op


@dataclass(frozen=True)
class Quantity:
    """What a picture shows; `of` finds it for an implementation of a case."""

    name: str
    label: str
    note: str
    of: Callable[[Group, str], Bar | None]
    level: float | None = None  # of a line across


def _time(group: Group, name: str) -> Bar | None:
    row = group[name]
    if not is_measured(row):
        return FAILED if "error" in row else None
    return row["median_ms"], row.get("q1_ms", row["median_ms"]), row.get("q3_ms", row["median_ms"])


def _speedup(group: Group, name: str) -> Bar | None:
    speedup = groups.speedup(group, name)
    if speedup is None:
        return None
    low, high = speedup.interval or (speedup.ratio, speedup.ratio)
    return speedup.ratio, low, high


def _memory(group: Group, name: str) -> Bar | None:
    peak = group[name].get("peak_memory_bytes")
    return None if peak is None else (peak / 2**20,) * 3


TIME = Quantity("time", "time, ms per call", "time: median, bars to the quartiles", _time)
SPEEDUP = Quantity(
    "speedup",
    "speedup",
    "speedup of {} over the others: ratio of medians, bars over the 95 % confidence interval",
    _speedup,
    level=1.0,
)
MEMORY = Quantity(
    "memory",
    "peak memory, MiB",
    "peak memory: arguments, results and temporaries of the program",
    _memory,
)


def of_suite(
    suite: str, quantity: Quantity, names: dict[tuple, str], documents: Sequence[Document]
) -> dict[Where, Panel]:
    """The panels that have something to show; `names` are those of `kinds`."""
    found: dict[Where, Panel] = {}
    for file, document in enumerate(documents):
        for case, group in groups.groups(suite, document["results"]).items():
            values = dict(zip(case_fields(suite), case[1:]))
            where = names[_kind(suite, case)], f"{values['dtype']} {values['op']}"
            for name in group:
                bar = quantity.of(group, name)
                if bar is not None:
                    bars = found.setdefault(where, {}).setdefault(Series(file, name), {})
                    bars[values[size_field(suite)]] = bar
    return found


def _kind(suite: str, case: tuple) -> tuple:
    """The values of a case that are no coordinate of a panel or in it."""
    axes = ("dtype", "op", size_field(suite))
    return tuple(value for field, value in zip(case_fields(suite), case[1:]) if field not in axes)


def kinds(suite: str, documents: Sequence[Document]) -> tuple[dict[tuple, str], str]:
    """What tells each kind of case from the others, as text, and what all have in common."""
    fields = [f for f in case_fields(suite) if f not in ("dtype", "op", size_field(suite))]
    cases = [c for d in documents for c in groups.groups(suite, d["results"])]
    kinds = list(dict.fromkeys(_kind(suite, case) for case in cases))
    varies = [len({kind[i] for kind in kinds}) > 1 for i in range(len(fields))]

    def text(field: str, value: object) -> str:
        return str(value) if isinstance(value, str) else f"{field} {value}"

    def chosen(kind: tuple, varying: bool) -> str:
        pairs = zip(fields, kind, varies)
        return ", ".join(text(field, value) for field, value, v in pairs if v == varying)

    return {kind: chosen(kind, True) for kind in kinds}, chosen(kinds[0], False)


def ends(panels: Iterable[Panel]) -> list[float]:
    """Every number that a panel must have room for."""
    bars = [bar for panel in panels for of_series in panel.values() for bar in of_series.values()]
    return [value for bar in bars for value in bar if not math.isnan(value)]


def have_failures(panels: Iterable[Panel]) -> bool:
    """Whether a case failed in one of them."""
    bars = [bar for panel in panels for of_series in panel.values() for bar in of_series.values()]
    return any(bar is FAILED for bar in bars)


def subjects(suite: str, documents: Sequence[Document]) -> str:
    """Whose speedups the suite's are."""
    grouped = [groups.groups(suite, document["results"]) for document in documents]
    return " or ".join(dict.fromkeys(name for g in grouped for name in groups.subjects(g)))


def size_field(suite: str) -> str:
    """The key of a row that its case's size is in."""
    return next(field for field in SIZES if field in case_fields(suite))


def file_labels(names: Sequence[str], documents: Sequence[Document]) -> list[str]:
    """What tells files apart: the card, and the file's name where several have the same card."""
    cards = [machine.label(document["device"]) for document in documents]
    return [
        card if cards.count(card) == 1 else f"{card} ({name})" for card, name in zip(cards, names)
    ]
