"""Runs a benchmark. Its signature gives the options; its rows become a table, JSON and a picture."""

from __future__ import annotations

import importlib
import inspect
import json as json_format
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import is_dataclass, replace
from itertools import chain, repeat
from pathlib import Path
from typing import Annotated

from cyclopts import App, CycloptsError, Parameter

from bench.rows import QUICK, Row, Rows
from bench.turns import gflops, machine, threads
from builder.pictures import INK, OTHERS, OWN, check_picture, panels, save
from hplm.errors import InvalidInput

Curve = dict[str, float | None]  # by the number on the axis; None: there is no value
Curves = Mapping[str, Mapping[str, Curve]]  # by title and line
Bars = Mapping[str, Mapping[str, Mapping[str, float]]]  # by title, series and name
COLUMNS = 4  # of a picture
GREY = "#8c8c8c"
SEVERAL = re.compile(r"[\w.-]+(,[\w.-]+)+")


def run(command: str, package: str, name: str, words: Sequence[str]) -> int:
    """Runs the function `name` of the package's module `name`. Returns the exit status: 1 if a figure misses its target."""
    function, app = of(command, package, name)

    @app.meta.default
    def measure(
        *given: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
        json: bool = False,
        quick: bool = False,
        picture: Path | None = None,
    ) -> int:
        """
        :param json: end with one line of JSON
        :param quick: measure little of everything: the figures mean nothing, and no target is judged
        :param picture: write a picture of the figures to this file
        """
        if picture is not None:
            check_picture(picture)
        _, bound, _ = app.parse_args(given, exit_on_error=False, print_error=False)
        chosen = {**(QUICK[function] if quick else {}), **bound.arguments}
        short = (0.0,) if quick else ()
        case = {option: chosen.get(option, known.default) for option, known in inspect.signature(function).parameters.items()}
        before = gflops(*short)
        with threads(1) if quick else nullcontext():  # on a busy machine, threads wait for each other longer than they compute
            rows = [replace(row, least=None, most=None) if quick else row for row in function(**chosen)]
        after = gflops(*short)
        print(table_of(rows))
        if picture is not None:
            draw_rows(rows, command, picture)
        missed = [row.name for row in rows if row.missed]
        about = {"missed": missed, "gflops": [round(before, 1), round(after, 1)], "machine": machine(), "case": case}
        if json:
            print(json_format.dumps(nested(rows) | about, default=lambda one: vars(one) if is_dataclass(one) else str(one)))
        else:
            print(f"bare fp32 products: {before:.0f} GFLOP/s before, {after:.0f} after")
        return int(bool(missed))

    try:
        return app.meta(apart(words), exit_on_error=False, print_error=False, result_action="return_value") or 0
    except CycloptsError as error:
        raise InvalidInput(f"{name}: {' '.join(str(error).split())} See `{command} --help`") from None


def of(command: str, package: str, name: str) -> tuple[Callable[..., Rows], App]:
    """Returns the function of a benchmark, and what reads its options."""
    function = getattr(importlib.import_module(f"{package}.{name}"), name)
    app = app_of(command)
    app.default(function)
    return function, app


def app_of(name: str, about: str | None = None) -> App:
    options = Parameter(consume_multiple=True, negative=())
    return App(name=name, help=about, version_flags=(), default_parameter=options, help_format="plaintext")


def apart(words: Sequence[str]) -> list[str]:
    """Returns the words of a command. Several values of an option may stand apart, or between commas."""
    return [part for word in words for part in (word.split(",") if SEVERAL.fullmatch(word) else [word])]


def nested(rows: Sequence[Row]) -> dict:
    found: dict = {}
    for row in rows:
        *path, last = row.name.split("/")
        inner = found
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = _rounded(row.value)
    spread = {row.name: list(map(_rounded, row.spread)) for row in rows if row.spread}
    targets = {row.name: row.target for row in rows if row.target}
    return found | ({"spread": spread} if spread else {}) | ({"targets": targets} if targets else {})


def _rounded(value: float | str | None) -> float | str | None:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def table_of(rows: Sequence[Row]) -> str:
    """Returns a line for each figure. Figures whose names differ in one number share a line."""
    lines: dict[str, list[str]] = {}
    for row in rows:
        lines.setdefault(f"{row.series} [{row.unit}]" if row.unit else row.series, []).append(_cell(row))
    width = max(map(len, lines))
    return "\n".join(f"{name:{width}}  {'   '.join(cells)}" for name, cells in lines.items())


def _cell(row: Row) -> str:
    at = f"{row.x:g}: " if row.x is not None else ""
    spread = f", {_shown(row.spread[0])} to {_shown(row.spread[1])}" if row.spread else ""
    verdict = f" ({row.target}: {'MISSED' if row.missed else 'met'})" if row.target else ""
    return f"{at}{_shown(row.value)}{spread}{verdict}"


def _shown(value: float | str | None) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 10_000 else f"{value:,.0f}"
    return "-" if value is None else str(value)


def draw_rows(rows: Sequence[Row], title: str, path: Path) -> None:
    """Draws curves over the number in the names; if no name has one, bars."""
    if curves := panels_of(rows):
        draw(curves, title, path)
    else:
        values = {row.name: float(row.value) for row in rows if isinstance(row.value, (int, float))}
        draw_bars({title: {"": values}}, path, log=True)


def panels_of(rows: Sequence[Row]) -> Curves:
    """Returns the curves of figures that have a number in their names.

    `tenants/10/p50` with the unit `ms` is in the panel `tenants: ms` on the line `p50`, `rates/1.5/das/utility` in the panel
    `rates: utility` on the line `das`, and `curves/Fig. 5/search/8` in the panel `Fig. 5` on the line `search`.
    """
    found: dict[str, dict[str, Curve]] = {}
    for row in rows:
        if row.x is not None and isinstance(row.value, (int, float)):
            before, _, after = row.divided
            if not after:
                *_, panel, line = before
            else:
                what = row.unit or (after.pop() if len(after) > 1 else "")
                panel, line = ": ".join(filter(None, ("/".join(before), what))), "/".join(after)
            found.setdefault(panel, {}).setdefault(line, {})[f"{row.x:g}"] = row.value
    return found


def draw(curves: Curves, title: str, path: Path) -> None:
    """Draws the figures. The suffix of the path chooses the format."""
    rows, columns = -(-len(curves) // COLUMNS), min(len(curves), COLUMNS)
    figure, grid = panels(*((8, 4.6) if len(curves) == 1 else (15, 3.4 * rows)), columns, rows)
    for axes, (name, lines) in zip(grid, curves.items(), strict=False):
        for (label, curve), color in zip(lines.items(), colors(), strict=False):
            points = [(float(number), value) for number, value in curve.items() if value is not None]
            axes.plot(*zip(*points, strict=True), color=color, marker="o", markersize=3, label=label)
        if axes.dataLim.ymin >= 0:
            axes.set_ylim(bottom=0)
        axes.set_title(name, loc="left", fontsize=9, color=INK)
        axes.legend(fontsize=7, frameon=False)
    for axes in grid[len(curves) :]:
        axes.axis("off")
    figure.suptitle(title, fontsize=10, color=INK)
    save(figure, path)


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
