"""What all pictures have in common: their colours, and the formats they are written in."""

from __future__ import annotations

from pathlib import Path

from hplm.errors import InvalidInput

INK, GRID = "#333333", "#dddddd"
OWN = "#1b6ca8"
OTHERS = ("#d1495b", "#e09f3e", "#5b8e7d", "#8d6a9f")
FORMATS = (".png", ".svg", ".pdf")


def check_picture(path: Path) -> None:
    """Refuses a name whose format is not known; called before anything is computed."""
    if path.suffix.lower() not in FORMATS:
        raise InvalidInput(f"--picture {path}: give it a name that ends in {', '.join(FORMATS)}")
