"""`hplm tenant`: lists and changes served tenants, their keys and limits."""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from hplm.cli import tenant_exits, tenant_plain
from hplm.cli.served import begun_manager, check_state, print_late, served_options
from hplm.errors import InvalidInput

if TYPE_CHECKING:
    from hplm.tenants.manager import TenantChange
    from hplm.tenants.snapshot import Tenant


def register(commands: argparse._SubParsersAction) -> None:
    tenant = commands.add_parser("tenant", help="list and change served tenants, their keys and limits")
    actions = tenant.add_subparsers(dest="action", required=True, metavar="ACTION")
    _action(actions, "list", run_list, "print one line for each served tenant", tenant=False)
    _action(actions, "show", run_show, "print all facts about a tenant, except its secrets")
    for name, run, text in (
        ("add", run_add, "serve a tenant of the store, without a restart"),
        ("update", run_update, "serve the store's newest version of a tenant; requests in flight use the old version"),
        ("publish", run_publish, "serve the store's newest version of a tenant, whether it is served already or not"),
    ):
        _action(actions, name, run, text).add_argument("--store", type=Path, required=True, help="folder of the tenant's store")
    _action(actions, "rollback", run_rollback, "return a tenant to the version that it had before")
    delete = _action(actions, "delete", run_delete, "delete a tenant; its requests are refused from now on")
    delete.add_argument(
        "--store", type=Path, help="delete all versions of the tenant from this store instead; served ones stay as they are"
    )
    tenant_exits.register(actions)
    tenant_plain.register(actions)
    _register_keys(actions)
    limit = _action(actions, "limit", run_limit, "set a tenant's quotas and the times that its answers may take")
    limit.epilog = (
        "Limits that are not given stay as they are. Tokens are counted as the model reads them: after truncation, with "
        "special tokens. A request that takes more texts or tokens than are left is answered, and later requests wait until "
        "the tenant is within its rate again."
    )
    limit.add_argument("--rate", type=float, metavar="N", help="most requests a second; 0: no limit")
    limit.add_argument("--burst", type=float, metavar="N", help="most requests at once; 0: as many as in a second")
    limit.add_argument("--texts-rate", type=float, metavar="N", help="most texts a second, in all requests; 0: no limit")
    limit.add_argument("--tokens-rate", type=float, metavar="N", help="most tokens a second, in all texts; 0: no limit")
    limit.add_argument("--in-flight", type=int, metavar="N", help="most requests in flight at a time; 0: no limit")
    limit.add_argument(
        "--homes", type=int, metavar="K",
        help="replicas behind `hplm route` that share these quotas, each an equal part (default: 1)",
    )  # fmt: skip
    for name, what in (
        ("--deadline-ms", "deadline of requests that name none"),
        ("--first-token-ms", "generated text: time until the first token, for requests that name none"),
        ("--token-ms", "generated text: time between two tokens, for requests that name none"),
    ):
        limit.add_argument(name, type=float, metavar="MS", help=f"{what}; 0: the backbone's default")
    _action(
        actions, "release", run_release,
        "serve a quarantined tenant again, on this machine alone; `list` shows which tenants are quarantined",
    )  # fmt: skip
    _action(actions, "compact", run_compact, "remove the weights of deleted tenants and versions now", tenant=False)
    _action(actions, "log", run_log, "print every change: when, by whom, and from which version to which", tenant=False)


def _register_keys(actions: argparse._SubParsersAction) -> None:
    key = actions.add_parser("key", help="add, list and revoke API keys; a tenant without keys is open to everybody")
    kinds = key.add_subparsers(dest="key_action", required=True, metavar="ACTION")
    add = _action(kinds, "add", run_key_add, "make a key; its secret is shown once and not stored")
    add.add_argument("--days", type=float, default=0.0, help="days until it expires (default: never)")
    _action(kinds, "list", run_key_list, "list a tenant's keys, without their secrets")
    revoke = _action(kinds, "revoke", run_key_revoke, "refuse a key from now on")
    revoke.add_argument("--key", required=True, metavar="KEY-ID", help="as `hplm tenant key list` shows it")
    revoke.add_argument("--wait", action="store_true", help="end when no server, not even one that is cut off, takes the key")


