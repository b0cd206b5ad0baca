"""`hplm tenant exits`: lets a tenant's easy texts leave between the upper layers."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hplm.options import ENGINE_DTYPES

if TYPE_CHECKING:
    from builder.store.store import Store


def register(actions: argparse._SubParsersAction) -> None:
    command = actions.add_parser(
        "exits",
        help="let easy texts leave between the layers, by what the full stack answers",
        description="Make the exits of a tenant's newest version in the store. At an exit, a text leaves whose answer is sure "
        "enough. The exits learn the full stack's answers to the texts of the tenant's training; other texts, which need no "
        "labels, choose how sure an answer must be, so that the plan loses no more points than allowed. "
        "They are its next version. One that is trained later has no exits until they are made for it too.",
    )
    command.add_argument("id", help="name of the tenant")
    command.add_argument("--store", type=Path, required=True, help="folder of the store")
    command.add_argument(
        "--texts", type=Path, required=True,
        help="texts like those to come, JSONL with `text` and what else the tenant reads; with labels, the plans' losses by "
        "them are printed too",
    )  # fmt: skip
    command.add_argument(
        "--drop", type=float, nargs="+", metavar="POINTS",
        help="points that a plan may lose; more of them, the smallest first, make cheaper plans for times of load "
        "(default: 1 2 4)",
    )  # fmt: skip
    command.add_argument(
        "--delta", type=float,
        help="for numbers: how far an exit's may be from the full stack's (default: a tenth of their standard deviation)",
    )  # fmt: skip
    command.add_argument(
        "--seen", type=Path, nargs="+", default=[], metavar="FILE",
        help="more files with texts to leave out, and files of the training that were moved",
    )  # fmt: skip
    command.add_argument(
        "--dtype", choices=("auto", *ENGINE_DTYPES), default="auto",
        help="precision that will serve; auto measures as `hplm export` does, which prints the result (default: %(default)s)",
    )  # fmt: skip
    command.add_argument("--seed", type=int, default=0, help="of the random numbers of the training (default: %(default)s)")
    command.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    command.add_argument("--picture", type=Path, metavar="FILE", help="draw loss against work into a .png, .svg or .pdf file")
    command.add_argument("--json", action="store_true", help="end with one line of JSON")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> dict[str, Any]:
    from builder.evaluation.tenant import find_tenant
    from builder.store.store import Store

    store = Store(args.store)
    if args.picture is not None:
        from builder.pictures import check_picture

        check_picture(args.picture)
    find_tenant(store, args.id)  # refuses an unknown one before the precision is measured
    options = {"drops": tuple(args.drop)} if args.drop is not None else {}
    options |= {"delta": args.delta, "seen": args.seen, "seed": args.seed}
    report = make_exits(args, store, args.id, args.texts, args.dtype, **options)
    if args.picture is not None:
        from builder.exits.picture import draw_exits

        draw_exits(report, args.picture)
    return report


def make_exits(
    args: argparse.Namespace, store: Store, tenant_id: str, texts: Path, dtype: str = "auto", **options: Any
) -> dict[str, Any]:
    """Makes a tenant's exits, prints what they lose and spare, and returns it. `options`: of `build_exits`."""
    from builder.exits.build import build_exits
    from builder.publish.precision import served_precision
    from hplm.cli.options import device_of

    device = device_of(args)
    found, is_new = build_exits(store, tenant_id, texts, served_precision(store, dtype, device), device, **options)
    if not args.json:
        print(described(found.report))
        print("next: `hplm export`, or `hplm tenant update` where it is served" if is_new else "nothing has changed")
    return {**found.report, "changed": is_new}


def described(report: dict[str, Any]) -> str:
    lines = [
        f"{report['tenant']} version {report['version']} in {report['precision']}: exits learned from "
        f"{report['learned_texts']:,} texts, thresholds chosen by {report['texts']:,} of {report['file']}",
        f"{'plan':<6}{'work of layers':>14}{'expected loss':>18}{'same answer':>14}{'loss by labels':>18}   leave",
    ]
    for number, plan in enumerate(report["plans"], start=1):
        expected = f"{plan['expected_loss']:.2f} +- {plan['expected_loss_off']:.2f}"
        lost = plan.get("lost")
        by_labels = f"{lost['points']:.2f} +- {lost['off']:.2f}" if lost else "-"
        leaves = f"{plan['leaves']:.0%} at exit {plan['exit']}" if plan["exit"] is not None else "none"
        lines.append(f"{number:<6}{plan['cost']:>14.3f}{expected:>18}{plan['agrees']:>14.1%}{by_labels:>18}   {leaves}")
    return "\n".join(lines)
