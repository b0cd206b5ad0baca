"""`hplm tenant add`, `update` and `publish`: serve tenants of a store."""

from __future__ import annotations

import sys
from typing import Annotated, Any

from builder.cli.options import SOME_REFUSED, open_store
from hplm.cli.options import StoreFolder, about
from hplm.cli.served import HERE, ServedOptions, settled
from hplm.cli.tenant import Id, changed, of_versions
from hplm.errors import InvalidInput


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
    ids: Annotated[tuple[str, ...], about("names of tenants (default: all of the store)")] = (), /, *, store: StoreFolder,
    served: ServedOptions = HERE,
) -> tuple[dict[str, Any], int]:  # fmt: skip
    """Serve the store's newest versions of tenants, whether they are served already or not, in one change.

    A tenant whose served version has the same content stays as it is. One that cannot be served is named, and the others go on.
    """
    from builder.publish.live import Trained

    manager, opened = served.manager(), open_store(store)
    for id in ids:
        opened.known_tenant(id)
    done = Trained(manager, opened, ids or opened.tenant_ids()).publish_all()
    if len(ids) == 1:
        for why in done.refused.values():
            raise InvalidInput(why)
        return changed(manager, done.tenants[0]), 0
    for one in done.tenants:
        print(of_versions(one))
    for id, why in done.refused.items():
        print(f"tenant {id} refused: {why}", file=sys.stderr)
    told = f"tenants published: {len(done.tenants)}; refused: {len(done.refused)}; generation {done.generation}"
    tenants = {one.tenant: {"before": one.before, "after": one.after} for one in done.tenants}
    result = settled(manager, told, generation=done.generation, tenants=tenants, refused=done.refused)
    return result, SOME_REFUSED if done.refused else 0
