"""The rows of a result file by suite, by case and by implementation."""

from collections.abc import Iterable
from typing import Any

from bench import machine
from bench.statistics import Speedup, geometric_mean, interval
from bench.store import Document
from bench.suites import SUITES, key

OURS = "tjk"
UNNAMED = "probjax"  # of a file whose suite has one implementation, and does not name it
# The names that the earlier library's file has for what takes our place in it.
PLACES = {"probjax_default": OURS, "probjax_flex": "tjk_flex", "pallas": OURS, UNNAMED: OURS}

Row = dict[str, Any]
Group = dict[str, Row]  # the rows of one case, by implementation
Groups = dict[tuple, Group]  # by case: the values of suite and `store.case_fields`


def implementation(row: Row) -> str:
    """Its name in its file."""
    return row.get(SUITES[row["suite"]].KEY, UNNAMED)


def place(name: str) -> str:
    """The name that an implementation of another file is compared with."""
    return PLACES.get(name, name)


def suites(rows: Iterable[Row]) -> list[str]:
    """Names of the suites that have rows."""
    present = {row["suite"] for row in rows}
    return [name for name in SUITES if name in present]


def groups(suite: str, rows: Iterable[Row]) -> Groups:
    """Rows of the suite by case, and there by implementation, in the file's order."""
    found: Groups = {}
    for row in rows:
        if row["suite"] == suite:
            case = key(row, without=(SUITES[suite].KEY,))
            found.setdefault(case, {})[implementation(row)] = row
    return found


def implementations(suite: str, grouped: Groups) -> list[str]:
    """Names in the suite's order, each of another file's at its place; unknown ones last."""
    order = SUITES[suite].IMPLEMENTATIONS
    names = dict.fromkeys(name for group in grouped.values() for name in group)
    return sorted(names, key=lambda n: order.index(place(n)) if place(n) in order else len(order))


def subject(group: Group) -> str | None:
    """Whose speedup is shown: what has the place of tjk, or of tjk_flex where tjk has no row."""
    places = {place(name): name for name in group}
    return places.get(OURS, places.get("tjk_flex"))


def is_measured(row: Row | None) -> bool:
    return row is not None and "median_ms" in row


def ratio(group: Group, baseline: str) -> float | None:
    """median(baseline) / median(the case's subject); None unless both were measured."""
    name = subject(group)
    if name is None or name == baseline:
        return None
    if not (is_measured(group.get(baseline)) and is_measured(group[name])):
        return None
    return group[baseline]["median_ms"] / group[name]["median_ms"]


def speedup(group: Group, baseline: str) -> Speedup | None:
    """The ratio with its confidence interval."""
    name, times = subject(group), ratio(group, baseline)
    if name is None or times is None:
        return None
    samples = (group[n].get("samples_ms", ()) for n in (baseline, name))
    return Speedup(times, interval(*samples))


def mean_speedups(suite: str, grouped: Groups) -> list[tuple[str, float, int]]:
    """(baseline, geometric mean of the speedups over it, their number) where there is one."""
    means = []
    for baseline in implementations(suite, grouped):
        ratios = [r for g in grouped.values() if (r := ratio(g, baseline)) is not None]
        if ratios:
            means.append((baseline, geometric_mean(ratios), len(ratios)))
    return means


def subjects(grouped: Groups) -> list[str]:
    """The subjects of the cases, each once."""
    return list(dict.fromkeys(s for g in grouped.values() if (s := subject(g)) is not None))


def failures(rows: Iterable[Row]) -> dict[str, list[str]]:
    """Each distinct reason once, with the rows that it concerns."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        named = {SUITES[row["suite"]].KEY: implementation(row), **row}
        for outcome in ("error", "skipped"):
            if outcome in row:
                case = " ".join(str(value) for value in key(named))
                reasons.setdefault(f"{outcome}: {row[outcome]}", []).append(case)
    return reasons


def same_card(one: Document, other: Document) -> bool:
    """Whether times of both can be compared: the same GPU, or the same CPU with as many cores."""
    devices = one["device"], other["device"]
    kinds = [(machine.label(d), None if d.get("gpu") else d.get("cpu_cores")) for d in devices]
    return kinds[0] == kinds[1]


def software(document: Document) -> dict[str, str]:
    """Versions and commit that the file names: without `versions`, those that its device names."""
    device, git = document["device"], document.get("git", {})
    found = {name: device.get(name) for name in ("python", "jax", "driver")}
    found |= document.get("versions", {})
    found["commit"] = git.get("commit")
    if found["commit"] and git.get("dirty"):
        found["commit"] = f"{found['commit']} and changes"
    return {name: str(value) for name, value in found.items() if value}
