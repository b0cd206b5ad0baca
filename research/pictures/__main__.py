"""Draws the pictures of the docs from stored figures: `python -m research.pictures`. It measures nothing.

The accuracy report draws its own (docs/training.md has the command), and `hplm bench schedule` that of the policies.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from research.comparison.compare import summary
from research.comparison.results import Results
from research.pictures import architecture, request
from research.pictures.charts import draw_overload, draw_tenants

RESEARCH = Path(__file__).resolve().parents[1]
COMPARISON = RESEARCH / "report" / "results" / "bert-base-saturate"
OVERLOAD = RESEARCH / "results" / "overload.json"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m research.pictures", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--to", type=Path, default=Path("docs/pictures"), help="folder (default: %(default)s)")
    given = parser.parse_args(arguments)
    for picture in draw(given.to):
        print(picture)


def draw(folder: Path) -> list[Path]:
    comparison = Results(COMPARISON)
    memory = summary(comparison)["memory"]["hplm"]
    pictures = [folder / f"{name}.svg" for name in ("architecture", "request", "tenants", "overload")]
    architecture.draw(pictures[0], memory["shared_mb"], memory["mapped_mb"], memory["swapped_mb"])
    request.draw(pictures[1])
    draw_tenants(pictures[2], comparison)
    draw_overload(pictures[3], OVERLOAD)
    return pictures


if __name__ == "__main__":
    main()
