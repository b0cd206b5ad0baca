"""From trained tenants to records in banks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from builder.store import Store, TenantFile
from hplm.adapters.bank import Record, write_bank
from hplm.adapters.layout import Layout
from hplm.errors import InvalidInput
from hplm.tenants.snapshot import Tenant

HEAD_SIZES = (16, 64, 256, 1024, 4096)  # few sizes, so that heads of different tenants batch


class Records:
    """Records of one layout go to one bank, whose file name begins with `prefix`."""

    def __init__(self, store: Store, prefix: str = "") -> None:
        self._store = store
        self._prefix = prefix
        self._entries: dict[Layout, list[tuple[int, int, Tensor]]] = defaultdict(list)

    def add(self, tenant: TenantFile, uid: int, deadline_us: int = 0, place: str = "") -> Tenant:
        """The tenant as a snapshot names it; `place` says where readers look for the bank."""
        config = self._store.config
        adapter, head = self._store.tenant_weights(tenant)
        adapter_record = None
        if adapter is not None:
            adapter_record = self._record(tenant.adapter_layout(config), uid, tenant.version, adapter, place)
        size = _head_size(tenant)
        layout = tenant.head_layout(config, size)
        return Tenant(
            id=tenant.id,
            uid=uid,
            version=tenant.version,
            domain=tenant.domain,
            domain_version=tenant.domain_version,
            task=tenant.task,
            labels=tuple(tenant.labels),
            head=self._record(layout, uid, tenant.version, [_grown(head, size)], place),
            adapter=adapter_record,
            deadline_us=deadline_us,
        )

    def write(self, folder: Path) -> None:
        for layout, entries in self._entries.items():
            write_bank(folder / f"{self._prefix}{layout.file_name}", layout, entries)

    def _record(
        self, layout: Layout, uid: int, version: int, layers: Sequence[Mapping[str, Tensor]], place: str
    ) -> Record:
        entries = self._entries[layout]
        entries.append((uid, version, layout.pack(layers)))
        return Record(f"{place}{self._prefix}{layout.file_name}", len(entries) - 1, uid, version)


def _head_size(tenant: TenantFile) -> int:
    for size in HEAD_SIZES:
        if len(tenant.labels) <= size:
            return size
    raise InvalidInput(f"tenant {tenant.id!r} has {len(tenant.labels)} labels; heads go up to {HEAD_SIZES[-1]}")


def _grown(head: Mapping[str, Tensor], size: int) -> dict[str, Tensor]:
    """Rows beyond the tenant's labels are zero and never read."""
    grown = dict(head)
    for name in ("weight", "bias"):
        grown[name] = torch.zeros(size, *head[name].shape[1:])
        grown[name][: len(head[name])] = head[name]
    return grown
