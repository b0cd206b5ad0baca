"""`python -m research.accuracy --tier 1`: scores hPLMs and their rivals on eight tasks in four domains of docstrings."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from bench.rows import Device, OtherModel, Whole
from bench.run import app_of
from demo.building import BACKBONE, fingerprint, minilm, named
from demo.data import stored_demo_data
from hplm.engine.engine import resolve_device
from hplm.errors import InvalidInput
from hplm.model.original import configuration_of
from research.accuracy.report import AccuracyReport
from research.accuracy.studies import TIERS
from research.accuracy.table import draw, markdown_of, warning_of
from research.options import run
from research.result_file import ResultFile

app = app_of("python -m research.accuracy", __doc__)


@app.default
def accuracy(
    *,
    tier: Literal[0, 1, 2, 3] = 1,
    studies: tuple[str, ...] = ("schemes",),
    list_studies: Annotated[bool, Parameter("--list")] = False,
    finished: bool = False,
    seeds: tuple[int, ...] = (),
    work: Path = Path(".hplm/report"),
    results: Path = Path("research/results/accuracy.jsonl"),
    model: OtherModel = "",
    pictures: Path | None = None,
    device: Device = "auto",
    at_once: Whole | None = None,
) -> None:
    """Computes the missing numbers, and prints all.

    :param tier: how much to compute
    :param studies: which, or all; --list prints them
    :param list_studies: print the studies, and how many numbers of each are finished
    :param finished: show the finished numbers and compute nothing
    :param seeds: instead of the tier's
    :param work: folder of data and stores
    :param results: file of finished numbers
    :param pictures: folder into which each study is drawn
    :param at_once: trainings side by side; by default as many as cores and memory hold, and one on a GPU
    """
    amounts = replace(TIERS[tier], seeds=seeds) if seeds else TIERS[tier]
    source = model or str(minilm())
    layers: int = configuration_of(source).num_hidden_layers
    data = stored_demo_data(work / "data" / f"{tier}-{fingerprint()}", amounts.sizes, further=True)
    name, on = named(model) if model else BACKBONE, resolve_device(device)
    report = AccuracyReport(name, source, layers, data, amounts, work / "made", ResultFile(results), on)
    if list_studies:
        for study in report.studies.values():
            print(f"{study.name:14} {len(report.finished(study)):4} of {report.size(study):4}  {study.title}")
        return
    names = list(report.studies) if studies == ("all",) else studies
    if unknown := [one for one in names if one not in report.studies]:
        raise InvalidInput(f"unknown study {unknown[0]!r}: choose from {', '.join(report.studies)}, all")
    chosen = [report.studies[one] for one in names]
    if not finished:
        report.run(chosen, at_once)
    for study in chosen:
        if not (runs := report.finished(study)):
            continue
        print(f"\n### {study.title} ({study.name})\n\n{markdown_of(runs)}{warning_of(runs)}")
        if pictures is not None:
            draw(runs, study.title, pictures / f"accuracy-{study.name}.svg")


main = partial(run, app)

if __name__ == "__main__":
    sys.exit(main())
