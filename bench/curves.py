"""Pictures of figures: curves and bars."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import TYPE_CHECKING

from bench.rows import Row
from builder.pictures import GRID, INK, OTHERS, OWN, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Curve = dict[str, float | None]  # by the number on the axis; None: there is no value
Curves = Mapping[str, Mapping[str, Curve]]  # by title and line
Bars = Mapping[str, Mapping[str, Mapping[str, float]]]  # by title, series and name
COLUMNS = 4
GREY = "#8c8c8c"


def draw_rows(rows: Sequence[Row], title: str, path: Path) -> None:
    """Draws a panel for each first part of the names, and each unit; figures without a unit share the last part of the name.

    A panel has curves over the number in the names. If no name has a number, there are bars.
    """
    panels: dict[str, dict[str, Curve]] = {}
    for row in rows:
        if row.x is not None and isinstance(row.value, (int, float)):
            first, _, rest = row.series.partition("/")
            what = row.unit or rest.rpartition("/")[2]
            line = row.series.removeprefix(f"{first}/").removesuffix(f"/{what}")
            panels.setdefault(f"{first}: {what}", {}).setdefault(line, {})[f"{row.x:g}"] = row.value
    if panels:
        draw(panels, title, path)
    else:
        values = {row.name: float(row.value) for row in rows if isinstance(row.value, (int, float))}
        draw_bars({title: {"": values}}, path, log=True)


def draw(curves: Curves, title: str, path: Path, log: str = "") -> None:
    """Draws the figures. The suffix of the path chooses the format. `log`: the logarithmic axes, such as `xy`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    rows, columns = -(-len(curves) // COLUMNS), min(len(curves), COLUMNS)
    figure = Figure(figsize=(8, 4.6) if len(curves) == 1 else (15, 3.4 * rows), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, (name, lines) in zip(grid, curves.items(), strict=False):
        for (label, curve), color in zip(lines.items(), _colors(), strict=False):
            points = [(float(number), value) for number, value in curve.items() if value is not None]
            axes.plot(*zip(*points, strict=True), color=color, marker="o", markersize=3, label=label)
        for which, scale, axis in (("x", axes.set_xscale, axes.xaxis), ("y", axes.set_yscale, axes.yaxis)):
            if which in log:
                scale("log")
                axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        if "y" not in log and axes.dataLim.ymin >= 0:
            axes.set_ylim(bottom=0)
        _style(axes, name)
        axes.legend(fontsize=7, frameon=False)
    for axes in grid[len(curves) :]:
        axes.axis("off")
    figure.suptitle(title, fontsize=10, color=INK)
    save(figure, path)


def draw_bars(bars: Bars, path: Path, log: bool = False, least: float = 0.0) -> None:
    """Draws a panel for each title, with a bar for each name and series. `log`: the axis of panels with a single series.

    `least`: where the other axes begin.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = max(len(series) * len(values) for series in bars.values() for values in series.values())
    figure = Figure(figsize=(3 + 4 * len(bars), max(4.0, 1.4 + rows / 5)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (title, series) in zip(figure.subplots(1, len(bars), squeeze=False).ravel(), bars.items(), strict=True):
        names, width = list(next(iter(series.values()))), 0.8 / len(series)
        for number, ((label, values), color) in enumerate(zip(series.items(), _colors(), strict=False)):
            places = [place + width * (number - (len(series) - 1) / 2) for place in range(len(names))]
            drawn = axes.barh(places, [values.get(name, 0.0) for name in names], width, color=color, label=label)
            if len(series) == 1:
                axes.bar_label(drawn, fmt="%.3g", padding=3)
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        _style(axes, title)
        if len(series) > 1:
            axes.set_xlim(left=least)
            axes.legend(fontsize=7, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=len(series))
        elif log:
            axes.set_xscale("symlog")  # shares stand beside rates
    save(figure, path)


def _colors() -> Iterable[str]:
    return chain((OWN, *OTHERS), repeat(GREY))


def _style(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=9, color=INK)
    axes.grid(color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
