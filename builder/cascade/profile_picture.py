"""The picture of `hplm cascade profile`: what the levels and the best plans score, over what they cost."""

from __future__ import annotations

from pathlib import Path

from builder.cascade.profile import Profile
from builder.pictures import GRID, INK, OTHERS, OWN


def draw_profile(profile: Profile, path: Path) -> None:
    """The path's suffix says which format."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    report = profile.report
    figure = Figure(figsize=(7.2, 4.6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot(
        [1000 * one.mean for one in profile.front], [one.score for one in profile.front],
        color=OWN, marker="o", markersize=4, linewidth=1.5, label="plans that no other one beats",
    )  # fmt: skip
    axes.scatter(
        [level["mean_ms"] for level in report["levels"]], [level["score"] for level in report["levels"]],
        color=OTHERS[0], marker="s", zorder=3, label="single levels",
    )  # fmt: skip
    for level in report["levels"]:
        place = level["mean_ms"], level["score"]
        axes.annotate(level["name"], place, textcoords="offset points", xytext=(6, -12), color=INK, fontsize=9)
    axes.set(xlabel="milliseconds a text, without waiting", ylabel=report["metric"])
    axes.set_xlim(left=0)
    axes.grid(color=GRID)
    axes.set_axisbelow(True)
    axes.legend(loc="lower right", frameon=False)
    axes.set_title(f"{report['tenant']} version {report['version']}, {report['texts']:,} texts", loc="left", color=INK)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
