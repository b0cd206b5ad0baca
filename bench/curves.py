"""Figures as curves: by title, line and number on the axis. A table and a picture of them."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain, repeat
from pathlib import Path

from builder.pictures import GRID, INK, OTHERS, OWN, save

Curve = dict[str, float | None]  # by the number on the axis; None: there is no value
Curves = Mapping[str, Mapping[str, Curve]]  # by title and line
COLUMNS = 4
GREY = "#8c8c8c"


def table_of(curves: Curves) -> str:
    parts = []
    for title, lines in curves.items():
        numbers = list(dict.fromkeys(number for curve in lines.values() for number in curve))
        rows = [f"{'':24}" + "".join(f"{number:>10}" for number in numbers)]
        for name, curve in lines.items():
            values = (curve.get(number) for number in numbers)
            rows.append(f"{name:24}" + "".join(f"{'-' if value is None else f'{value:.4g}':>10}" for value in values))
        parts.append("\n".join([title, *rows]))
    return "\n\n".join(parts)


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
        for (label, curve), color in zip(lines.items(), chain((OWN, *OTHERS), repeat(GREY)), strict=False):
            points = [(float(number), value) for number, value in curve.items() if value is not None]
            axes.plot(*zip(*points, strict=True), color=color, marker="o", markersize=3, label=label)
        axes.set_title(name, loc="left", fontsize=9, color=INK)
        for which, scale, axis in (("x", axes.set_xscale, axes.xaxis), ("y", axes.set_yscale, axes.yaxis)):
            if which in log:
                scale("log")
                axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        if "y" not in log and axes.dataLim.ymin >= 0:
            axes.set_ylim(bottom=0)
        axes.grid(color=GRID)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=7, frameon=False)
    for axes in grid[len(curves) :]:
        axes.axis("off")
    figure.suptitle(title, fontsize=10, color=INK)
    save(figure, path)
