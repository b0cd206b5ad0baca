"""Draws the picture of `hplm bench tcb`: TCB's Figs. 10 to 12, 15 and 16 from simulated figures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from builder.pictures import GRID, INK, OTHERS, OWN

COLORS = (OWN, *OTHERS)


def draw(figures: dict, path: Path) -> None:
    """Draws the figures. The suffix of the path chooses the format."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 7), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 4)
    for axes, (name, by_rate) in zip(above, figures["packings"].items(), strict=True):
        _lines(axes, by_rate, lambda one: one["texts_per_s"])
        axes.set(title=f"{name.replace(' var', ', variance ')}: texts a second", xlabel="rate / capacity")
    for axes, (key, label) in zip(below, (("rows", "B"), ("variances", "variance"), ("row_tokens", "L")), strict=False):
        _lines(axes, figures[key], lambda one: one["utility"])
        axes.set(title=f"utility by {label}", xlabel=label)
    choosing = {
        rate: {"DAS": one["concat"], "Slotted-DAS": one["slotted"]} for rate, one in figures["packings"]["DAS var20"].items()
    }
    _lines(below[3], choosing, lambda one: 100 * one["choosing_share"])
    below[3].set(title="choosing, % of a batch's time", xlabel="rate / capacity")
    figure.savefig(path)


def _lines(axes: Any, by_axis: dict[str, dict], shown: Callable[[dict], float]) -> None:
    for name, color in zip(next(iter(by_axis.values())), COLORS, strict=False):
        values = [shown(by_name[name]) for by_name in by_axis.values()]
        axes.plot([float(axis) for axis in by_axis], values, color=color, marker="o", markersize=3, label=name)
    axes.set_ylim(bottom=0)
    axes.grid(color=GRID)
    axes.tick_params(colors=INK)
    axes.legend(fontsize=7, frameon=False)
