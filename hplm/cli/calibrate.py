"""`hplm calibrate`: makes the confidence of a tenant's answers true."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from hplm.options import ENGINE_DTYPES


def register(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "calibrate",
        help="make the confidence of a tenant's answers true",
        description="Fit how likely the answers of a tenant's newest version are right to labelled texts, and store it as "
        "its next version. A version that is trained later has no calibration until it is calibrated too.",
    )
    command.add_argument("--store", type=Path, required=True, help="folder of the store")
    command.add_argument("--id", required=True, help="name of the tenant")
    command.add_argument(
        "--texts", type=Path, required=True,
        help="labelled texts, JSONL in the form of the tenant's training data; those that its training has seen are left out",
    )  # fmt: skip
    command.add_argument(
        "--seen", type=Path, nargs="+", default=[], metavar="FILE",
        help="more files with texts to leave out, and files of the training that were moved",
    )  # fmt: skip
    command.add_argument(
        "--dtype", choices=("auto", *ENGINE_DTYPES), default="auto",
        help="precision that will serve; auto measures as `hplm export` does, which prints the result (default: %(default)s)",
    )  # fmt: skip
    command.add_argument(
        "--delta", type=float, help="for numbers: the largest error of a right one (default: half the standard deviation)"
    )
    command.add_argument(
        "--picture", type=Path, metavar="FILE", help="draw confidence and share of right answers into a .png, .svg or .pdf file"
    )
    command.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    command.add_argument("--json", action="store_true", help="end with one line of JSON")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> dict[str, Any]:
    from builder.evaluation.calibration import calibrate_tenant
    from builder.evaluation.tenant import find_tenant
    from builder.publish.precision import served_precision
    from builder.store.store import Store
    from hplm.cli.options import device_of

    store, device = Store(args.store), device_of(args)
    if args.picture is not None:
        from builder.pictures import check_picture

        check_picture(args.picture)
    find_tenant(store, args.id)  # refuses an unknown one before the precision is measured
    precision = served_precision(store, args.dtype, device)
    calibrated, is_new = calibrate_tenant(store, args.id, args.texts, precision, device, args.delta, args.seen)
    report = calibrated.report
    if args.picture is not None:
        from builder.evaluation.reliability_picture import draw_reliability

        draw_reliability(report, args.picture)
    if not args.json:
        print(described(report, calibrated.calibration.kind))
        print("next: `hplm export`, or `hplm tenant update` where it is served" if is_new else "nothing has changed")
    rest = {name: value for name, value in report.items() if name not in ("before", "after")}
    scores = {side: {name: report[side][name] for name in ("ece", "nll")} for side in ("before", "after") if report[side]}
    return {**rest, "kind": calibrated.calibration.kind, **scores, "changed": is_new}


def described(report: dict[str, Any], kind: str) -> str:
    lines = [
        f"{report['tenant']} version {report['version']} in {report['precision']}: {kind}, from {report['texts']:,} texts of "
        f"{report['file']}; {report['left_out']:,} more were left out, because the training has seen them",
        f"{report['right']:.1%} of the answers are right" + (f" within {report['delta']:g}" if report["delta"] else ""),
        f"{'':<8}{'ECE':>10}{'NLL':>10}",
    ]
    for side in ("before", "after"):
        if (scores := report[side]) is not None:
            lines.append(f"{side:<8}{scores['ece']:>10.4f}{scores['nll']:>10.4f}")
    return "\n".join(lines)
