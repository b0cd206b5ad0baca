"""Pictures of figures as curves; bars are drawn by `demo.picture`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.rows import Row
from builder.pictures import INK, save
from demo.picture import colors, draw_bars, style

Curve = dict[str, float | None]  # by the number on the axis; None: there is no value
Curves = Mapping[str, Mapping[str, Curve]]  # by title and line
COLUMNS = 4


def draw_rows(rows: Sequence[Row], title: str, path: Path) -> None:
    """Draws curves over the number in the names; if no name has one, bars."""
    if panels := panels_of(rows):
        draw(panels, title, path)
    else:
        values = {row.name: float(row.value) for row in rows if isinstance(row.value, (int, float))}
        draw_bars({title: {"": values}}, path, log=True)


def panels_of(rows: Sequence[Row]) -> Curves:
    """Returns the curves of figures that have a number in their names.

    `tenants/10/p50` with the unit `ms` is in the panel `tenants: ms` on the line `p50`, `rates/1.5/das/utility` in the panel
    `rates: utility` on the line `das`, and `curves/Fig. 5/search/8` in the panel `Fig. 5` on the line `search`.
    """
    panels: dict[str, dict[str, Curve]] = {}
    for row in rows:
        if row.x is not None and isinstance(row.value, (int, float)):
            before, _, after = row.divided
            if not after:
                *_, panel, line = before
            else:
                what = row.unit or (after.pop() if len(after) > 1 else "")
                panel, line = ": ".join(filter(None, ("/".join(before), what))), "/".join(after)
            panels.setdefault(panel, {}).setdefault(line, {})[f"{row.x:g}"] = row.value
    return panels


def draw(curves: Curves, title: str, path: Path) -> None:
    """Draws the figures. The suffix of the path chooses the format."""
    from matplotlib.figure import Figure

    rows, columns = -(-len(curves) // COLUMNS), min(len(curves), COLUMNS)
    figure = Figure(figsize=(8, 4.6) if len(curves) == 1 else (15, 3.4 * rows), dpi=110, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, (name, lines) in zip(grid, curves.items(), strict=False):
        for (label, curve), color in zip(lines.items(), colors(), strict=False):
            points = [(float(number), value) for number, value in curve.items() if value is not None]
            axes.plot(*zip(*points, strict=True), color=color, marker="o", markersize=3, label=label)
        if axes.dataLim.ymin >= 0:
            axes.set_ylim(bottom=0)
        style(axes, name)
        axes.legend(fontsize=7, frameon=False)
    for axes in grid[len(curves) :]:
        axes.axis("off")
    figure.suptitle(title, fontsize=10, color=INK)
    save(figure, path)
