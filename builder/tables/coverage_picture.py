"""The picture of `hplm domain inspect`: coverage of a text against table size."""

from __future__ import annotations

from pathlib import Path

from builder.pictures import INK, OTHERS, OWN, check_picture, panels, save
from builder.tables.coverage import Coverage
from hplm.plot.table import TableMeta


def draw(coverage: Coverage, meta: TableMeta, text: str, path: Path) -> None:
    """Draws the picture. The path's suffix says which format."""
    check_picture(path)
    from matplotlib.ticker import FuncFormatter, PercentFormatter

    figure, (axes,) = panels(8, 5.2)
    curve = coverage.curve
    megabytes = [size / 1e6 for size in curve.bytes]
    whole, *shorter = curve.within
    axes.plot(megabytes, curve.here, color=OWN, linewidth=2.4, label=f"whole {whole} in this table")
    lines = [(whole, f"whole {whole}, here or above"), *((name, f"{name} or longer") for name in shorter[:-1])]
    if meta.parent is None:
        lines = lines[1:]  # a root has no parent
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
    if max(megabytes) < 30 * min(megabytes):  # less than two powers of ten: label values between them as well
        axes.xaxis.set_minor_formatter(FuncFormatter(lambda value, _: megabytes_text(value) if _is_round(value) else ""))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel(f"table, MB ({meta.dtype}, index included)")
    axes.set_ylabel(f"windows of {text} ({coverage.tokens:,} tokens)")
    axes.set_title(f"{meta.domain} version {meta.version}: coverage against table size", loc="left", color=INK)
    figure.legend(frameon=False, loc="outside lower center", ncols=3)
    save(figure, path)


def megabytes_text(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.3g}"


def _is_round(value: float) -> bool:
    """Returns whether a number is 1, 2 or 5 times a power of ten."""
    return f"{value:e}"[0] in "125"
