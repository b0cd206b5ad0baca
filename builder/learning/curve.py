"""The picture of a training: its loss by step, and its score in each exam."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from builder.pictures import INK, OTHERS, OWN, panels, save


def draw_learning(report: dict[str, Any], metric: str, title: str, path: Path) -> None:
    """Draws the curve and the exams of a report (`Progress.reported`). `metric`: the name of the score."""
    exams, (figure, (losses, scores)) = report["exams"], panels(8, 4.2, 2)
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
    figure.suptitle(title, x=0.01, ha="left", color=INK)
    save(figure, path)
