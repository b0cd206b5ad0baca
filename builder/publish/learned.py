"""What a tenant of a store has learned, as it is published."""

from __future__ import annotations

from builder.store.calibrations import calibration_of
from builder.store.exits import layout_of, read_exits
from builder.store.store import Store, TenantFile
from hplm.tenants.knowledge import ExitKnowledge, Knowledge


def knowledge_of(store: Store, tenant: TenantFile) -> Knowledge:
    """Reads a tenant from a store in the form that a manager takes."""
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
