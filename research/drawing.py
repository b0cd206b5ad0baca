"""Saves pictures: the same figures give the same bytes."""

from __future__ import annotations

from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

FONTS = ["DejaVu Sans", "Verdana", "Arial"]  # a reader without the first one sees the next


def save(figure: Figure, path: Path) -> None:
    """The suffix of the path decides the format. An SVG has text as text, which keeps it small, and no date."""
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"Date": None, "Creator": None} if path.suffix == ".svg" else None
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "hplm", "font.sans-serif": FONTS}):
        figure.savefig(path, metadata=metadata)
