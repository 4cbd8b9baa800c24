"""The result file. docs/benchmark.md describes it."""

import json
import math
from pathlib import Path
from typing import Any

from bench import machine
from bench.suites import SUITES, key
from bench.whole_file import FileError, replacing

SCHEMA_VERSION = 1
# What must agree before measured rows may be continued.
HEADER = ("schema_version", "device", "versions", "git", "config")
SIZES = ("tokens", "resolution")  # one of them in every suite
TEXTS = ("path", "error", "skipped")
NUMBERS = ("median_ms", "q1_ms", "q3_ms", "peak_memory_bytes")

Document = dict[str, Any]


def write(path: Path, document: Document) -> None:
    """Replaces the file as a whole; FileError says why it could not be written."""
    text = json.dumps(document, indent=2, allow_nan=False) + "\n"
    with replacing(path) as file:
        file.write(text.encode())


def read(path: Path) -> Document:
    """A file of ours or of the seed's form; FileError says what is wrong with another."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FileError(f"cannot read {path}: {error}") from None
    complaint = _complaint(document)
    if complaint is not None:
        raise FileError(f"{path} is not a result file: {complaint}")
    return document


def rows_to_continue(path: Path, document: Document) -> dict[tuple, dict[str, Any]]:
    """The file's rows by case; FileError unless the new document's header is the file's.

    The output's name may differ, nothing else: rows of one file have one origin.
    """
    earlier = read(path)
    for name in HEADER:
        old, new = earlier.get(name), document[name]
        if name == "config":
            old, new = {**earlier[name], "output": None}, {**new, "output": None}
        if old != new:
            raise FileError(f"cannot continue {path}: {_difference(name, old, new)}")
    try:
        return {key(row): row for row in earlier["results"]}
    except KeyError as error:
        raise FileError(f"{path} is not a result file: a row has no {error}") from None


def case_fields(suite: str) -> list[str]:
    """The keys that say what is measured, without the implementation."""
    return [field for field in SUITES[suite].FIELDS if field != SUITES[suite].KEY]


def _complaint(document: Any) -> str | None:
    """What keeps it from being read as a result file, or None."""
    shape = {"device": dict, "config": dict, "results": list}
    for name, kind in shape.items():
        if not isinstance(document, dict) or not isinstance(document.get(name), kind):
            return f"no {kind.__name__} named {name!r}"
    for name in ("versions", "git"):
        if not isinstance(document.get(name, {}), dict):
            return f"its {name!r} is no dict"
    device = document["device"]
    if "device_kind" not in device or not isinstance(machine.label(device), str):
        return "its device has no name"
    for number, row in enumerate(document["results"]):
        complaint = _complaint_of_row(row)
        if complaint is not None:
            return f"row {number} {complaint}"
    return None


def _complaint_of_row(row: Any) -> str | None:
    if not isinstance(row, dict) or "suite" not in row:
        return "names no suite"
    if row["suite"] not in list(SUITES):
        return f"names the suite {row['suite']!r}, which is none of {', '.join(SUITES)}"
    for field in case_fields(row["suite"]):
        if not isinstance(row.get(field), int if field in SIZES else int | str):
            return f"has {row.get(field)!r} in {field}"
    for name in (SUITES[row["suite"]].KEY, *TEXTS):
        if not isinstance(row.get(name, ""), str):
            return f"has {row[name]!r} in {name}"
    samples = row.get("samples_ms", [])
    if not isinstance(samples, list):
        return f"has {samples!r} in samples_ms"
    values = [(name, row[name]) for name in NUMBERS if name in row]
    for name, value in [*values, *(("samples_ms", sample) for sample in samples)]:
        if not isinstance(value, int | float) or not 0 < value < math.inf:
            return f"has {value!r} in {name}"
    return None


def _difference(name: str, old: Any, new: Any) -> str:
    if isinstance(old, dict) and isinstance(new, dict):
        changed = next(k for k in {**old, **new} if old.get(k) != new.get(k))
        return f"its {name}.{changed} is {old.get(changed)!r}, now it is {new.get(changed)!r}"
    return f"its {name} is {old!r}, now it is {new!r}"
