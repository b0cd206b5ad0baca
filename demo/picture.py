"""Bars, and the colors of series."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain, repeat
from pathlib import Path

from builder.pictures import INK, OTHERS, OWN, panels, save

Bars = Mapping[str, Mapping[str, Mapping[str, float]]]  # by title, series and name
GREY = "#8c8c8c"


def draw_bars(bars: Bars, path: Path, log: bool = False, least: float = 0.0) -> None:
    """Draws a panel for each title, with a bar for each name and series. `log`: the axis of panels with a single series.

    `least`: where the other axes begin.
    """
    rows = max(len(series) * len(values) for series in bars.values() for values in series.values())
    figure, found = panels(3 + 4 * len(bars), max(4.0, 1.4 + rows / 5), len(bars))
    for axes, (title, series) in zip(found, bars.items(), strict=True):
        names, width = list(next(iter(series.values()))), 0.8 / len(series)
        for number, ((label, values), color) in enumerate(zip(series.items(), colors(), strict=False)):
            places = [place + width * (number - (len(series) - 1) / 2) for place in range(len(names))]
            drawn = axes.barh(places, [values.get(name, 0.0) for name in names], width, color=color, label=label)
            if len(series) == 1:
                axes.bar_label(drawn, fmt="%.3g", padding=3)
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.set_title(title, loc="left", fontsize=9, color=INK)
        if len(series) > 1:
            axes.set_xlim(left=least)
            axes.legend(fontsize=7, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=len(series))
        elif log:
            axes.set_xscale("symlog")  # shares stand beside rates
    save(figure, path)


def colors() -> Iterable[str]:
    return chain((OWN, *OTHERS), repeat(GREY))
