"""`hplm domain`: lists, inspects, adds, updates, rolls back and deletes domains of a store, or of a served backbone."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from hplm.cli import inspection
from hplm.cli.options import CORPUS, device_of, learn_option, refuse_given
from hplm.cli.served import begun_manager, check_state, open_manager, print_late, served_options
from hplm.cli.tables import print_tree, table_built
from hplm.errors import InvalidInput
from hplm.options import TABLE_DTYPES

if TYPE_CHECKING:
    from hplm.tenants.manager import DomainChange


def register(commands: argparse._SubParsersAction) -> None:
    domain = commands.add_parser(
        "domain",
        help="list, inspect, add, update, roll back and delete domains, of a store or while they are served",
        description="With --store, an action concerns the domains of a store. With --repository and --state, it concerns the "
        "served domains.",
    )
    actions = domain.add_subparsers(dest="action", required=True, metavar="ACTION")
    listing = _action(actions, "list", run_list, "print all domains as a tree, each below the domain that it falls back to")
    served_options(listing)
    add = _action(actions, "add", run_add, "serve a domain of the store, without a restart", store=True)
    add.add_argument("--name", required=True, help="name of the domain")
    served_options(add, required=True)
    _register_update(actions)
    text = "return the tenants of a domain's newest served version to the version that they had before"
    rollback = _action(actions, "rollback", run_rollback, text, store=None)
    rollback.add_argument("--name", required=True, help="name of the domain")
    served_options(rollback, required=True)
    delete = _action(actions, "delete", run_delete, "delete a domain that no tenant and no other domain needs")
    delete.add_argument("--name", required=True, help="name of the domain")
    delete.add_argument("--version", type=int, help="with --store: delete only this version (default: all)")
    served_options(delete)
    inspection.register(_action(actions, "inspect", inspection.run, inspection.TEXT, store=True))


def _action(
    actions: argparse._SubParsersAction, name: str, run: object, text: str, store: bool | None = False
) -> argparse.ArgumentParser:
    """Adds an action. `store` says whether --store is required; None: the action has no --store."""
    action = actions.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    if store is not None:
        action.add_argument("--store", type=Path, required=store, help="folder of the store")
    action.add_argument("--json", action="store_true", help="end with one line of JSON")
    action.set_defaults(run=run, default_of=action.get_default)
    return action


def _register_update(actions: argparse._SubParsersAction) -> None:
    text = "with --corpus, build a domain's next version; with --repository, serve it and the tenants that were tuned on it"
    update = _action(actions, "update", run_update, text, store=True)
    update.add_argument("--name", required=True, help="name of the domain")
    update.add_argument(
        "--corpus", type=Path, nargs="+", action="extend", help=f"text to add to the corpus of the version before: {CORPUS}"
    )
    served_options(update)
    update.add_argument(
        "--canary", type=float, default=1.0, metavar="SHARE", help="share of the tuned tenants to move (default: 1, all)"
    )
    update.add_argument(
        "--keep",
        type=float,
        metavar="SHARE",
        help="share of the different windows, old and new, to store (default: that of the version before)",
    )
    update.add_argument(
        "--dtype", choices=TABLE_DTYPES, help="precision of the stored vectors (default: that of the version before)"
    )
    update.add_argument(
        "--minutes",
        type=float,
        default=0.0,
        help="time to adapt the lower layers further, which changes all vectors; 0: keep old vectors (default: %(default)s)",
    )
    learn_option(update)
    update.add_argument("--seed", type=int, default=0, help="seed of all random choices (default: %(default)s)")
    update.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")


def run_list(args: argparse.Namespace) -> dict:
    if _is_live(args):
        from hplm.tenants.listing import served_branches

        check_state(args.state)
        rows = served_branches(args.repository, args.state, args.backbone)
    else:
        from builder.store.store import Store
        from builder.tables.inspection import built_branches

        rows = built_branches(Store(args.store))
    if not args.json:
        print_tree(rows)
    return {"domains": rows}


def run_update(args: argparse.Namespace) -> dict:
    if (args.corpus is None) == (args.repository is None):
        raise InvalidInput("give either --corpus to build a version, or --repository and --state to serve it")
    if args.corpus is None:
        building = ("keep", "dtype", "minutes", "learn", "seed", "device")
        refuse_given(args, building, "works only with --corpus, which builds a version: leave it out with --repository")
        return _serve_update(args)
    refuse_given(args, ("canary", "state", "backbone"), "works only with --repository, which serves a version: leave it out")
    return _build_update(args)


def _serve_update(args: argparse.Namespace) -> dict:
    from builder.publish.live import update_domain
    from builder.store.store import Store

    return _said(args, update_domain(begun_manager(args), Store(args.store), args.name, args.canary))


def _build_update(args: argparse.Namespace) -> dict:
    from builder.learning.limits import Budget
    from builder.store.store import Store
    from builder.tables.domain import UpdateOptions, update_domain
    from builder.tables.inspection import behind

    store, options = Store(args.store), UpdateOptions(args.keep, args.dtype, args.seed, args.learn)
    table = update_domain(store, args.name, args.corpus, options, Budget(minutes=args.minutes), device_of(args))
    built = table_built(args, table, f"domain {args.name} version {table.meta.version}")
    left = [tenant.id for tenant in behind(store, args.name)]
    if left and not args.json:
        print(f"{len(left):,} tenants stay on the version that they were trained on: `hplm domain inspect` lists them")
    return {**built, "behind": left}


def run_add(args: argparse.Namespace) -> dict:
    from builder.publish.live import add_domain
    from builder.store.store import Store

    return _said(args, add_domain(begun_manager(args), Store(args.store), args.name))


def run_rollback(args: argparse.Namespace) -> dict:
    return _said(args, begun_manager(args).roll_back_domain(args.name))


def _is_live(args: argparse.Namespace) -> bool:
    if (args.store is None) == (args.repository is None):
        raise InvalidInput("give either --store for a store, or --repository for served domains")
    if args.repository is None:
        refuse_given(args, ("state", "backbone"), "works only with --repository: leave it out with --store")
    return args.repository is not None


def _said(args: argparse.Namespace, change: DomainChange, removes: bool = False) -> dict:
    late = open_manager(args).settle(change.generation)
    if not args.json:
        print(f"domain {change.domain}: version {change.version}, generation {change.generation}")
        for what, names in (("moved", change.moved), ("held back", change.waiting), ("behind", change.behind)):
            if names:
                more = f" and {len(names) - 10:,} more" if len(names) > 10 else ""
                print(f"  {what:<10} {', '.join(names[:10])}{more}")
        if change.removed:
            print(f"  removed    {', '.join(change.removed)}: no tenant needs it any more")
        print_late(late)
    return {**asdict(change), "late": late}


def run_delete(args: argparse.Namespace) -> dict:
    if _is_live(args):
        refuse_given(args, ("version",), "works only with --store: a served version is removed when no tenant needs it")
        return _said(args, begun_manager(args).delete_domain(args.name))
    from builder.store.store import Store
    from builder.tables.domain import delete_domain

    versions = delete_domain(Store(args.store), args.name, args.version)
    if not args.json:
        print(f"domain {args.name}: removed version {', '.join(map(str, versions))}")
    return {"domain": args.name, "removed": versions}
