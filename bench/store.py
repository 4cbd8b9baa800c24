"""The result file. docs/benchmark.md describes it."""

import json
import os
from pathlib import Path
from typing import Any

from bench.suites import key

SCHEMA_VERSION = 1
# What must agree before measured rows may be continued.
HEADER = ("schema_version", "device", "versions", "git", "config")

Document = dict[str, Any]


class FileError(Exception):
    """A result file that cannot be read, written or continued."""


def check_writable(path: Path) -> None:
    """Raises FileError unless `write` can replace or create the file."""
    try:
        if path.is_dir():
            raise IsADirectoryError("it is a directory")
        _temporary(path).touch()
        _temporary(path).unlink()
    except OSError as error:
        raise FileError(f"cannot write {path}: {error}") from None


def write(path: Path, document: Document) -> None:
    """Replaces the file as a whole: whenever the process dies, the old or the new file is there."""
    with open(_temporary(path), "w", encoding="utf-8") as file:
        json.dump(document, file, indent=2, allow_nan=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(_temporary(path), path)


def read(path: Path) -> Document:
    """A file of ours or of the seed's form; FileError says what is wrong with another."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FileError(f"cannot read {path}: {error}") from None
    shape = {"device": dict, "config": dict, "results": list}
    for name, kind in shape.items():
        if not isinstance(document, dict) or not isinstance(document.get(name), kind):
            raise FileError(f"{path} is not a result file: no {kind.__name__} named {name!r}")
    for number, row in enumerate(document["results"]):
        if not isinstance(row, dict) or "suite" not in row:
            raise FileError(f"{path} is not a result file: row {number} names no suite")
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


def _difference(name: str, old: Any, new: Any) -> str:
    if isinstance(old, dict) and isinstance(new, dict):
        changed = next(k for k in {**old, **new} if old.get(k) != new.get(k))
        return f"its {name}.{changed} is {old.get(changed)!r}, now it is {new.get(changed)!r}"
    return f"its {name} is {old!r}, now it is {new!r}"


def _temporary(path: Path) -> Path:
    return path.with_name(path.name + ".tmp")
