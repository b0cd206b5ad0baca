"""The picture of a training: its loss by step, and its score in each exam."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from builder.pictures import GRID, INK, OTHERS, OWN, save


def draw_learning(report: dict[str, Any], metric: str, title: str, path: Path) -> None:
    """Draws the curve and the exams of a report (`Progress.reported`). `metric`: the name of the score."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure, exams = Figure(figsize=(8, 4.2), dpi=120, layout="constrained"), report["exams"]
    FigureCanvasAgg(figure)
    losses, scores = figure.subplots(1, 2)
    losses.plot(*zip(*report["curve"], strict=True), color=OTHERS[0], label="training")
    steps = [exam["step"] for exam in exams]
    losses.plot(steps, [exam["loss"] for exam in exams], color=OWN, marker="o", label="dev")
    losses.set_ylabel("loss")
    losses.legend(frameon=False)
    scores.plot(steps, [exam["score"] for exam in exams], color=OWN, marker="o")
    scores.axvline(report["kept_step"], color=INK, linewidth=1, linestyle=(0, (4, 3)))
    scores.set_ylabel(f"dev {metric}")
    for axes in (losses, scores):
        axes.set_xlabel("step")
        axes.grid(color=GRID, linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, x=0.01, ha="left", color=INK)
    save(figure, path)
