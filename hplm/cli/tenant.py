"""`hplm tenant`: who is in a repository."""

from __future__ import annotations

import argparse
from pathlib import Path


def register(commands: argparse._SubParsersAction) -> None:
    tenant = commands.add_parser("tenant", help="list and show the tenants of a repository")
    actions = tenant.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, run, text in (("list", run_list, "one line a tenant"), ("show", run_show, "all there is to know about one")):
        action = actions.add_parser(name, help=text)
        if name == "show":
            action.add_argument("id")
        action.add_argument("--repository", type=Path, default=Path("model_repository"), help="default: %(default)s")
        action.add_argument("--backbone", help="only this one's tenants")
        action.add_argument("--json", action="store_true", help="end with one line of JSON")
        action.set_defaults(run=run)


def run_list(args: argparse.Namespace) -> dict:
    rows = [
        {
            "id": tenant.id,
            "backbone": backbone,
            "domain": tenant.domain,
            "task": tenant.task,
            "labels": list(tenant.labels),
        }
        for backbone, tenant in _tenants(args)
    ]
    if not args.json:
        width = max(len(row["id"]) for row in rows)
        for row in rows:
            print(f"{row['id']:<{width}}  {row['backbone']}  {row['domain']}  {row['task']}  {len(row['labels'])} labels")
    return {"tenants": rows}


def run_show(args: argparse.Namespace) -> dict:
    from dataclasses import asdict

    from hplm.errors import InvalidInput

    found = [(backbone, tenant) for backbone, tenant in _tenants(args) if tenant.id == args.id]
    if not found:
        raise InvalidInput(f"tenant {args.id!r} is not in {args.repository}: `hplm tenant list` names those that are")
    backbone, tenant = found[0]
    shown = {"backbone": backbone, **asdict(tenant), "labels": list(tenant.labels)}
    if not args.json:
        for name, value in shown.items():
            print(f"{name:<15} {value}")
    return shown


def _tenants(args: argparse.Namespace) -> list:
    from hplm.engine.backbone import Backbone
    from hplm.errors import InvalidInput
    from hplm.tenants.snapshot import Snapshot

    if not args.repository.is_dir():
        raise InvalidInput(f"{args.repository} is no folder: name the model repository with --repository")
    pattern = f"{args.backbone or '*'}/1/{Backbone.TENANTS}"
    paths = sorted(args.repository.glob(pattern))
    if not paths:
        raise InvalidInput(f"{args.repository} holds no backbone{' ' + args.backbone if args.backbone else ''}: export one")
    return [(path.parent.parent.name, tenant) for path in paths for tenant in Snapshot.load(path).tenants]
