"""`python -m research.papers`: the papers' own figures, and a server's journal as a timeline."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from bench.curves import Curves, draw
from bench.rows import EngineDtype, Positive, Size, Whole, rows_of
from bench.run import table_of
from builder.pictures import check_picture
from research.options import FLAG, FLAT, JSON, command, run
from research.papers.alpaserve import alpaserve_curves
from research.papers.alpaserve_models import PAPER
from research.papers.staging import figures as staged
from research.papers.tabi import curves_of as curves_of_ways
from research.papers.tabi import figures as tabi_figures
from research.papers.tcb import Axes, curves_of, simulated
from research.papers.timeline import trace_of

app = command("research.papers", __doc__)


@dataclass(frozen=True)
class Output:
    quick: Annotated[bool, FLAG] = False
    "Little of everything: the figures mean nothing."
    picture: Path | None = None
    "Draw the figures into this file (.png, .svg, .pdf)."
    as_json: Annotated[bool, JSON] = False
    "End with one line of JSON."

    def __post_init__(self) -> None:
        if self.picture is not None:
            check_picture(self.picture)

    def show(self, figures: dict[str, Any], curves: Curves, title: str, listed: Mapping[str, Any] | None = None) -> None:
        """`listed`: the figures of the table, if it is not that of the curves."""
        if self.picture is not None:
            draw(curves, title, self.picture)
        print(json.dumps(figures) if self.as_json else f"{title}\n\n{table_of(list(rows_of(listed or curves)))}")


USUAL, USUAL_AXES = Output(), Axes()


@app.command
def alpaserve(*, seconds: Positive = 200.0, output: Annotated[Output, FLAT] = USUAL) -> None:
    """Simulates the curves of AlpaServe's Figs. 4 to 9 and 12 to 17. No V100 was used.

    :param seconds: of requests in each simulation
    """
    curves = alpaserve_curves(5.0 if output.quick else seconds, output.quick)
    source = f"simulated, with profiles of {PAPER['source']}"
    output.show({"source": source, "curves": curves}, curves, source)


@app.command
def tabi(
    *, folder: Path = Path(".hplm/bench-cascade"), dtype: EngineDtype = "auto", tenants: int = 100,
    output: Annotated[Output, FLAT] = USUAL,
) -> None:  # fmt: skip
    """Compares Tabi's ways to spare work, on the exits of the tenants that `hplm bench cascade` has built.

    Thresholds for several exits, weighted ensembles, words pruned by attention, votes, one exit for all, and the bound.

    :param folder: the benchmark's folder
    :param dtype: precision of the full stack
    :param tenants: at most
    """
    found = tabi_figures(folder, dtype, 1 if output.quick else tenants)
    title = f"means over tenants of {folder}: work of the layers, points lost by labels"
    output.show({"ways": found}, curves_of_ways(found), title, found)


@app.command
def tcb(*, axes: Annotated[Axes, FLAT] = USUAL_AXES, output: Annotated[Output, FLAT] = USUAL) -> None:
    """Simulates TCB's Figs. 9 to 13, 15 and 16.

    Packings by request rate and variance of the lengths; policies by B, L and variance; slots of a row; the share of a
    batch's time that a choice takes.
    """
    figures = simulated(axes.quick() if output.quick else axes)
    curves = curves_of(figures)
    stated = {"highest texts a second of concat": figures["to_concat"]}
    output.show(figures, curves, "simulated, with the settings of TCB's paper", curves | stated)


@app.command
def staging(
    *, size: Size = "minilm", tokens: Whole = 32, seconds: Positive = 10.0, dtype: EngineDtype = "auto",
    quick: Annotated[bool, FLAG] = False, as_json: Annotated[bool, JSON] = False,
) -> None:  # fmt: skip
    """Measures ways of staging a batch while another one computes (HMI's Table 6): requests a second, and ratios.

    :param size: of the model
    :param tokens: of a text
    :param seconds: of each way
    :param dtype: precision of the engine
    """
    found = staged("toy", 16, 0.3, "fp32") if quick else staged(size, tokens, seconds, dtype)
    print(json.dumps(found) if as_json else "\n".join(f"{name:32}{value}" for name, value in found.items()))


@app.command
def timeline(journal: Path, /, *, to: Path) -> None:
    """Writes a server's journal as a trace for chrome://tracing or ui.perfetto.dev (HMI's Fig. 17).

    :param journal: the file of the parameter `journal` of `<backbone>-upper`
    :param to: the file to write
    """
    trace = trace_of(journal)
    to.write_text(json.dumps(trace) + "\n", "utf-8")
    print(f"{to}: {len(trace['traceEvents'])} events")


def main(arguments: Sequence[str] | None = None) -> int:
    return run(app, arguments)


if __name__ == "__main__":
    sys.exit(main())
