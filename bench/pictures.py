"""Pictures of a suite: its times, its speedups and its peak memory, against its sizes.

A picture has a row of panels for each kind of case, and a column for each dtype and operation.
Colour and marker are the implementation's, the same in every picture; the style of a line, the
filling of a marker and the hatching of a bar are the file's.
"""

import math
import textwrap
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

from bench import groups, machine, panels
from bench.cells import titled
from bench.panels import MEMORY, SPEEDUP, TIME, Panel, Quantity, Series
from bench.store import Document
from bench.whole_file import FileError, replacing

# Colours of Okabe and Ito, which the colour-blind can tell apart. In suites without
# probjax_default, pallas and probjax are what it is in the others.
LOOKS = {
    "tjk": ("#0072B2", "o"),
    "tjk_flex": ("#56B4E9", "s"),
    **dict.fromkeys(("probjax_default", "pallas", "probjax"), ("#000000", "X")),
    "probjax_flex": ("#888888", "p"),
    "jax_xla": ("#D55E00", "^"),
    "jax_cudnn": ("#009E73", "D"),
    "blocked": ("#E69F00", "v"),
    "ragged_dot": ("#CC79A7", "P"),
}
UNKNOWN_LOOK = ("#8C564B", "h")
LINES = ("-", "--", ":", "-.")
FILLINGS = ("full", "none", "top", "left")
HATCHES = ("", "///", "...", "xxx")
PANEL = (3.3, 2.2)  # inches
DPI = 110
TICKS = [step * 10.0**decade for decade in range(-6, 10) for step in (1, 2, 5)]
# A failed case is a cross in the panel's uppermost tenth, several of a size beside each other.
CROSS_AT = 0.95
CROSS_APART = 1.08


