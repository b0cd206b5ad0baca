"""The report as a table and as a picture."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from builder.picture import GRID, INK, OTHERS, OWN

Runs = Sequence[dict[str, Any]]


def scores_of(runs: Runs) -> dict[str, dict[str, float]]:
    """By task and scheme: the metric that decides, in points, averaged over seeds."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for run in runs:
        found[run["task"], run["scheme"]].append(100 * run[run["metric"]])
    table: dict[str, dict[str, float]] = defaultdict(dict)
    for (task, scheme), points in found.items():
        table[task][scheme] = mean(points)
    return dict(table)


def averages_of(table: dict[str, dict[str, float]]) -> dict[str, float]:
    """Over the tasks, of each scheme."""
    schemes = next(iter(table.values()))
    return {scheme: mean(row[scheme] for row in table.values()) for scheme in schemes}


def markdown_of(runs: Runs) -> str:
    table = scores_of(runs)
    averages = averages_of(table)
    about = {run["task"]: (run["kind"], run["metric"], run["texts"]) for run in runs}
    lines = [
        "| task | kind | metric | texts | " + " | ".join(averages) + " |",
        "|" + "---|" * (4 + len(averages)),
    ]
    for task, row in table.items():
        kind, metric, texts = about[task]
        lines.append(f"| {task} | {kind} | {metric} | {texts:,} | " + " | ".join(f"{row[s]:.1f}" for s in averages) + " |")
    lines.append("| **average** | | | | " + " | ".join(f"**{points:.2f}**" for points in averages.values()) + " |")
    if "dedicated" in averages:
        gaps = (f"{points - averages['dedicated']:+.2f}" for points in averages.values())
        lines.append("| against dedicated | | | | " + " | ".join(gaps) + " |")
    return "\n".join(lines)


def draw(runs: Runs, path: Path) -> None:
    """The format is that of the path's suffix."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    table = scores_of(runs)
    table = {**table, "average": averages_of(table)}
    schemes = list(table["average"])
    figure = Figure(figsize=(1.4 + 1.05 * len(table), 4.2), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    width = 0.8 / len(schemes)
    colors = {scheme: color for scheme, color in zip((s for s in schemes if s != "hplm"), OTHERS, strict=False)} | {"hplm": OWN}
    for number, scheme in enumerate(schemes):
        places = [place + width * (number - (len(schemes) - 1) / 2) for place in range(len(table))]
        axes.bar(places, [row[scheme] for row in table.values()], width, color=colors[scheme], label=scheme)
    axes.set_xticks(range(len(table)), list(table), rotation=25, ha="right")
    axes.set_ylabel("points")
    axes.grid(axis="y", color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title("accuracy or F1 on unseen files, by scheme", loc="left", color=INK)
    figure.legend(frameon=False, loc="outside lower center", ncols=len(schemes))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
