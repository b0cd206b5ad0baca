"""`hplm cascade build`: trains and calibrates levels of a tenant on shallower stacks."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hplm.options import ENGINE_DTYPES

if TYPE_CHECKING:
    from builder.cascade.build import BuiltLevel

TRAINING = (  # option, name in `TrainingOptions`, type, placeholder, help
    ("--adapter", "adapter", str, "KIND", "kind of adapter: bottleneck or lora"),
    ("--rank", "rank", int, "N", "rank of the adapter; 0: only a head"),
    ("--epochs", "epochs", int, "N", "maximum number of epochs"),
    ("--patience", "patience", int, "N", "stop after this many epochs without a better dev score"),
    ("--learning-rate", "learning_rate", float, "RATE", "learning rate of adapter and head"),
    ("--upper-rate", "body_rate", float, "RATE", "also train the stack's layers, and store their change as a LoRA; 0: do not"),
    ("--batch-texts", "batch_texts", int, "N", "texts in a training step"),
    ("--dropout", "dropout", float, "SHARE", "share of the hidden states that each training step leaves out"),
    ("--seed", "seed", int, "N", "seed of all random choices"),
)


def register(actions: argparse._SubParsersAction) -> None:
    build = actions.add_parser(
        "build",
        help="train and calibrate levels of a tenant on shallower stacks",
        description="Train an adapter and a head on each of these stacks, from the data of the tenant's newest version, "
        "calibrate them, and store them beside that version. A later version has no levels until they are built too.",
    )
    build.add_argument("--store", type=Path, required=True, help="folder of the store")
    build.add_argument("--id", required=True, help="name of the tenant")
    build.add_argument(
        "--levels", nargs="+", required=True, metavar="STACK", help="names of stacks, which `hplm build stack` made"
    )
    build.add_argument(
        "--calibrate-texts", type=Path, required=True, metavar="FILE",
        help="labelled texts that the training has not seen, JSONL in the form of the tenant's training data; they also "
        "calibrate the tenant itself, if it is not",
    )  # fmt: skip
    build.add_argument(
        "--seen", type=Path, nargs="+", default=[], metavar="FILE",
        help="files of the training that were moved, and more files with texts to leave out of the calibration",
    )  # fmt: skip
    build.add_argument(
        "--dtype", choices=("auto", *ENGINE_DTYPES), default="auto",
        help="precision that will serve, for the calibration; auto measures as `hplm export` does (default: %(default)s)",
    )  # fmt: skip
    build.add_argument(
        "--soft-labels", action="store_true", help="also learn the logits that the tenant itself gives to its training texts"
    )
    training = build.add_argument_group("training", "Each is by default as the tenant's version was trained.")
    for option, name, kind, placeholder, text in TRAINING:
        training.add_argument(option, dest=name, type=kind, metavar=placeholder, help=text)
    training.add_argument(
        "--places", type=lambda text: tuple(text.split(",")), metavar="PLACE,...", help="projections that the adapter changes"
    )
    build.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    build.add_argument("--json", action="store_true", help="end with one line of JSON")
    build.set_defaults(run=run)


def run(args: argparse.Namespace) -> dict[str, Any]:
    from builder.cascade.build import build_levels
    from builder.evaluation.tenant import find_tenant
    from builder.publish.precision import served_precision
    from builder.store.store import Store
    from hplm.cli.options import device_of

    store, device = Store(args.store), device_of(args)
    find_tenant(store, args.id)  # refuses an unknown one before the precision is measured
    precision = served_precision(store, args.dtype, device)
    names = [*(name for _, name, *_ in TRAINING), "places"]
    training = {name: value for name in names if (value := getattr(args, name)) is not None}
    built = build_levels(
        store, args.id, args.levels, args.calibrate_texts, precision, device, args.seen, args.soft_labels, **training
    )
    tenant = built.tenant
    if not args.json:
        if built.is_calibrated:
            print(f"tenant {tenant.id} version {tenant.version} is now calibrated, with the same texts")
        for one in built.levels:
            print(_described(one))
    return {
        "tenant": tenant.id,
        "version": tenant.version,
        "calibrated": built.is_calibrated,
        "levels": [_row(one) for one in built.levels],
    }


def _row(one: BuiltLevel) -> dict[str, Any]:
    report, calibration = one.level.report(), one.level.calibrated.report
    return {
        "stack": one.level.stack,
        "layers": one.level.file.layers,
        "dev": report["dev"],
        "calibration": {"kind": one.level.calibrated.calibration.kind, **_scores(calibration)},
        "trained": one.is_trained,
        "changed": one.is_trained or one.is_calibrated,
    }


def _scores(calibration: dict[str, Any]) -> dict[str, Any]:
    return {"texts": calibration["texts"], "right": calibration["right"], "ece": calibration["after"]["ece"]}


def _described(one: BuiltLevel) -> str:
    row = _row(one)
    dev, calibration = row["dev"], row["calibration"]
    metric, layers = dev["metric"], f"{row['layers']} layer{'s' if row['layers'] > 1 else ''}"
    return (
        f"level {row['stack']} ({layers}): {metric} {dev[metric]:.3f} on {dev['texts']} dev texts; "
        f"{calibration['right']:.1%} of {calibration['texts']:,} new answers are right, ECE {calibration['ece']:.4f}"
        f"{'' if row['changed'] else '; nothing has changed'}"
    )
