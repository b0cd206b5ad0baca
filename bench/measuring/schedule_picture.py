"""Draws the picture of `hplm bench schedule`: utility and on-time share of every policy against the rate."""

from __future__ import annotations

from pathlib import Path

from builder.pictures import GRID, INK

COLORS = {
    "default": "#1b6ca8", "das": "#d1495b", "slotted_das": "#e09f3e", "fcfs": "#888888", "sjf": "#5b8e7d",
    "sjf_in_time": "#9cc5a1", "edf": "#8d6a9f", "length_aware": "#b08968",
}  # fmt: skip


def draw(figures: dict, path: Path) -> None:
    """Draws the figures. The suffix of the path chooses the format."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    figure = Figure(figsize=(10, 7.4), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(2, 2, sharex=True, sharey=True)
    for row, (key, variance) in zip(grid, (("rates_var20", 20), ("rates", 100)), strict=True):
        for axes, (metric, title) in zip(row, (("utility", "utility"), ("on_time", "answered in time")), strict=True):
            for name, color in COLORS.items():
                values = [by_policy[name][metric] for by_policy in figures[key].values()]
                width = 2.8 if name == "default" else 1.5
                axes.plot([float(rate) for rate in figures[key]], values, color=color, linewidth=width, label=name)
            axes.set_title(f"{title}, variance {variance}", loc="left", color=INK)
            axes.set_ylim(0, 1.03)
            axes.yaxis.set_major_formatter(PercentFormatter(1.0))
            axes.grid(color=GRID, linewidth=0.7)
            axes.spines[["top", "right"]].set_visible(False)
    for axes in grid[-1]:
        axes.set_xlabel("arrivals, in multiples of capacity")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="outside lower center", ncols=4)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
