"""`hplm cascade report`: what the cascades of tenants win and lose on texts that have chosen nothing."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from hplm.errors import InvalidInput


def register(actions: argparse._SubParsersAction) -> None:
    command = actions.add_parser(
        "report",
        help="compare tenants' cascades with simpler ways of answering",
        description="Answer labelled texts that have trained and chosen nothing by each tenant's plans, by single levels, by a "
        "vote and by random re-routing, and write a page with tables and pictures: what each way scores and costs, and what "
        "calibration, dispatch, pruning and ensemble add. The same command after an interruption continues.",
    )
    command.add_argument("--store", type=Path, required=True, help="folder of the store")
    command.add_argument(
        "--texts", nargs="+", required=True, metavar="ID=FILE",
        help="tenants that have ladders, each with labelled texts, JSONL in the form of its training data; texts that have "
        "trained, calibrated or chosen something are left out",
    )  # fmt: skip
    command.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="folder to write into")
    command.add_argument(
        "--seen", type=Path, nargs="+", default=[], metavar="FILE",
        help="more files with texts to leave out, and files of training, calibration and profile that were moved",
    )  # fmt: skip
    command.add_argument(
        "--drop", type=float, default=0.5, metavar="POINTS",
        help="for comparison, the cheapest single level is chosen that loses no more than this (default: %(default)s)",
    )  # fmt: skip
    command.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    command.add_argument("--json", action="store_true", help="end with one line of JSON")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> dict[str, Any]:
    from builder.cascade.report.command import FIGURES, PAGE, report_cascades
    from builder.store.store import Store
    from hplm.cli.options import device_of

    if not 0 <= args.drop <= 100:
        raise InvalidInput(f"--drop {args.drop:g}: give a number from 0 to 100")
    report = report_cascades(Store(args.store), _files(args.texts), args.to, device_of(args), args.drop, args.seen)
    if not args.json:
        for figures in report["tenants"]:
            print(_text(figures))
        print(f"written: {args.to / PAGE}")
    ways = {figures["tenant"]: figures["ways"] for figures in report["tenants"]}
    return {"page": str(args.to / PAGE), "figures": str(args.to / FIGURES), "across": report["across"], "tenants": ways}


def _files(given: list[str]) -> dict[str, Path]:
    files: dict[str, Path] = {}
    for one in given:
        tenant, is_pair, file = one.partition("=")
        if not (tenant and is_pair and file):
            raise InvalidInput(f"--texts {one}: give a tenant and its file, such as acme=held-out.jsonl")
        if tenant in files:
            raise InvalidInput(f"--texts names tenant {tenant!r} twice: put its texts into one file")
        files[tenant] = Path(file)
    return files


def _text(figures: dict[str, Any]) -> str:
    metric = figures["metric"]
    lines = [
        f"{figures['tenant']} version {figures['version']} on {figures['texts']:,} texts: {figures['plan']['described']}",
        f"{'':<22}{metric:>10}{'points':>10}{'+-':>7}{'mean ms':>10}{'/ strong':>10}",
    ]
    for way, own in figures["ways"].items():
        points = f"{own['points']:>+10.2f}{own['points_error']:>7.2f}"
        lines.append(f"{way:<22}{own['score']:>10.4f}{points}{own['mean_ms']:>10.3f}{own['mean_over_strong']:>10.2f}")
    return "\n".join(lines)
