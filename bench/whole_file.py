"""Files that are written as a whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


class FileError(Exception):
    """A file that cannot be read, written or continued."""


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file beside the path, for the body to write to, which then takes the path's place.

    Whenever the process dies, the old or the new file is there.

    Raises:
        FileError: it could not be written, as on a full disk; the old file is as it was, and
            nothing lies beside it. Nor does anything when the body raises.
    """
    try:
        with open(_temporary(path), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(_temporary(path), path)
    except OSError as error:
        raise FileError(f"cannot write {path}: {error}") from None
    finally:
        with suppress(OSError):
            _temporary(path).unlink()


def check_writable(path: Path) -> None:
    """Raises FileError unless `replacing` can create or replace the file."""
    try:
        if path.is_dir():
            raise IsADirectoryError("it is a directory")
        _temporary(path).touch()
        _temporary(path).unlink()
    except OSError as error:
        raise FileError(f"cannot write {path}: {error}") from None


def _temporary(path: Path) -> Path:
    return path.with_name(path.name + ".tmp")
