"""`hplm tenant`: lists and changes served tenants, their keys and limits."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from hplm.cli.options import StoreFolder, about
from hplm.cli.served import HERE, ServedOptions, settled
from hplm.cli.show import columns
from hplm.errors import HplmError, InvalidInput
from hplm.registered import of_stores

if TYPE_CHECKING:
    from hplm.tenants.change import Change
    from hplm.tenants.keys import Key
    from hplm.tenants.manager import Manager, TenantChange

WHEN = "%F %T%z"
Id = Annotated[str, about("name of the tenant")]


def list_(*, served: ServedOptions = HERE) -> dict:
    """Print one line for each served tenant."""
    from hplm.tenants.listing import served_tenants, tenant_row

    rows = [tenant_row(*found) for found in served_tenants(*served.checked())]
    print(columns(("TENANT", "VERSION", "BACKBONE", "DOMAIN", "TASK", "LABELS", "HOMES", "KEYS"), [
        (row["id"], str(row["version"]), row["backbone"], f"{row['domain']} {row['domain_version']}", row["task"],
         str(len(row["labels"])), str(row["homes"]), "open" if row["open"] else "with keys")
        for row in rows
    ]))  # fmt: skip
    return {"tenants": rows, **served.source}


def show(id: Id, /, *, served: ServedOptions = HERE) -> dict:
    """Print all facts about a tenant, except its secrets."""
    from hplm.tenants.listing import described, find_tenant

    backbone, tenant = find_tenant(id, *served.checked())
    shown = {"backbone": backbone, **described(tenant)}
    keys = [f"{key.id} {_ends(key.expires)}" for key in tenant.keys]
    for name, value in {**shown, "keys": keys}.items():
        print(f"{name:<15} {readable(value)}")
    return {**shown, **served.source}


def rollback(id: Id, /, *, served: ServedOptions = HERE) -> dict:
    """Return a tenant to the version that it had before."""
    return changed(manager := served.manager(), manager.roll_back(id))


def delete(id: Id, /, *, store: StoreFolder | None = None, served: ServedOptions = HERE) -> dict:
    """Delete a tenant; its requests are refused from now on.

    With --store, delete all versions of the tenant from this store instead; served ones stay as they are.
    """
    if store is None:
        return changed(manager := served.manager(), manager.delete(id))
    if served.state is not None or served.backbone is not None:
        raise InvalidInput("give either --store, to delete from a store, or --state, to delete from what is served")
    versions = of_stores("delete_tenant")(of_stores("open")(store), id)
    print(f"tenant {id}: removed version {', '.join(map(str, versions))}")
    return {"tenant": id, "removed": versions}


def apply(
    file: Annotated[Path, about("file with one JSON object a line, a tenant each: docs/operating.md")], /, *, yes: bool = False,
    store: Path | None = None, secrets: Path | None = None, served: ServedOptions = HERE,
) -> dict:  # fmt: skip
    """Bring many tenants, their keys and limits to what a file says, in one change.

    Shows what will change, and with --yes makes it. Applied again, the file changes nothing.

    :param yes: make the changes
    :param store: also serve the newest version that this store has of each tenant of the file
    :param secrets: new file for the secrets of new keys, as JSON lines
    """
    from hplm.tenants.apply import apply as bring
    from hplm.tenants.apply import made_keys, planned, read_lines

    manager, lines = served.manager(), read_lines(file)
    newest, publish = dict[str, int](), never
    if store is not None:
        trained = of_stores("trained")(manager, of_stores("open")(store), [line.id for line in lines])
        newest, publish = trained.newest, trained.publish
    updates = planned({tenant.id: tenant for tenant in manager.current().tenants}, lines, newest)
    for update in updates:
        print(update)
    result = {"tenants": [update.tenant for update in updates], "generation": None}
    keys = sum(update.new_keys for update in updates)
    if not updates:
        print(f"{len(lines)} tenants are as {file} says")
        return result
    if keys and secrets is None:
        raise InvalidInput(f"{keys} keys have to be made: give --secrets with a new file for their secrets")
    if not yes:
        print(f"{len(updates)} of {len(lines)} tenants would change: give --yes to change them")
        return result
    made = made_keys(updates)
    if secrets is not None and made:
        write_secrets(secrets, made)  # before the change: what is not written by then would be lost

    def edit(change: Change) -> int:
        if planned(change.tenants, lines, newest) != updates:
            raise InvalidInput("somebody else has changed these tenants meanwhile, and nothing was changed: do it again")
        bring(change, updates, made, publish)
        return change.generation

    try:
        result["generation"] = manager.registry.change("tenant apply", edit)
    except HplmError:
        if secrets is not None and made:
            print(f"the secrets in {secrets} may open nothing: look at `hplm tenant key list`", file=sys.stderr)
        raise
    return settled(manager, f"{len(updates)} tenants are changed, generation {result['generation']}", **result)


def never(change: Change, tenant_id: str) -> None:
    """Publishes nothing: without a store no tenant has a new version."""
    raise AssertionError(tenant_id)


def write_secrets(path: Path, made: Mapping[str, Sequence[tuple[str, Key]]]) -> None:
    """Writes a new file that only this user can read."""
    try:
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    except FileExistsError:
        raise InvalidInput(f"{path} exists already: name a new file with --secrets") from None
    with open(file, "w", encoding="utf-8") as lines:
        for tenant, keys in made.items():
            for secret, key in keys:
                lines.write(dumps({"tenant": tenant, "key": key.id, "secret": secret, "expires": key.expires}) + "\n")
        lines.flush()
        os.fsync(lines.fileno())


def key_add(id: Id, /, *, days: float = 0.0, served: ServedOptions = HERE) -> dict:
    """Make a key; its secret is shown once and not stored.

    :param days: days until it expires; 0: never
    """
    manager = served.manager()
    secret, key = manager.add_key(id, days)
    print(f"key {key.id} of tenant {id} {_ends(key.expires)}; its secret, which is shown only now:\n{secret}", flush=True)
    return settled(manager, tenant=id, key=key.id, secret=secret, expires=key.expires)


def key_list(id: Id, /, *, served: ServedOptions = HERE) -> dict:
    """List a tenant's keys, without their secrets."""
    from hplm.tenants.listing import find_tenant, key_rows

    keys = key_rows(find_tenant(id, *served.checked())[1].keys)
    for key in keys:
        print(f"{key['id']}  {_ends(key['expires'])}")
    if not keys:
        print("no keys: open to everybody")
    return {"tenant": id, "keys": keys, **served.source}


