"""The picture of `hplm calibrate`: how often answers of a confidence are right, before and after."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from builder.evaluation.reliability import BINS
from builder.pictures import INK, OTHERS, OWN, panels, save


def draw_reliability(report: dict[str, Any], path: Path) -> None:
    """Draws the picture from the report of a calibration; the path's suffix says which format."""
    sides = [(name, report[name], color) for name, color in (("before", OTHERS[0]), ("after", OWN)) if report[name] is not None]
    figure, panel = panels(0.8 + 3.6 * len(sides), 4.2, len(sides))
    for axes, (name, described, color) in zip(panel, sides, strict=True):
        most = max(one["count"] for one in described["bins"])
        for one in described["bins"]:
            axes.bar(one["confidence"], one["right"], width=0.9 / BINS, color=color, alpha=0.1 + 0.9 * one["count"] / most)
        axes.plot([0, 1], [0, 1], color=INK, linewidth=1, linestyle="--")
        axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal", xlabel="confidence")
        axes.set_title(f"{name}: ECE {described['ece']:.3f}", loc="left", color=INK)
        axes.set_ylabel("share of right answers")
    figure.suptitle(
        f"{report['tenant']} version {report['version']}, {report['texts']:,} texts; darker: more of them", color=INK
    )
    save(figure, path)