def _action(
    actions: argparse._SubParsersAction, name: str, run: object, text: str, tenant: bool = True
) -> argparse.ArgumentParser:
    action = actions.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    if tenant:
        action.add_argument("id", help="name of the tenant")
    served_options(action, repository=Path("model_repository"))
    action.add_argument("--json", action="store_true", help="end with one line of JSON")
    action.set_defaults(run=run)
    return action


def run_list(args: argparse.Namespace) -> dict:
    from hplm.tenants.listing import served_tenants, tenant_row
    from hplm.tenants.quarantine import Quarantine

    check_state(args.state)
    rows = [tenant_row(*served) for served in served_tenants(args.repository, args.state, args.backbone)]
    refused = {name: Quarantine(args.repository / name).tenants(time.time()) for name in {row["backbone"] for row in rows}}
    for row in rows:
        row["quarantined"] = row["id"] in refused[row["backbone"]]
    if not args.json:
        width = max((len(row["id"]) for row in rows), default=0)
        for row in rows:
            print(
                f"{row['id']:<{width}}  version {row['version']}  {row['backbone']}  {row['domain']} {row['domain_version']}  "
                f"{row['task']}  {len(row['labels'])} labels{_homes(row)}{'' if row['open'] else '  with keys'}"
                f"{'  quarantined' if row['quarantined'] else ''}"
            )
    return {"tenants": rows}


def _homes(row: dict) -> str:
    return f"  {row['homes']} homes" if row["homes"] > 1 else ""


def run_show(args: argparse.Namespace) -> dict:
    from hplm.tenants.listing import described

    backbone, tenant = _find(args)
    shown = {"backbone": backbone, **described(tenant)}
    if not args.json:
        for name, value in shown.items():
            print(f"{name:<15} {value}")
    return shown


def run_add(args: argparse.Namespace) -> dict:
    from builder.publish.live import add_tenant
    from builder.store.store import Store

    return _said(args, add_tenant(begun_manager(args), Store(args.store), args.id))


def run_update(args: argparse.Namespace) -> dict:
    from builder.publish.live import update_tenant
    from builder.store.store import Store

    return _said(args, update_tenant(begun_manager(args), Store(args.store), args.id))


def run_publish(args: argparse.Namespace) -> dict:
    from builder.publish.live import publish_tenant
    from builder.store.store import Store

    return _said(args, publish_tenant(begun_manager(args), Store(args.store), args.id))


def run_rollback(args: argparse.Namespace) -> dict:
    return _said(args, begun_manager(args).roll_back(args.id))


def run_delete(args: argparse.Namespace) -> dict:
    if args.store is None:
        return _said(args, begun_manager(args).delete(args.id))
    if args.state is not None or args.backbone is not None:
        raise InvalidInput("give either --store, to delete from a store, or --state, to delete from what is served")
    from builder.store.store import Store
    from builder.training.tenant import delete_tenant

    versions = delete_tenant(Store(args.store), args.id)
    if not args.json:
        print(f"tenant {args.id}: removed version {', '.join(map(str, versions))}")
    return {"tenant": args.id, "removed": versions}


def run_key_add(args: argparse.Namespace) -> dict:
    manager = begun_manager(args)
    secret, key = manager.add_key(args.id, args.days)
    if not args.json:
        print(f"key {key.id} of tenant {args.id}; its secret, which is shown only now:\n{secret}", flush=True)
    late = manager.settle_now()
    if not args.json:
        print_late(late)
    return {"tenant": args.id, "key": key.id, "secret": secret, "expires": key.expires, "late": late}