def key_revoke(id: Id, /, *, key: str, wait: bool = False, servers: tuple[str, ...] = (), served: ServedOptions = HERE) -> dict:
    """Refuse a key from now on.

    :param key: its id, as `hplm tenant key list` shows it
    :param wait: end when no server, not even one that is cut off, takes the key
    :param servers: with --wait: HOST:PORT of the metrics of all servers that there are; it ends as soon as they refuse the key
    """
    from hplm.tenants.taken import check_addresses, wait_until_taken

    if servers and not wait:
        raise InvalidInput("--servers says for whom to wait: give --wait too")
    check_addresses(servers)
    manager = served.manager()
    dead = manager.revoke_key(id, key)
    until = time.strftime(WHEN, time.localtime(math.ceil(dead)))
    change = f"key {key} of tenant {id} is revoked; a server that is cut off may take it until {until}"
    result = settled(manager, change, tenant=id, revoked=key, dead_at=round(dead, 3))
    if servers:
        backbone, generation = manager.folder.parent.name, manager.registry.decided
        behind = wait_until_taken(servers, backbone, generation, dead)
        print(f"refused by {len(servers) - len(behind)} of {len(servers)} servers")
        return {**result, "behind": behind}
    if wait:
        time.sleep(max(0.0, dead - time.time()))
    return result


