"""`hplm tenant add`, `update` and `publish`: serve tenants of a store."""

from __future__ import annotations

from builder.cli.options import open_store
from hplm.cli.options import StoreFolder
from hplm.cli.served import HERE, Served
from hplm.cli.tenant import Id, changed


def add(id: Id, /, *, store: StoreFolder, served: Served = HERE) -> dict:
    """Serve a tenant of the store, without a restart."""
    from builder.publish.live import add_tenant

    return changed(manager := served.manager(), add_tenant(manager, open_store(store), id))


def update(id: Id, /, *, store: StoreFolder, served: Served = HERE) -> dict:
    """Serve the store's newest version of a tenant; requests in flight use the old version.

    It is served under the next number also if it was served before, which mends a damaged record.
    """
    from builder.publish.live import update_tenant

    return changed(manager := served.manager(), update_tenant(manager, open_store(store), id))


def publish(id: Id, /, *, store: StoreFolder, served: Served = HERE) -> dict:
    """Serve the store's newest version of a tenant, whether it is served already or not.

    If the served version has the same content, nothing is changed.
    """
    from builder.publish.live import publish_tenant

    return changed(manager := served.manager(), publish_tenant(manager, open_store(store), id))
