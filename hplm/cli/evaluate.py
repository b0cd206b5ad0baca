"""`hplm evaluate`: scores a tenant on this machine and as served, beside baselines that are trained on the same data."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hplm.cli.client import connection_options, open_client
from hplm.registered import RIVALS, chosen, registered

if TYPE_CHECKING:
    from builder.tasks.scores import Scores


def register(commands: argparse._SubParsersAction) -> None:
    text = "score a tenant on labelled data, also as served, and beside baselines"
    command = commands.add_parser("evaluate", help=text, description=text[0].upper() + text[1:] + ".")
    command.add_argument("--store", type=Path, required=True, help="folder of the store")
    command.add_argument("--id", required=True, help="name of the tenant")
    command.add_argument("--test", type=Path, required=True, help="test data, JSONL in the form of the tenant's training data")
    command.add_argument(
        "--int8",
        action="store_true",
        help="also score with the shared products in 8 bits, as `hplm export --dtype int8` serves",
    )
    connection_options(command, "also score the answers of the server at this address", only_with_url=True)
    command.add_argument("--backbone", metavar="NAME", help="for --url: name of the served backbone (default: the store's)")
    command.add_argument(
        "--against",
        type=lambda text: tuple(text.split(",")),
        default=(),
        metavar="SCHEME,...",
        help="baselines to train on the tenant's data, with the same budget, and to score too: "
        f"{', '.join(registered(RIVALS)) or 'none is installed'} (docs/training.md)",
    )
    command.add_argument("--train", type=Path, help="for --against: the training data, if the file was moved")
    command.add_argument("--dev", type=Path, help="for --against: the dev data, if the file was moved")
    command.add_argument(
        "--picture", type=Path, metavar="FILE", help="draw the confusion matrix into a .png, .svg or .pdf file"
    )
    command.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    command.add_argument("--json", action="store_true", help="end with one line of JSON")
    command.set_defaults(run=run, default_of=command.get_default)


def run(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    from builder.evaluation.tenant import evaluate_tenant
    from builder.store.store import Store
    from hplm.cli.options import device_of, refuse_given

    if args.url is None:
        refuse_given(args, ("protocol", "tls", "ca_file", "key", "backbone"), "works only with --url: leave it out")
    if not args.against:
        refuse_given(args, ("train", "dev"), "works only with --against: leave it out")
    store, device = Store(args.store), device_of(args)
    rivals = {name: chosen(RIVALS, name, "--against") for name in args.against}
    if args.picture is not None:
        from builder.pictures import check_picture

        check_picture(args.picture)
    evaluation = evaluate_tenant(store, args.id, args.test, device)
    if args.picture is not None:
        from builder.evaluation.confusion_picture import draw_confusion

        draw_confusion(evaluation, args.picture)
    others = dict.fromkeys([*rivals, *registered(RIVALS), "served"])
    scores: dict[str, Scores | None] = {"hplm": evaluation.scores, "int8": None, **others}
    if args.int8:
        scores["int8"] = evaluate_tenant(store, args.id, args.test, torch.device("cpu"), eight_bits=True).scores
    if args.url is not None:
        from builder.evaluation.served import score_served

        with open_client(args, args.backbone or store.config.name) as client:
            scores["served"] = score_served(client, evaluation)
        _say_if_apart(evaluation.scores.main, scores["served"].main)
    for score in dict.fromkeys(rivals.values()):
        names = [name for name in rivals if rivals[name] is score]
        scores |= score(store, evaluation, names, device, args.train, args.dev)
    if not args.json:
        print(f"{args.id} version {evaluation.tenant.version} on {evaluation.scores.rows:,} rows of {args.test}")
        print(table(scores))
    metric = evaluation.scores.metric
    return {
        "tenant": args.id,
        "metric": metric,
        **{name: round(own.main, 4) if own is not None else None for name, own in scores.items()},
        "scores": {name: own.described() for name, own in scores.items() if own is not None},
    }


def _say_if_apart(here: float, served: float) -> None:
    if abs(served - here) > 0.001:
        print(
            f"the served score {served:.4f} differs from {here:.4f}, which was computed here in 32 bits. A server that "
            "computes in 16 bits (`hplm export --dtype`) answers a few texts differently, but rounding does not explain more "
            "than a point",
            file=sys.stderr,
        )


def table(scores: dict[str, Scores | None]) -> str:
    """Returns a line for each scheme, with the main metric first."""
    known = {name: own for name, own in scores.items() if own is not None}
    first = next(iter(known.values()))
    columns = [first.metric, *(name for name in first.values if name != first.metric)]
    lines = [f"{'':<10}" + "".join(f"{column:>16}" for column in columns)]
    for name, own in known.items():
        lines.append(f"{name:<10}" + "".join(f"{own.values[column]:>16.4f}" for column in columns))
    return "\n".join(lines)
