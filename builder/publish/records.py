"""Writes trained tenants as records of banks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from builder.store.calibrations import calibration_of
from builder.store.exits import layout_of, outputs_of, read_exits
from builder.store.store import Store, TenantFile
from hplm.adapters.bank import write_bank
from hplm.adapters.heads import grown, size_for
from hplm.adapters.layout import Layout
from hplm.adapters.record import Record
from hplm.tenants.exits import Exits
from hplm.tenants.snapshot import Tenant


class Records:
    """Collects records, one bank a layout."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._entries: dict[Layout, list[tuple[int, int, Tensor]]] = defaultdict(list)

    def add(self, tenant: TenantFile, uid: int) -> Tenant:
        """Adds a tenant's records, and returns the tenant as snapshots hold it."""
        config, (adapter, head) = self._store.config, self._store.tenant_weights(tenant)
        layout, adapter_record, head_record = tenant.adapter_layout(config), None, None
        if layout is not None and adapter is not None:
            adapter_record = self._record(layout, uid, tenant.version, adapter)
        if head:
            size = size_for(len(tenant.labels))
            head_record = self._record(tenant.head_layout(config, size), uid, tenant.version, [grown(head, size)])
        return Tenant(
            id=tenant.id,
            uid=uid,
            version=tenant.version,
            domain=tenant.domain,
            domain_version=tenant.domain_version,
            task=tenant.task,
            labels=tuple(tenant.labels),
            head=head_record,
            adapter=adapter_record,
            calibration=calibration_of(self._store, tenant),
            exits=self._exits(tenant, uid),
        )

    def _exits(self, tenant: TenantFile, uid: int) -> Exits | None:
        found = read_exits(self._store, tenant)
        if found is None:
            return None
        size = size_for(outputs_of(tenant))
        heads = [grown(head, size) for head in found.heads]
        return replace(found.exits, record=self._record(layout_of(self._store, tenant, size), uid, tenant.version, heads))

    def write(self, folder: Path) -> None:
        for layout, entries in self._entries.items():
            write_bank(folder / layout.file_name, layout, entries)

    def _record(self, layout: Layout, uid: int, version: int, layers: Sequence[Mapping[str, Tensor]]) -> Record:
        entries = self._entries[layout]
        entries.append((uid, version, layout.pack(layers)))
        return Record(layout.file_name, len(entries) - 1, uid, version)
