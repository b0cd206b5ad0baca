"""Limits a server to the part of its registry that one group of a placement serves (`hplm place emit`)."""

from __future__ import annotations

from pathlib import Path

import msgspec

from hplm.errors import Broken
from hplm.tenants.snapshot import Snapshot, Tenant

FILE = "filter.json"  # beside the exported snapshot; without it all is served


class Filter(msgspec.Struct, frozen=True):
    units: frozenset[str]  # those of the group: a domain, or a domain, a slash and a tenant
    hot: frozenset[str]  # all units of one tenant, here and in other groups
    domains: frozenset[str]  # whose tables the group needs

    def unit_of(self, tenant: Tenant) -> str:
        own = f"{tenant.domain}/{tenant.id}"
        return own if own in self.hot else tenant.domain

    def takes(self, tenant: Tenant) -> bool:
        return self.unit_of(tenant) in self.units

    def write(self, folder: Path) -> None:
        (folder / FILE).write_bytes(msgspec.json.encode(self, order="sorted"))


def filtered(snapshot: Snapshot, folder: Path) -> Snapshot:
    """Returns the part of a snapshot that is served. `folder`: of the exported backbone."""
    path = folder / FILE
    if not path.exists():
        return snapshot
    try:
        own = msgspec.json.decode(path.read_bytes(), type=Filter)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Broken(f"{path} does not say what is served ({error}): emit the group again with `hplm place emit`") from None
    branches = [branch for branch in snapshot.branches if branch.domain in own.domains]
    tenants = [tenant for tenant in snapshot.tenants if own.takes(tenant)]
    return Snapshot(snapshot.generation, branches, tenants, snapshot.export, snapshot.ledger)