def limit(
    id: Id, /, *, rate: float | None = None, burst: float | None = None, texts_rate: float | None = None,
    tokens_rate: float | None = None, in_flight: int | None = None, homes: int | None = None, deadline_ms: float | None = None,
    served: ServedOptions = HERE,
) -> dict:  # fmt: skip
    """Set a tenant's quotas and the time that its answers may take.

    Limits that are not given stay as they are; 0 means no limit. Tokens are counted as the model reads them: after
    truncation, with special tokens. A request that takes more texts or tokens than are left is answered, and later requests
    wait until the tenant is within its rate again.

    :param rate: most requests a second
    :param burst: most requests at once; 0: as many as in a second
    :param texts_rate: most texts a second, in all requests
    :param tokens_rate: most tokens a second, in all texts
    :param in_flight: most requests in flight at a time
    :param homes: replicas behind `hplm route` that share these quotas, each an equal part (default: 1)
    :param deadline_ms: deadline of requests that name none; 0: the backbone's default
    """
    counts = {"rate": rate, "burst": burst, "texts_rate": texts_rate, "tokens_rate": tokens_rate, "in_flight": in_flight}
    wanted = {**counts, "homes": homes, "deadline_us": _microseconds(deadline_ms)}
    limits = {name: value for name, value in wanted.items() if value is not None}
    if not limits:
        raise InvalidInput(
            "no limit is given: give --rate, --burst, --texts-rate, --tokens-rate, --in-flight, --homes or "
            "--deadline-ms; 0 removes a limit"
        )
    manager = served.manager()
    manager.limit(id, **limits)
    set_to = ", ".join(f"{name} {value:,.12g}" for name, value in limits.items())
    return settled(manager, f"tenant {id}: {set_to}", tenant=id, **limits)


def readable(value: object) -> str:
    """Returns a value as people read it."""
    if isinstance(value, list | tuple):
        return ", ".join(map(readable, value)) or "none"
    if isinstance(value, dict):
        return dumps(value)
    return "none" if value is None else f"{value:,.12g}" if isinstance(value, float) else str(value)


def _ends(expires: int) -> str:
    if not expires:
        return "does not expire"
    word = "expires" if time.time() < expires else "expired"
    return time.strftime(f"{word} {WHEN}", time.localtime(expires))


def _microseconds(milliseconds: float | None) -> float | None:
    """Returns a whole number, but for what is infinite or no number: the manager refuses it."""
    if milliseconds is None:
        return None
    exact = 1000 * milliseconds
    return round(exact) if math.isfinite(exact) else exact


def compact(*, served: ServedOptions = HERE) -> dict:
    """Remove the weights of deleted tenants and versions now."""
    won = served.manager().compact()
    print(f"{won / 1e6:,.1f} MB freed")
    return {"bytes": won}


def log(*, served: ServedOptions = HERE) -> dict:
    """Print every change: when, by whom, and from which version to which."""
    changes = served.manager().registry.audit()
    for change in changes:
        shown = "generation", "at", "who", "action"
        rest = [f"{name} {readable(value)}" for name, value in change.items() if name not in shown]
        at = datetime.fromisoformat(change["at"]).astimezone().strftime(WHEN)
        print(f"{change['generation']:>6}  {at}  {change['who']}  {change['action']}  {', '.join(rest)}")
    return {"changes": changes}


def changed(manager: Manager, change: TenantChange, keys: Sequence[str] = ()) -> dict:
    return settled(manager, f"{of_versions(change, keys)}, generation {change.generation}", **asdict(change))


def of_versions(change: TenantChange, keys: Sequence[str] = ()) -> str:
    """Says which version a tenant had and has. `keys`: ids of those that it has got."""
    versions = f"version {change.before or 'none'} -> {change.after or 'none'}"
    if change.before == change.after:
        versions = f"version {change.after} has this content already" + ", nothing was changed" * (not keys)
    return f"tenant {change.tenant}: {versions}" + f", new keys {', '.join(keys)}" * bool(keys)
