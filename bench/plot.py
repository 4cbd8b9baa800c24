"""`python -m bench.plot`: pictures of result files. pictures.py draws them, with matplotlib."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bench import store
from bench.whole_file import FileError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.plot",
        description="Draws result files: for each suite its times and speedups, and its memory.",
        epilog="Exit status: 0 when a picture was drawn; 1 when the files have nothing to draw; "
        "2 for options or files that cannot be used, and without matplotlib.",
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="result files")
    parser.add_argument("--out", type=Path, metavar="DIR", required=True, help="for the pictures")
    options = parser.parse_args(arguments)
    try:
        from bench import pictures
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "matplotlib":
            raise
        parser.error("it draws with matplotlib, which is not installed: pip install matplotlib")
    try:
        documents = [store.read(path) for path in options.files]
        written = pictures.draw([str(path) for path in options.files], documents, options.out)
    except FileError as error:
        parser.error(str(error))
    for path in written:
        print(path)
    if not written:
        print("no row of these files has a time", file=sys.stderr)
    return 0 if written else 1


if __name__ == "__main__":
    sys.exit(main())
