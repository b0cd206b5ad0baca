"""Makes tenants that generate text: of the backbone as it is, or with a LoRA that `peft` saved."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from builder.importing.files import read_json
from builder.importing.found import halves, records, storable, upper_layout, usual
from builder.importing.lower import NewDomain, check_mergeable, merged
from builder.importing.peft import is_peft, read_peft_decoder
from builder.store.store import Store, TenantFile, check_name
from builder.tables.build_folder import held
from hplm.errors import MISFITS, InvalidInput
from hplm.tasks import check_backbone

TASK = "generate"
WHOLE = "all layers are those that the adapter was trained on"
APPROXIMATE = (
    "the adapter was trained on the original layers; here its lower part, if any, is merged into layers that see windows, and "
    "its upper part reads the tables' vectors"
)


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


def import_generative(
    store: Store, tenant_id: str, folder: Path, domain: str, new: NewDomain | None, device: torch.device
) -> tuple[TenantFile, dict[str, Any]]:
    """Returns the stored tenant and its report. The caller holds the tenant's folder."""
    if not is_peft(read_json(folder / "adapter_config.json")):
        raise InvalidInput(f"{folder} holds no adapter of `peft`, the only library whose adapters of decoders can be imported")
    try:
        found = read_peft_decoder(folder)
    except MISFITS as error:
        raise InvalidInput(
            f"a configuration in {folder} has an option of another kind than `peft` writes ({error}): save the adapter again"
        ) from error
    parent, parts = (domain, store.latest(domain)), halves(found, store.config)
    check_mergeable(found, parts.lower, store, new)
    before, layout = store.tenant(tenant_id), upper_layout(found, parts.upper, store.config)
    tenant = TenantFile(tenant_id, before.version + 1 if before is not None else 1, *parent, TASK, [], rank=0)
    adapter = None
    if layout is not None:
        tenant = replace(tenant, rank=layout.size, adapter=layout.kind, places=usual(layout))
        adapter = [storable(record, layout, found.source) for record in records(parts.upper, layout)]
    report: dict[str, Any] = {
        "task": TASK,
        "imported": {
            "from": str(folder),
            "library": found.library,
            "trained_on": found.base,
            "store_made_from": store.model,
        },
        "note": WHOLE if not store.config.lower_layers else APPROXIMATE,
    }
    with ExitStack() as building:
        if new is not None:
            table = building.enter_context(merged(store, parent, parts.lower, found, new, device))
            if before is not None and (before.domain, before.domain_version) == (table.meta.domain, table.meta.version):
                return before, store.report(before)  # this import was interrupted after it had stored its tenant
            tenant = replace(tenant, domain=table.meta.domain, domain_version=table.meta.version)
            layers, megabytes = sorted(parts.lower), round(sum(table.meta.sizes().values()) / 1e6, 3)
            report["merged"] = {"domain": tenant.domain, "layers": layers, "ngrams": table.meta.keys, "mb": megabytes}
        store.chain(tenant.domain, tenant.domain_version)  # fails if the domain was deleted meanwhile
        store.save_tenant(tenant, adapter, {}, report)
    return tenant, report
