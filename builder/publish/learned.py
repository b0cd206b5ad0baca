"""Reads a tenant of a store in the form in which it is published."""

from __future__ import annotations

import logging

from builder.store.calibrations import calibration_of
from builder.store.exits import layout_of, read_exits
from builder.store.store import Store, TenantFile
from hplm.tenants.knowledge import ExitKnowledge, Knowledge

log = logging.getLogger(__name__)
NO_LONGER_SERVED = ("ladder.json", "link.json")  # files of a tenant's version


def knowledge_of(store: Store, tenant: TenantFile) -> Knowledge:
    """Reads a tenant from a store in the form that a manager takes."""
    for name in NO_LONGER_SERVED:
        if (left := store.tenant_folder(tenant.id, tenant.version) / name).exists():
            log.warning("%s is no longer served: the full stack of tenant %s answers", left, tenant.id)
    adapter, head = store.tenant_weights(tenant)
    layout, found = tenant.adapter_layout(store.config), read_exits(store, tenant)
    return Knowledge(
        domain=tenant.domain,
        domain_version=tenant.domain_version,
        task=tenant.task,
        labels=tuple(tenant.labels),
        head=(tenant.head_layout(store.config), head) if head else None,
        adapter=(layout, adapter) if layout is not None and adapter is not None else None,
        version=tenant.version,
        calibration=calibration_of(store, tenant),
        exits=ExitKnowledge(found.exits, layout_of(store, tenant), found.heads) if found is not None else None,
    )
