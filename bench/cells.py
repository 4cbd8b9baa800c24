"""What tables show of a row, as text."""

from collections.abc import Collection, Sequence

from tabulate import tabulate

from bench.groups import Row, is_measured
from bench.statistics import WIDE_SPREAD, Speedup, spread
from bench.store import case_fields

WIDTH = 120  # columns of a terminal
WIDE = f"{100 * WIDE_SPREAD:.0f} %"
LEFT = ("dtype", "op", "path", "variant", "cell", "implementation")


def milliseconds(row: Row | None) -> str:
    """The median time, or in its place why there is none."""
    if row is None:
        return "-"
    if not is_measured(row):
        return "error" if "error" in row else "skipped"
    return number(row["median_ms"])


def number(value: float, digits: int = 4) -> str:
    """So many digits, and no exponent for what is large."""
    return f"{value:.{digits}g}" if value < 10 ** (digits - 1) else f"{value:.0f}"


def quartiles(row: Row) -> str:
    """[1.49, 1.57], and whether that is wide."""
    if not is_measured(row) or "q1_ms" not in row or "q3_ms" not in row:
        return "-"
    text = f"[{number(row['q1_ms'])}, {number(row['q3_ms'])}]"
    return text + " *wide*" * is_wide(row)


def mebibytes(row: Row) -> str:
    """The peak memory."""
    return f"{row['peak_memory_bytes'] / 2**20:.1f}" if "peak_memory_bytes" in row else "-"


def is_wide(row: Row | None) -> bool:
    """Whether the quartiles are too far apart for the median to be trusted."""
    if not is_measured(row) or "q1_ms" not in row or "q3_ms" not in row:
        return False
    return spread(row["q1_ms"], row["median_ms"], row["q3_ms"]) > WIDE_SPREAD


def times(ratio: float) -> str:
    """1.53x, 153x"""
    return f"{ratio:.{_digits(ratio)}f}x"


def speedup(value: Speedup | None) -> str:
    """1.53x, with the farther end of its interval: 1.53x ±0.04"""
    if value is None:
        return "-"
    if value.interval is None:
        return times(value.ratio)
    far = max(abs(end - value.ratio) for end in value.interval)
    return f"{times(value.ratio)} ±{far:.{_digits(value.ratio)}f}"


def speedup_with_interval(value: Speedup | None) -> str:
    """1.53x [1.49, 1.57]"""
    if value is None:
        return "-"
    if value.interval is None:
        return times(value.ratio)
    low, high = (f"{end:.{_digits(value.ratio)}f}" for end in value.interval)
    return f"{times(value.ratio)} [{low}, {high}]"


def case_columns(
    suite: str, cases: Collection[tuple], paths: Sequence[str] = ()
) -> tuple[dict[str, list[str]], str]:
    """Columns of what is measured, and of the path that ran; those of one value become text."""
    values = {
        field: [str(case[i]) for case in cases] for i, field in enumerate(case_fields(suite), 1)
    }
    if paths:
        values["path"] = list(paths)
    constant = [f for f in values if f != "op" and len(set(values[f])) == 1]
    columns = {f: column for f, column in values.items() if f not in constant}
    return columns, ", ".join(f"{f} {values[f][0]}" for f in constant if values[f][0] != "-")


def titled(suite: str, constants: str) -> str:
    """transformer (batch 8, model_dim 256)"""
    return f"{suite} ({constants})" if constants else suite


def table(
    columns: dict[str, list[str]], style: str = "simple", left: Collection[str] = LEFT
) -> str:
    """Words to the left, numbers to the right; in the style "github" safe for Markdown."""
    align = ["left" if name in left else "right" for name in columns]
    if style == "github":
        columns = {
            _escaped(name): [_escaped(cell) for cell in column] for name, column in columns.items()
        }
    return tabulate(columns, "keys", style, disable_numparse=True, colalign=align)


def _escaped(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _digits(ratio: float) -> int:
    return 2 if ratio < 100 else 0
