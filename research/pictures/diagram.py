"""A diagram of boxes and arrows. Coordinates are points from the upper left corner."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from matplotlib.path import Path as Line

from builder.pictures import save
from builder.tables.coverage_picture import INK

POINTS_PER_INCH = 72
LINE_HEIGHT = 1.35  # of the size of the text
QUIET = "#8c8c8c"

Point = tuple[float, float]
Box = tuple[float, float, float, float]  # left, top, width, height


class Diagram:
    def __init__(self, width: float, height: float) -> None:
        inches = (width / POINTS_PER_INCH, height / POINTS_PER_INCH)
        self._figure = Figure(figsize=inches, dpi=POINTS_PER_INCH, facecolor="white")
        FigureCanvasAgg(self._figure)
        self._axes = self._figure.add_axes((0, 0, 1, 1))
        self._axes.set_xlim(0, width)
        self._axes.set_ylim(height, 0)
        self._axes.set_axis_off()

    def box(self, box: Box, edge: str = INK, fill: str = "white") -> None:
        left, top, width, height = box
        style = "round,pad=0,rounding_size=6"
        self._axes.add_patch(FancyBboxPatch((left, top), width, height, style, edgecolor=edge, facecolor=fill, linewidth=1.4))

    def text(
        self,
        at: Point,
        text: str,
        size: float = 12,
        color: str = INK,
        align: Literal["left", "center", "right"] = "left",
        bold: int = 0,
    ) -> None:
        """The first line's middle is at `at`; the first `bold` lines are bold."""
        x, y = at
        for number, line in enumerate(text.splitlines()):
            weight, below = "bold" if number < bold else "normal", number * size * LINE_HEIGHT
            self._axes.text(x, y + below, line, size=size, color=color, ha=align, va="center", weight=weight)

    def arrow(self, *points: Point, color: str = INK, dashed: bool = False) -> None:
        """Through all points, with corners."""
        line = Line(points, [Line.MOVETO, *[Line.LINETO] * (len(points) - 1)])
        dashes = "--" if dashed else "-"
        arrow = FancyArrowPatch(path=line, arrowstyle="-|>", mutation_scale=12, color=color, linewidth=1.4, linestyle=dashes)
        self._axes.add_patch(arrow)

    def save(self, path: Path) -> None:
        save(self._figure, path)
