"""The picture of an adaptation: its loss, step by step, and how well held-out words were guessed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from builder.pictures import GRID, INK, OTHERS, OWN


def draw_adaptation(report: dict[str, Any], title: str, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.2), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot([step for step, _ in report["curve"]], [loss for _, loss in report["curve"]], color=OTHERS[0], label="training")
    if history := report.get("history"):
        steps = [round(exam["share"] * report["steps"]) for exam in history]
        losses = [report["at_start"]["loss"], *(exam["loss"] for exam in history)]
        axes.plot([0, *steps], losses, color=OWN, marker="o", label="dev")
        axes.legend(frameon=False)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.grid(color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, loc="left", color=INK)
    figure.savefig(path)
