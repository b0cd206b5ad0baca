"""The pictures of the report: Figs. 6 to 9 of Tabi for each tenant, and what the profile has promised beside what came."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from builder.cascade.report.figures import PARTS
from builder.cascade.report.ways import CASCADE, INFAAS, ORACLE, RANDOM, STRONG, VOTE
from builder.pictures import GRID, INK, OTHERS, OWN, save
from hplm.levels.dispatch import probabilities
from hplm.levels.reliability import BINS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Figures = Mapping[str, Any]
COLORS = {STRONG: INK, INFAAS: OTHERS[2], VOTE: OTHERS[1], CASCADE: OWN, RANDOM: OTHERS[0], ORACLE: OTHERS[3]}


def draw_all(figures: Figures, folder: Path) -> dict[str, str]:
    """Draws the pictures of one tenant. Returns the names of their files."""
    drawn: dict[str, Callable[[Figures], Figure]] = {"latency": latency, "promises": promises}
    if figures["rung"] is not None:
        drawn = {"confidence": confidence, **drawn, "cutoffs": cutoffs}
        if len([one for one in figures.get("alphas", []) if one["score"] is not None]) > 1:
            drawn["pruning"] = pruning
    names = {name: f"{figures['tenant']}-{name}.svg" for name in drawn}
    for name, draw in drawn.items():
        save(draw(figures), folder / names[name])
    return names


def _panels(figures: Figures, count: int, title: str, width: float = 4.6) -> tuple[Figure, list[Axes]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(0.6 + width * count, 4.2), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(1, count, squeeze=False)[0])
    for axes in panels:
        axes.grid(color=GRID, linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{figures['tenant']} version {figures['version']}: {title}", color=INK, x=0.01, ha="left", fontsize=11)
    return figure, panels


def confidence(figures: Figures) -> Figure:
    """Fig. 6: how often answers of a confidence are right, and which of them go on."""
    found = figures["confidence"]
    figure, (left, right) = _panels(figures, 2, f"confidence of level {found['level']}")
    for name, color, side in (("before", OTHERS[1], -1), ("after", OWN, 1)):
        if name in found:
            most = max(one["count"] for one in found[name]["bins"])
            for one in found[name]["bins"]:
                middle = (min(int(one["confidence"] * BINS), BINS - 1) + 0.5 + 0.21 * side) / BINS
                left.bar(middle, one["right"], width=0.42 / BINS, color=color, alpha=0.15 + 0.85 * one["count"] / most)
            left.bar(-1, 0, color=color, label=f"{name} calibration: ECE {found[name]['ece']:.3f}")
    left.plot([0, 1], [0, 1], color=INK, linewidth=1, linestyle="--")
    left.set(xlim=_from_lowest(found["after"]["bins"]), ylim=(0, 1.02), xlabel="confidence (darker: more texts)")
    left.set_ylabel("share of right answers")
    _legend_above(left, 1)
    first, texts = figures["plan"]["steps"][0], [one["texts"] for one in found["parts"]]
    middles = (np.arange(PARTS) + 0.5) / PARTS
    right.bar(middles, np.array(texts) / sum(texts), width=0.9 / PARTS, color=GRID, label="share of texts")
    grid = np.linspace(0, 1, 400)
    curve = probabilities(grid, first["cutoff"], first["slope"])
    right.plot(grid, curve, color=OWN, label=f"probability to go on: c {first['cutoff']:g}, k {first['slope']:g}")
    went = [(place, one["went_on"]) for place, one in zip(middles, found["parts"], strict=True) if one["went_on"] is not None]
    right.plot(*zip(*went, strict=True), "o", color=OTHERS[0], markersize=4, label="texts that went on")
    right.set(xlim=_from_lowest(found["after"]["bins"]), ylim=(-0.02, 1.05), xlabel="calibrated confidence", ylabel="share")
    _legend_above(right, 1)
    return figure


def _legend_above(axes: Axes, columns: int) -> None:
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, frameon=False, fontsize=9)


def _from_lowest(bins: Sequence[Mapping[str, float]]) -> tuple[float, float]:
    return max(0.0, min(one["confidence"] for one in bins) - 0.1), 1.02


def latency(figures: Figures) -> Figure:
    """Fig. 7: the milliseconds of texts. Boxes are the middle half, whiskers 1 % to 99 %, dots the mean."""
    ways: Mapping[str, Any] = figures["ways"]
    figure, (axes,) = _panels(figures, 1, "milliseconds a text, without waiting", 7.4)
    boxes = []
    for way, own in ways.items():
        low, first, middle, third, high = own["percentiles_ms"]
        boxes.append(
            {"label": way, "whislo": low, "q1": first, "med": middle, "q3": third, "whishi": high, "mean": own["mean_ms"]}
        )
    drawn = axes.bxp(
        boxes[::-1], orientation="horizontal", showfliers=False, showmeans=True, patch_artist=True, widths=0.55,
        meanprops={"marker": "o", "markerfacecolor": "white", "markeredgecolor": INK, "markersize": 5},
        medianprops={"color": "white", "linewidth": 2},
    )  # fmt: skip
    for box, way in zip(drawn["boxes"], list(ways)[::-1], strict=True):
        box.set(facecolor=COLORS.get(way, "#9a9a9a"), edgecolor=INK)
    axes.set_xlim(left=0)
    axes.set_xlabel("milliseconds: 1, 25, 50, 75 and 99 %; a dot is the mean")
    return figure


def cutoffs(figures: Figures) -> Figure:
    """Fig. 8: score and latency by the cutoff."""
    rows = figures["cutoffs"]
    figure, (left, right) = _panels(figures, 2, "what the cutoff c does to all texts")
    places = [row["cutoff"] for row in rows]
    _with_errors(left, places, rows, "points against strong")
    _chosen(left, [(row["cutoff"], row["points"]) for row in rows if row["chosen"]])
    right.plot(places, [row["mean_ms"] for row in rows], color=OWN, marker="o", markersize=4)
    strong = figures["ways"][STRONG]["mean_ms"]
    right.axhline(strong, color=INK, linewidth=1, linestyle="--")
    right.annotate(
        STRONG, (0.99, strong), xycoords=("axes fraction", "data"), textcoords="offset points", xytext=(0, 3), ha="right",
        color=INK, fontsize=9,
    )  # fmt: skip
    _chosen(right, [(row["cutoff"], row["mean_ms"]) for row in rows if row["chosen"]])
    right.set(xlabel="cutoff c", ylabel="mean milliseconds a text")
    right.set_ylim(bottom=0)
    share = right.twinx()
    share.plot(places, [100 * row["went_on"] for row in rows], color=OTHERS[0], linestyle=":", linewidth=1.5)
    share.set_ylabel("% of texts that go on (dotted)", color=OTHERS[0])
    share.set_ylim(0, 102)
    share.spines[["top"]].set_visible(False)
    left.set_xlabel("cutoff c")
    return figure


def pruning(figures: Figures) -> Figure:
    """Fig. 9: score and latency of texts that went on, by alpha."""
    rows = [row for row in figures["alphas"] if row["score"] is not None]
    figure, (left, right) = _panels(figures, 2, "what pruning does to texts that went on")
    places = [row["alpha"] for row in rows]
    _with_errors(left, places, rows, "points against no pruning")
    _chosen(left, [(row["alpha"], row["points"]) for row in rows if row["chosen"]])
    left.set_xlabel("alpha")
    right.plot(places, [row["mean_ms"] for row in rows], color=OWN, marker="o", markersize=4)
    for row in rows:
        right.annotate(
            f"{row['pruned']:.0%}", (row["alpha"], row["mean_ms"]), textcoords="offset points", xytext=(0, 8), ha="center",
            color=INK, fontsize=9,
        )  # fmt: skip
    _chosen(right, [(row["alpha"], row["mean_ms"]) for row in rows if row["chosen"]])
    right.set(xlabel="alpha (numbers: words pruned)", ylabel="mean milliseconds of the later levels")
    right.set_ylim(0, 1.15 * max(row["mean_ms"] for row in rows))
    return figure


def promises(figures: Figures) -> Figure:
    """Scores over costs of the profile's plans: as they were promised, and on texts that have chosen nothing."""
    rows = figures["targets"]
    figure, (axes,) = _panels(figures, 1, "plans of the profile", 7.4)
    for row in rows:
        promised = row["profiled"]
        axes.plot([promised["mean_ms"], row["mean_ms"]], [promised["points"], row["points"]], color=INK, linewidth=0.7)
    axes.plot(
        [row["profiled"]["mean_ms"] for row in rows], [row["profiled"]["points"] for row in rows],
        color=OTHERS[1], marker="s", markersize=5, linestyle="none", label="in the profile",
    )  # fmt: skip
    axes.errorbar(
        [row["mean_ms"] for row in rows], [row["points"] for row in rows], [row["points_error"] for row in rows],
        color=OWN, marker="o", markersize=5, capsize=2, linestyle="none", elinewidth=0.8, label="on these texts",
    )  # fmt: skip
    axes.axhline(0.0, color=INK, linewidth=1, linestyle="--")
    _chosen(axes, [(row["mean_ms"], row["points"]) for row in rows if row["chosen"]])
    axes.set(xlabel="mean milliseconds a text, without waiting", ylabel="points against strong")
    axes.set_xlim(left=0)
    _legend_above(axes, 2)
    return figure