def draw(names: Sequence[str], documents: Sequence[Document], directory: Path) -> list[Path]:
    """Writes SUITE_time.png, SUITE_speedup.png and SUITE_memory.png where rows have that.

    Returns:
        What was written.

    Raises:
        FileError: the directory cannot be made or written to.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"cannot write to {directory}: {error}") from None
    written = []
    for suite in groups.suites(row for document in documents for row in document["results"]):
        for quantity in (TIME, SPEEDUP, MEMORY):
            figure = _figure(suite, quantity, names, documents)
            if figure is not None:
                path = directory / f"{suite}_{quantity.name}.png"
                with replacing(path) as file:
                    figure.savefig(file, format="png", dpi=DPI)
                written.append(path)
    return written


def _figure(
    suite: str, quantity: Quantity, names: Sequence[str], documents: Sequence[Document]
) -> Figure | None:
    """The picture, or None where no row has the quantity."""
    kinds, constants = panels.kinds(suite, documents)
    found = panels.of_suite(suite, quantity, kinds, documents)
    if not panels.ends(found.values()):
        return None
    series = sorted({one for panel in found.values() for one in panel}, key=_order)
    sizes = sorted({size for panel in found.values() for bars in panel.values() for size in bars})
    kinds_of_rows = list(dict.fromkeys(kind for kind, _ in found))
    columns = list(dict.fromkeys(column for _, column in found))

    width = PANEL[0] * max(2, len(columns))
    figure = Figure((width, PANEL[1] * len(kinds_of_rows) + 1.5), layout="constrained")
    grid = figure.subplots(len(kinds_of_rows), len(columns), sharey="row", squeeze=False)
    for axes_of_row, kind in zip(grid, kinds_of_rows):
        row = [found.get((kind, column), {}) for column in columns]
        for axes, panel, column in zip(axes_of_row, row, columns):
            axes.set_title(f"{kind} {column}".strip(), fontsize=9)
            _draw_panel(axes, panel, series, sizes)
            _label_sizes(axes, panels.size_field(suite), sizes, len(series))
            if quantity.level is not None:
                axes.axhline(quantity.level, color="0.5", linewidth=0.8, zorder=0)
        axes_of_row[0].set_ylabel(quantity.label)
        if len(sizes) > 1:
            _make_logarithmic(axes_of_row[0], row, quantity.level)
    cards = dict.fromkeys(machine.label(documents[one.file]["device"]) for one in series)
    title = [
        f"{titled(suite, constants)} on {' and '.join(cards)}",
        quantity.note.format(panels.subjects(suite, documents)),
    ]
    wrapped = [part for line in title for part in textwrap.wrap(line, int(12 * width))]
    figure.suptitle("\n".join(wrapped), fontsize=10)
    _add_legend(figure, found.values(), series, names, documents, is_bars=len(sizes) == 1)
    return figure


def _add_legend(
    figure: Figure,
    of_figure: Collection[Panel],
    series: Sequence[Series],
    names: Sequence[str],
    documents: Sequence[Document],
    is_bars: bool,
) -> None:
    """Below the panels, in as many columns as there is room for."""
    files = panels.file_labels(names, documents) if len(documents) > 1 else [""]
    handles = [_handle(one, files[one.file], is_bars) for one in series]
    if panels.have_failures(of_figure):
        handles.append(Line2D([], [], color="0.3", marker="x", linestyle="none", label="failed"))
    longest = max(len(str(handle.get_label())) for handle in handles)
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=max(1, int(figure.get_figwidth() / (1.0 + 0.085 * longest))),
        fontsize=9,
        handlelength=4,
    )


def _draw_panel(axes: Axes, panel: Panel, series: Sequence[Series], sizes: Sequence[int]) -> None:
    """Lines over the sizes, or a bar for each series where there is one size only."""
    axes.tick_params(labelsize=8)
    axes.grid(axis="y", color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
    if not panel:
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", color="0.5")
    failed: Counter[float] = Counter()
    for one, bars in panel.items():
        colour, marker = _look(one)
        at = [series.index(one)] if len(sizes) == 1 else sorted(bars)
        values = [bars[size] for size in sorted(bars)]
        heights = [value for value, _, _ in values]
        errors = [[max(0, v - low) for v, low, _ in values], [max(0, h - v) for v, _, h in values]]
        with_errors = {"yerr": errors, "capsize": 3} if any(map(any, errors)) else {}
        if len(sizes) == 1:
            style = {"color": colour, "hatch": _hatch(one), "edgecolor": "white", "ecolor": "0.3"}
            axes.bar(at, heights, **style, **with_errors)
        else:
            style = {"color": colour, "marker": marker, **_style(one)}
            axes.errorbar(at, heights, **style, **with_errors, markersize=5, linewidth=1.3)
        for x in [x for x, height in zip(at, heights) if math.isnan(height)]:
            place = x * CROSS_APART ** failed[x]
            failed[x] += 1
            cross = {"color": colour, "marker": "x", "transform": axes.get_xaxis_transform()}
            axes.plot(place, CROSS_AT, **cross)


def _label_sizes(axes: Axes, field: str, sizes: Sequence[int], bars: int) -> None:
    if len(sizes) == 1:
        axes.set_xlim(-0.7, bars - 0.3)
        axes.xaxis.set_major_locator(NullLocator())
        axes.set_xlabel(f"{field} {sizes[0]}")
    else:
        axes.set_xscale("log", base=2)
        axes.set_xlim(sizes[0] / 1.3, sizes[-1] * 1.3)
        axes.xaxis.set_major_locator(FixedLocator(sizes))
        axes.xaxis.set_major_formatter(FixedFormatter([str(size) for size in sizes]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel(field)
    axes.label_outer()


def _make_logarithmic(axes: Axes, row: Sequence[Panel], level: float | None) -> None:
    """From a tick below the values to a tick above them, so that there always are two."""
    values = panels.ends(row) + ([] if level is None else [level])
    if not values:
        return
    low = max(tick for tick in TICKS if tick < min(values) / 1.05)
    high = min(tick for tick in TICKS if tick > max(values) * 1.05)
    ticks = [tick for tick in TICKS if low <= tick <= high]
    if len(ticks) > 9:
        ticks = [tick for tick in ticks if f"{tick:e}".startswith("1")]
    axes.set_yscale("log")
    axes.set_ylim(low, high * (high / low) ** (0.1 if panels.have_failures(row) else 0))
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_major_formatter(FixedFormatter([f"{tick:g}" for tick in ticks]))
    axes.yaxis.set_minor_locator(NullLocator())


def _handle(one: Series, file: str, is_bar: bool) -> Line2D | Patch:
    """The legend's entry."""
    colour, marker = _look(one)
    label = f"{file}, {one.implementation}" if file else one.implementation
    if is_bar:
        return Patch(facecolor=colour, hatch=_hatch(one), edgecolor="white", label=label)
    return Line2D([], [], color=colour, marker=marker, **_style(one), label=label)


def _order(one: Series) -> tuple[int, int, str]:
    known = [*LOOKS, one.implementation].index(one.implementation)
    return one.file, known, one.implementation


def _look(one: Series) -> tuple[str, str]:
    """Colour and marker."""
    return LOOKS.get(one.implementation, UNKNOWN_LOOK)


def _style(one: Series) -> dict[str, str]:
    """Of a line."""
    line, filling = list(zip(LINES, FILLINGS))[one.file % len(LINES)]
    return {"linestyle": line, "fillstyle": filling}


def _hatch(one: Series) -> str:
    return HATCHES[one.file % len(HATCHES)]
