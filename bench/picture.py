"""Draws the rows of a benchmark: curves over the number in their names, and bars for rows without a number."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, product
from pathlib import Path

from bench.rows import Row
from builder.pictures import GRID, INK, OTHERS, OWN, save

WIDE, HIGH = 5.0, 3.2  # inches of a panel
COLUMNS = 2
STYLES = ("-", "--", ":")


def draw(rows: Sequence[Row], title: str, path: Path) -> None:
    """Draws a panel for each first part of the names, and each unit; figures without a unit share the last part of the name."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels: dict[tuple[str, str], dict[str, list[Row]]] = {}
    drawn = [row for row in rows if isinstance(row.value, (int, float))]
    curves = [row for row in drawn if row.x is not None]
    for row in curves or drawn:
        first, _, rest = row.series.partition("/")
        of = (first, row.unit or rest.rpartition("/")[2]) if curves else ("", row.unit)
        panels.setdefault(of, {}).setdefault(row.series, []).append(row)
    lines = -(-len(panels) // COLUMNS)
    figure = Figure(figsize=(WIDE * COLUMNS, HIGH * lines), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, color=INK)
    for number, ((first, what), series) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(lines, COLUMNS, number)
        axes.set_title(": ".join(filter(None, (first, what))), loc="left", color=INK)
        axes.grid(color=GRID, linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        if first:
            for (name, line), (style, color) in zip(series.items(), cycle(product(STYLES, (OWN, *OTHERS)))):
                label = name.removeprefix(f"{first}/").removesuffix(f"/{what}")
                axes.plot(*_points(line), style, color=color, marker=".", label=label)
            if len(series) > 1:
                axes.legend(frameon=False, fontsize="x-small")
        else:
            axes.barh(list(series), [_points(line)[1][0] for line in series.values()], color=OWN)
            axes.invert_yaxis()
    save(figure, path)


def _points(line: Sequence[Row]) -> tuple[list[float], list[float]]:
    return [row.x or 0.0 for row in line], [float(row.value or 0.0) for row in line]
