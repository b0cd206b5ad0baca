"""Draws the rows of a benchmark: curves over the number in their names, or bars if no name has a number."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench import curves
from bench.rows import Row
from builder.pictures import INK, OWN, save


def draw(rows: Sequence[Row], title: str, path: Path) -> None:
    """Draws a panel for each first part of the names, and each unit; figures without a unit share the last part of the name."""
    panels: dict[str, dict[str, curves.Curve]] = {}
    for row in rows:
        if row.x is not None and isinstance(row.value, (int, float)):
            first, _, rest = row.series.partition("/")
            what = row.unit or rest.rpartition("/")[2]
            line = row.series.removeprefix(f"{first}/").removesuffix(f"/{what}")
            panels.setdefault(f"{first}: {what}", {}).setdefault(line, {})[f"{row.x:g}"] = row.value
    if panels:
        curves.draw(panels, title, path)
    else:
        _bars({row.name: float(row.value) for row in rows if isinstance(row.value, (int, float))}, title, path)


def _bars(values: dict[str, float], title: str, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1 + len(values) / 4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.barh(list(values), list(values.values()), color=OWN)
    axes.invert_yaxis()
    axes.set_xscale("symlog")  # shares stand beside rates
    axes.set_title(title, loc="left", color=INK)
    save(figure, path)