def _with_errors(axes: Axes, places: Sequence[float], rows: Sequence[Mapping[str, Any]], label: str) -> None:
    axes.errorbar(
        places, [row["points"] for row in rows], [row["points_error"] for row in rows],
        color=OWN, marker="o", markersize=4, capsize=2, elinewidth=0.8,
    )  # fmt: skip
    axes.axhline(0.0, color=INK, linewidth=1, linestyle="--")
    axes.set_ylabel(label)


def _chosen(axes: Axes, places: Sequence[tuple[float, float]]) -> None:
    for place in places:
        axes.plot(*place, "o", color="none", markeredgecolor=OTHERS[0], markeredgewidth=2, markersize=11, zorder=4)
        axes.annotate("chosen", place, textcoords="offset points", xytext=(9, -13), color=OTHERS[0], fontsize=9)


def draw_across(tenants: Sequence[Figures], path: Path) -> None:
    """Draws the cascade of each tenant: points against strong over the share of strong's time."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 4.6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for way in (VOTE, INFAAS, CASCADE):
        rows = [one["ways"][way] for one in tenants]
        axes.errorbar(
            [row["mean_over_strong"] for row in rows], [row["points"] for row in rows],
            [row["points_error"] for row in rows], [row["mean_over_strong_error"] for row in rows],
            color=COLORS[way], marker="o", markersize=5, linestyle="none", elinewidth=0.8, label=way,
        )  # fmt: skip
    for one in tenants:
        own = one["ways"][CASCADE]
        place = own["mean_over_strong"], own["points"]
        axes.annotate(one["tenant"], place, textcoords="offset points", xytext=(6, 5), color=INK, fontsize=9)
    axes.plot(1, 0, "x", color=INK, markersize=8, label=STRONG)
    axes.set(xlabel="mean time a text, over that of strong", ylabel="points against strong")
    axes.set_xlim(left=0)
    axes.grid(color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle("all tenants; bars: standard errors", color=INK, x=0.01, ha="left", fontsize=11)
    _legend_above(axes, 4)
    save(figure, path)
