"""Makes tenants that generate text as their backbone does."""

from __future__ import annotations

from dataclasses import replace

from builder.store.store import Store, TenantFile, check_name
from builder.tables.build_folder import held
from hplm.tasks import check_backbone

TASK = "generate"


def plain_tenant(store: Store, tenant_id: str, domain: str | None = None) -> TenantFile:
    """Makes a tenant without an adapter, or the next version of a tenant: with its adapter, on the newest tables of its domain.

    `domain`: default: that of the version before, or root. Returns the version before if it is the same.
    """
    check_name("tenant", tenant_id)
    check_backbone(TASK, store.config)
    with held(store.tenant_work_folder(tenant_id), f"tenant {tenant_id!r}"):
        before = store.tenant(tenant_id)
        domain = domain or (before.domain if before is not None else "root")
        if before is None:
            tenant = TenantFile(tenant_id, 1, domain, store.latest(domain), TASK, [], rank=0)
            weights, report = (None, {}), {"task": TASK}
        else:
            tenant = replace(before, domain=domain, domain_version=store.latest(domain))
            if tenant == before:
                return before
            tenant = replace(tenant, version=before.version + 1)
            weights, report = store.tenant_weights(before), store.report(before)
        store.save_tenant(tenant, *weights, report)
    return tenant
