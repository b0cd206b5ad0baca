"""`hplm tenant add`, `update` and `publish`: serve tenants of a store."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

from builder.cli.options import SOME_REFUSED, open_store
from hplm.cli.options import StoreFolder, about, refuse_given
from hplm.cli.served import HERE, ServedOptions, settled
from hplm.cli.tenant import Id, changed, of_versions
from hplm.errors import InvalidInput

NAME = "serve one tenant under this name, such as a new version beside the one that is served"


def add(id: Id, /, *, store: StoreFolder, served: ServedOptions = HERE) -> dict:
    """Serve a tenant of the store, without a restart."""
    from builder.publish.live import add_tenant

    return changed(manager := served.manager(), add_tenant(manager, open_store(store), id))


def update(id: Id, /, *, store: StoreFolder, served: ServedOptions = HERE) -> dict:
    """Serve the store's newest version of a tenant; requests in flight use the old version.

    It is served under the next number also if it was served before, which mends a damaged record.
    """
    from builder.publish.live import update_tenant

    return changed(manager := served.manager(), update_tenant(manager, open_store(store), id))


def publish(
    ids: Annotated[tuple[str, ...], about("names of tenants (default: all of the store)")] = (), /, *,
    store: StoreFolder | None = None, record: Path | None = None, version: int | None = None,
    served_as: Annotated[str | None, about(NAME, name="--as")] = None, keys: Path | None = None, served: ServedOptions = HERE,
) -> tuple[dict[str, Any], int]:  # fmt: skip
    """Serve the store's newest versions of tenants, whether they are served already or not, in one change.

    A tenant whose served version has the same content stays as it is. One that cannot be served is named, and the others go on.

    :param record: instead of --store, a record file that becomes one tenant: docs/formats.md
    :param version: this version of one tenant
    :param keys: keys that the tenants get with the same change, where they lack them: a file with the SHA-256 of a secret a
        line, and behind it perhaps the Unix second at which it expires
    """
    from builder.publish.live import Trained
    from builder.publish.record import publish_record
    from builder.store.store import check_name
    from hplm.tenants.keys import read_keys

    if len(ids) != 1:
        refuse_given("is of one tenant: name it", version=version, **{"as": served_as})
    if served_as is not None:
        check_name("tenant", served_as)
    given = read_keys(keys) if keys is not None else []
    if (store is None) == (record is None):
        raise InvalidInput("give either --store, or --record with the record file of one tenant")
    manager = served.manager()
    if store is not None:
        opened = open_store(store)
        for id in ids:
            opened.known_tenant(id)
        done = Trained(manager, opened, ids or opened.tenant_ids(), version).publish_all(served_as, given)
    else:
        refuse_given("works only with --store: leave it out with --record", version=version, **{"as": served_as})
        if record is None or len(ids) != 1:
            raise InvalidInput("--record is of one tenant: name it")
        check_name("tenant", ids[0])
        done = publish_record(manager, ids[0], record, given)
    if len(ids) == 1:
        for why in done.refused.values():
            raise InvalidInput(why)
        new = done.keys.get(done.tenants[0].tenant, ())
        return {**changed(manager, done.tenants[0], new), "keys": new}, 0
    for one in done.tenants:
        print(of_versions(one, done.keys.get(one.tenant, ())))
    for id, why in done.refused.items():
        print(f"tenant {id} refused: {why}", file=sys.stderr)
    told = f"tenants published: {len(done.tenants)}; refused: {len(done.refused)}; generation {done.generation}"
    tenants = {one.tenant: {"before": one.before, "after": one.after} for one in done.tenants}
    result = settled(manager, told, generation=done.generation, tenants=tenants, keys=done.keys, refused=done.refused)
    return result, SOME_REFUSED if done.refused else 0
