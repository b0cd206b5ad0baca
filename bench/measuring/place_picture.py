"""Draws the picture of `hplm bench place`: the curves of AlpaServe's figures, from simulated figures."""

from __future__ import annotations

from pathlib import Path

from bench.measuring.place_curves import Curves
from builder.pictures import GRID, INK, OTHERS, OWN

COLORS = (OWN, *OTHERS)
COLUMNS = 4


def draw(curves: Curves, path: Path) -> None:
    """Draws the figures. The suffix of the path chooses the format."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = -(-len(curves) // COLUMNS)
    figure = Figure(figsize=(15, 3.4 * rows), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, COLUMNS, squeeze=False).ravel()
    for axes, (title, lines) in zip(grid, curves.items(), strict=False):
        for (name, by_number), color in zip(lines.items(), COLORS, strict=False):
            points = [(float(number), value) for number, value in by_number.items() if value is not None]
            axes.plot(*zip(*points, strict=True), color=color, marker="o", markersize=3, label=name)
        axes.set_title(title, loc="left", fontsize=9, color=INK)
        axes.set_ylim(bottom=0)
        axes.grid(color=GRID)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=7, frameon=False)
    for axes in grid[len(curves) :]:
        axes.axis("off")
    figure.suptitle("simulated, with the profiles of AlpaServe's paper", fontsize=10, color=INK)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
