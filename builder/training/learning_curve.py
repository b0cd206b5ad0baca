"""The picture of a training: losses and dev score by epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from builder.pictures import GRID, INK, OTHERS, OWN


def draw_training(report: dict[str, Any], title: str, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    history = report["history"]
    epochs = [entry["epoch"] for entry in history]
    figure = Figure(figsize=(8, 4.2), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    losses, scores = figure.subplots(1, 2)
    losses.plot(epochs, [entry["loss"] for entry in history], color=OTHERS[0], marker="o", label="training")
    losses.plot(epochs, [entry["dev_loss"] for entry in history], color=OWN, marker="o", label="dev")
    losses.set_ylabel("loss")
    losses.legend(frameon=False)
    scores.plot(epochs, [entry["dev"] for entry in history], color=OWN, marker="o")
    if "at_start" in report:
        scores.plot([0], [report["at_start"]["dev"]], color=OWN, marker="o", fillstyle="none")
    scores.axvline(report["kept_epoch"], color=INK, linewidth=1, linestyle=(0, (4, 3)))
    scores.set_ylabel(f"dev {report['dev']['metric']}")
    for axes in (losses, scores):
        axes.set_xlabel("epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(color=GRID, linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, x=0.01, ha="left", color=INK)
    figure.savefig(path)
