"""The colours of all pictures, the formats they are written in, and how: the same figures give the same bytes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hplm.errors import InvalidInput

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, GRID = "#333333", "#dddddd"
OWN = "#1b6ca8"
OTHERS = ("#d1495b", "#e09f3e", "#5b8e7d", "#8d6a9f")
FORMATS = (".png", ".svg", ".pdf")
FONTS = ["DejaVu Sans", "Verdana", "Arial"]  # a reader without the first one sees the next


def check_picture(path: Path) -> None:
    """Refuses a file name whose format is not known. Call it before anything is computed."""
    if path.suffix.lower() not in FORMATS:
        raise InvalidInput(f"--picture {path}: give it a name that ends in {', '.join(FORMATS)}")


def panels(width: float, height: float, columns: int = 1) -> tuple[Figure, list[Axes]]:
    """Returns a figure of so many inches with panels side by side, each with a grid."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    found = list(figure.subplots(1, columns, squeeze=False)[0])
    for axes in found:
        axes.grid(color=GRID, linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, found


def save(figure: Figure, path: Path) -> None:
    """The suffix of the path decides the format. An SVG has text as text, which keeps it small, and no date."""
    from matplotlib import rc_context

    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"Date": None, "Creator": None} if path.suffix == ".svg" else None
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "hplm", "font.sans-serif": FONTS}):
        figure.savefig(path, metadata=metadata)
