"""Charts of stored figures: throughput against tenants, and what a server does under overload."""

from __future__ import annotations

import json
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from builder.pictures import save
from builder.tables.coverage_picture import GRID, INK
from research.comparison.compare import summary
from research.comparison.pictures import COLOURS
from research.comparison.results import Results

NAMES = {
    "hplm": "hPLM",
    "dedicated_inprocess": "dedicated, one process",
    "dedicated": "dedicated, model control",
}
IN_TIME, LATE, REFUSED = "#1b6ca8", "#d1495b", "#d9d9d9"
SIZE = 12  # of the text


def draw_tenants(path: Path, results: Results) -> None:
    rates = summary(results)["schemes"]
    figure, axes = _axes(4.0, "requests answered a second: BERT-base, 128 tokens, memory for 20 dedicated models")
    axes.set_xscale("log")
    for scheme, name in NAMES.items():
        curve = {int(count): rate for count, rate in rates[scheme].items()}
        most, is_ours = max(curve), scheme == "hplm"
        width = 3 if is_ours else 2
        axes.plot(list(curve), list(curve.values()), color=COLOURS[scheme], marker="o", linewidth=width, clip_on=False)
        value = f"{curve[most]:.1f}" if curve[most] >= 1 else f"{curve[most]:.2f}"
        axes.annotate(
            f"{name}: {value}", (most, curve[most]), xytext=(10, 2), textcoords="offset points", va="center", size=SIZE,
            color=INK, weight="bold" if is_ours else "normal",
        )  # fmt: skip
    counts = sorted({int(count) for scheme in NAMES for count in rates[scheme]})
    axes.set_xticks(counts, [f"{count:,}" for count in counts])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("tenants", size=SIZE)
    axes.set_ylim(0, 20)
    axes.set_yticks(range(0, 21, 5))
    save(figure, path)


def draw_overload(path: Path, figures: Path) -> None:
    """Shares of the offered requests. The share that was admitted follows from the two measured shares in time."""
    found = json.loads(figures.read_text("utf-8"))
    of_offered, of_admitted = found["on_time_of_offered"], found["on_time_of_admitted"]
    simulated, admitted = found["simulated_on_time_of_offered"], of_offered / of_admitted
    title = f"requests offered at {found['case']['overload']:g} times the capacity: BERT-base, 128 tokens"
    figure, axes = _axes(2.9, title)
    axes.barh(["server"], [1.0], color=REFUSED, height=0.55)
    axes.barh(["server"], [admitted], color=LATE, height=0.55)
    axes.barh(["server", "simulator"], [of_offered, simulated], color=IN_TIME, height=0.55)
    for place, share in enumerate((of_offered, simulated)):
        axes.text(share / 2, place, f"{_percent(share)} in time", ha="center", va="center", color="white", size=SIZE)
    p50, p99 = found["refusal_p50_ms"], found["refusal_p99_ms"]
    said = f"refused on arrival, after\n{p50:g} ms (median), {p99:g} ms (99 %)"
    axes.text((1 + admitted) / 2, 0, said, ha="center", va="center", color=INK, size=SIZE)
    axes.annotate(
        f"admitted, but not in time\n({_percent(of_admitted)} of the admitted were)", ((of_offered + admitted) / 2, 0.28),
        xytext=(0.5, 1.0), va="center", size=SIZE, color=INK, arrowprops={"arrowstyle": "-", "color": LATE},
        bbox={"facecolor": "white", "edgecolor": "none"},
    )  # fmt: skip
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share:.0%}".replace("%", " %")))
    axes.grid(axis="y", visible=False)
    save(figure, path)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _axes(height: float, title: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(8, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.set_title(title, loc="left", color=INK, size=SIZE)
    axes.tick_params(labelsize=SIZE)
    axes.grid(color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes
