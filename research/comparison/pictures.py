"""Draws the report's pictures. Each scheme has the same colour in all of them, and every title says what a picture shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, PercentFormatter

from bench.tools.thread_spans import Span
from builder.pictures import GRID, INK, save
from research.comparison.served_schemes import COMPARED, DISK

CHARACTERS = 11  # characters of a title in an inch
NAMES = {
    "hplm": "hPLM",
    "adapter": "adapters, no tables",
    "plot": "tables, no adapters",
    "shared": "one shared BERT",
    "dedicated": "dedicated, Triton's model control",
    "dedicated_inprocess": "dedicated, one process",
    DISK: "dedicated, one process, from disk",
    "compressed": "compressed, one process",
}
COLOURS = {
    "hplm": "#1b6ca8",
    "adapter": "#5b8e7d",
    "plot": "#8d6a9f",
    "shared": "#8c8c8c",
    "dedicated": "#d1495b",
    "dedicated_inprocess": "#e09f3e",
    DISK: "#b5651d",
    "compressed": "#3d405b",
}
KINDS = ("#1b6ca8", "#e09f3e", "#5b8e7d", "#d1495b", "#8d6a9f", "#8c8c8c", "#3d405b")

WIDE_ENOUGH = 0.03  # a span with this share of the timeline has space for a word

Curves = Mapping[str, Sequence[tuple[float, float]]]  # of each scheme


def over_tenants(path: Path, curves: Curves, title: str, y: str) -> None:
    with _picture(path, title, 5.0) as axes:
        for scheme in _known(curves):
            tenants, values = zip(*curves[scheme], strict=True)
            axes.plot(tenants, values, marker="o", markersize=5, label=NAMES[scheme], **_line(scheme))
        axes.set_xscale("log")
        axes.set_yscale("log")
        counts = sorted({tenants for curve in curves.values() for tenants, _ in curve})
        axes.set_xticks(counts, [f"{count:,}" for count in counts], minor=False)
        axes.set_xticks([], minor=True)
        _plain_numbers(axes)
        axes.set_xlabel("tenants")
        axes.set_ylabel(y)


def distribution(path: Path, curves: Curves, title: str) -> None:
    """Draws shares of all sent requests. A curve stays below 100 % if some requests were never answered in time."""
    with _picture(path, title, 5.0) as axes:
        for scheme in _known(curves):
            times, shares = zip(*curves[scheme], strict=True)
            axes.plot(times, shares, label=NAMES[scheme], **_line(scheme))
        axes.set_xscale("log")
        axes.set_ylim(0, 1.03)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.xaxis.set_major_formatter(FuncFormatter(_milliseconds))
        axes.set_xlabel("response time, from the moment the request was due")
        axes.set_ylabel("requests answered by then")


def bars(path: Path, rows: Sequence[tuple[str, float, str]], title: str, x: str, colours: Sequence[str], log: bool) -> None:
    """Draws a bar for each row, the first on top. A row has a name, a value and the text beside the bar."""
    with _picture(path, title, 0.55 * len(rows) + 1.4, legend=False) as axes:
        names, values, said = zip(*rows, strict=True)
        places = np.arange(len(rows))[::-1]
        axes.barh(places, values, color=colours, height=0.62)
        if log:
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        for place, value, text in zip(places, values, said, strict=True):
            axes.annotate(text, (value, place), xytext=(5, 0), textcoords="offset points", va="center", color=INK)
        axes.set_yticks(places, names)
        axes.set_xlim(min(values) / 3 if log else 0, max(values) * (30 if log else 1.45))  # space for the texts
        axes.set_xlabel(x)
        axes.grid(axis="y", visible=False)


def lanes(path: Path, spans: Sequence[Span], threads: Sequence[str], title: str) -> None:
    """Draws a lane for each thread, with time to the right. A wide span contains its name without its kind."""
    begin, end = min(span.start for span in spans), max(span.end for span in spans)
    colours = {kind: KINDS[number % len(KINDS)] for number, kind in enumerate(dict.fromkeys(span.kind for span in spans))}
    named: set[str] = set()
    with _picture(path, title, 0.6 * len(threads) + 1.9, width=11.0) as axes:
        for span in spans:
            lane = len(threads) - 1 - threads.index(span.thread)
            start, took = (span.start - begin) * 1e3, (span.end - span.start) * 1e3
            label = span.kind if span.kind not in named else None
            named.add(span.kind)
            axes.barh(
                lane, took, left=start, height=0.66, color=colours[span.kind], edgecolor="white", linewidth=0.5, label=label
            )
            if span.end - span.start > WIDE_ENOUGH * (end - begin):
                axes.text(start + took / 2, lane, span.name[len(span.kind) :].strip(), ha="center", va="center", color="white")
        axes.set_yticks(range(len(threads)), threads[::-1])
        axes.set_xlabel("ms")
        axes.grid(axis="y", visible=False)


class _picture:
    """A context with axes in the style of all our pictures. It saves the picture at its end."""

    def __init__(self, path: Path, title: str, height: float, width: float = 8.0, legend: bool = True) -> None:
        self._path, self._legend = path, legend
        self._figure = Figure(figsize=(width, height), dpi=140, layout="constrained")
        FigureCanvasAgg(self._figure)
        self._axes = self._figure.subplots()
        self._axes.set_title(fill(title, round(CHARACTERS * width)), loc="left", color=INK)

    def __enter__(self) -> Axes:
        self._axes.grid(color=GRID, linewidth=0.7)
        self._axes.set_axisbelow(True)
        self._axes.spines[["top", "right"]].set_visible(False)
        return self._axes

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind is not None:
            return
        if self._legend:
            self._figure.legend(frameon=False, loc="outside lower center", ncols=3)
        save(self._figure, self._path)


def _known(curves: Curves) -> list[str]:
    return [scheme for scheme in COMPARED if curves.get(scheme)]


def _line(scheme: str) -> dict[str, Any]:
    """Returns arguments of `Axes.plot`."""
    return {"color": COLOURS[scheme], "linewidth": 2.6 if scheme == "hplm" else 1.7, "zorder": 3 if scheme == "hplm" else 2}


def _plain_numbers(axes: Axes) -> None:
    shown: Callable[[float, object], str] = lambda value, _: f"{value:,g}"  # noqa: E731
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 3.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(shown))
    axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: ""))


def _milliseconds(value: float, _: object) -> str:
    return f"{value / 1000:g} s" if value >= 1000 else f"{value:g} ms"
