"""The picture of `hplm domain inspect`: how much of a text a table knows, against what it takes."""

from __future__ import annotations

from pathlib import Path

from builder.pictures import GRID, INK, OTHERS, OWN, check_picture
from builder.tables.coverage import Coverage
from hplm.plot.table import TableMeta


def draw(coverage: Coverage, meta: TableMeta, text: str, path: Path) -> None:
    """The format is that of the path's suffix."""
    check_picture(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, PercentFormatter

    figure = Figure(figsize=(8, 5.2), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    curve = coverage.curve
    megabytes = [size / 1e6 for size in curve.bytes]
    whole, *shorter = curve.within
    axes.plot(megabytes, curve.here, color=OWN, linewidth=2.4, label=f"whole {whole} in this table")
    lines = [(whole, f"whole {whole}, here or above"), *((name, f"{name} or longer") for name in shorter[:-1])]
    if meta.parent is None:
        lines = lines[1:]  # nothing is above
    for (name, label), color in zip(lines, OTHERS, strict=False):
        axes.plot(megabytes, curve.within[name], color=color, linewidth=1.8, label=label)
    now = sum(meta.sizes().values()) / 1e6
    axes.axvline(now, color=INK, linewidth=1, linestyle=(0, (4, 3)))
    axes.annotate(
        f"now: {megabytes_text(now)} MB", (now, 0.02), xytext=(-6, 0), textcoords="offset points", ha="right", color=INK
    )
    axes.set_xscale("log")
    axes.set_ylim(0, 1.03)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: megabytes_text(value)))
    if max(megabytes) < 30 * min(megabytes):  # less than two powers of ten: name those between as well
        axes.xaxis.set_minor_formatter(FuncFormatter(lambda value, _: megabytes_text(value) if _is_round(value) else ""))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel(f"table, MB ({meta.dtype}, index included)")
    axes.set_ylabel(f"windows of {text} ({coverage.tokens:,} tokens)")
    axes.set_title(f"{meta.domain} version {meta.version}: coverage against table size", loc="left", color=INK)
    axes.grid(color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, loc="outside lower center", ncols=3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def megabytes_text(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.3g}"


def _is_round(value: float) -> bool:
    """1, 2 or 5 times a power of ten."""
    return f"{value:e}"[0] in "125"