def run_key_list(args: argparse.Namespace) -> dict:
    from hplm.tenants.listing import key_rows

    keys = key_rows(_find(args)[1].keys)
    if not args.json:
        for key in keys:
            ends = time.strftime("expires %F %T", time.localtime(key["expires"])) if key["expires"] else "does not expire"
            print(f"{key['id']}  {ends}")
        if not keys:
            print("no keys: open to everybody")
    return {"tenant": args.id, "keys": keys}


def run_key_revoke(args: argparse.Namespace) -> dict:
    manager = begun_manager(args)
    dead = manager.revoke_key(args.id, args.key)
    late = manager.settle_now()
    if not args.json:
        print(f"key {args.key} of tenant {args.id} is revoked; a server that is cut off may take it until", end=" ")
        print(time.strftime("%F %T", time.localtime(math.ceil(dead))), flush=True)
        print_late(late)
    if args.wait:
        time.sleep(max(0.0, dead - time.time()))
    return {"tenant": args.id, "revoked": args.key, "late": late, "dead_at": round(dead, 3)}


def run_limit(args: argparse.Namespace) -> dict:
    wanted = {
        "rate": args.rate,
        "burst": args.burst,
        "texts_rate": args.texts_rate,
        "tokens_rate": args.tokens_rate,
        "in_flight": args.in_flight,
        "homes": args.homes,
        "deadline_us": _microseconds(args.deadline_ms),
        "first_token_us": _microseconds(args.first_token_ms),
        "token_us": _microseconds(args.token_ms),
    }
    limits = {name: value for name, value in wanted.items() if value is not None}
    if not limits:
        raise InvalidInput(
            "no limit is given: give --rate, --burst, --texts-rate, --tokens-rate, --in-flight, --homes, --deadline-ms, "
            "--first-token-ms or --token-ms; 0 removes a limit"
        )
    manager = begun_manager(args)
    manager.limit(args.id, **limits)
    late = manager.settle_now()
    if not args.json:
        print(f"tenant {args.id}: {', '.join(f'{name} {value:,.12g}' for name, value in limits.items())}")
        print_late(late)
    return {"tenant": args.id, **limits, "late": late}


def _microseconds(milliseconds: float | None) -> float | None:
    """Returns a whole number, but for what is infinite or no number: the manager refuses it."""
    if milliseconds is None:
        return None
    exact = 1000 * milliseconds
    return round(exact) if math.isfinite(exact) else exact


def run_release(args: argparse.Namespace) -> dict:
    from hplm.tenants.quarantine import release

    backbones = release(args.id, args.repository, args.backbone)
    if not args.json:
        print(f"tenant {args.id} of {', '.join(backbones)} is released; it runs alone for a while")
    return {"tenant": args.id, "backbones": backbones}


def run_compact(args: argparse.Namespace) -> dict:
    won = begun_manager(args).compact()
    if not args.json:
        print(f"{won / 1e6:,.1f} MB freed")
    return {"bytes": won}


def run_log(args: argparse.Namespace) -> dict:
    changes = begun_manager(args).registry.audit()
    if not args.json:
        for change in changes:
            rest = {name: value for name, value in change.items() if name not in ("generation", "at", "who", "action")}
            print(f"{change['generation']:>6}  {change['at']}  {change['who']}  {change['action']}  {rest}")
    return {"changes": changes}


def _said(args: argparse.Namespace, change: TenantChange) -> dict:
    late = begun_manager(args).settle(change.generation)
    if not args.json:
        versions = f"version {change.before or 'none'} -> {change.after or 'none'}"
        print(f"tenant {change.tenant}: {versions}, generation {change.generation}")
        print_late(late)
    return {**asdict(change), "late": late}


def _find(args: argparse.Namespace) -> tuple[str, Tenant]:
    from hplm.tenants.listing import find_tenant

    check_state(args.state)
    return find_tenant(args.id, args.repository, args.state, args.backbone)
