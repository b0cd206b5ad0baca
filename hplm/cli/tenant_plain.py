"""`hplm tenant export`: saves a tenant of the store as a plain checkpoint of `transformers`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def register(actions: argparse._SubParsersAction) -> None:
    command = actions.add_parser(
        "export",
        help="save a tenant of the store as a plain checkpoint of transformers",
        description="Save the newest version of a tenant that has a LoRA, or a head alone, as a checkpoint that transformers "
        "loads. The original's lower layers stand in place of the tables and see whole texts, so some answers differ; --texts "
        "says how many.",
    )
    command.add_argument("id", help="name of the tenant")
    command.add_argument("--store", type=Path, required=True, help="folder of the store")
    command.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="the checkpoint; the folder must not exist")
    command.add_argument("--texts", type=Path, metavar="FILE", help="texts on which to compare: JSONL, or one a line")
    command.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    command.add_argument("--json", action="store_true", help="end with one line of JSON")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> dict[str, Any]:
    from builder.importing.plain import save_checkpoint
    from builder.store.store import Store
    from hplm.cli.options import device_of

    report = save_checkpoint(Store(args.store), args.id, args.to, args.texts, device_of(args))
    if not args.json:
        print(f"tenant {report['tenant']} version {report['version']}: {args.to}")
        if "lost" in report:
            print(f"lost: {report['lost']}")
        if "agreement" in report:
            print(f"{report['agreement']:.1%} of {report['answers']:,} answers are those of the tenant")
    return report
