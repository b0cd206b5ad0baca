"""The next snapshot of a copy, from the source's newest one and from what is here.

All that the source removed is gone at once: tenants, keys, what limits allowed. New versions and new tenants come when their
tables and records are here. Until then a tenant keeps its old version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from hplm.plot.branch import Branch
from hplm.tenants.registry import SETTINGS
from hplm.tenants.snapshot import Snapshot, Tenant

Place = tuple[str, int]  # a domain and its version


@dataclass(frozen=True)
class Assembly:
    branches: tuple[Branch, ...]
    tenants: tuple[Tenant, ...]
    is_whole: bool  # it has all that the source's snapshot has

    def is_same(self, snapshot: Snapshot) -> bool:
        return (self.branches, self.tenants) == (snapshot.branches, snapshot.tenants)


def assemble(
    wanted: Snapshot,
    local: Snapshot,
    here: Callable[[Branch], bool],
    parent: Callable[[Branch], Place | None],
    moved: Callable[[Tenant], Tenant | None],
) -> Assembly:
    """Returns the next snapshot of a copy whose newest one is `local`.

    `here`: whether a table is here. `parent`: the table that one falls back to. `moved`: a tenant with the places that its
    records have here; None if some are not here.
    """
    branches = [branch for branch in wanted.branches if here(branch)]
    new = {_place(branch): branch for branch in branches}
    old = {_place(branch): new.get(_place(branch), branch) for branch in local.branches if here(branch)}
    kept: dict[Branch, None] = {}  # the older tables that tenants still need
    tenants: list[Tenant] = []
    before = {tenant.id: tenant for tenant in local.tenants}
    is_whole = len(branches) == len(wanted.branches)
    for tenant in wanted.tenants:
        now = moved(tenant) if _chain(tenant, new, parent) is not None else None
        if now is not None:
            tenants.append(now)
            continue
        is_whole = False
        then = before.get(tenant.id)
        if then is not None and then.uid == tenant.uid:
            chain = _chain(then, old, parent)
            if chain is not None and all(branch in local.branches for branch in chain):
                tenants.append(replace(then, **{name: getattr(tenant, name) for name in SETTINGS}))
                kept |= dict.fromkeys(branch for branch in chain if branch not in branches)
    return Assembly((*branches, *kept), tuple(tenants), is_whole)


def _chain(tenant: Tenant, known: Mapping[Place, Branch], parent: Callable[[Branch], Place | None]) -> list[Branch] | None:
    """Returns the tables that a tenant reads, its domain's first. None: one of them is not here."""
    chain: list[Branch] = []
    step: Place | None = (tenant.domain, tenant.domain_version)
    while step is not None:
        branch = known.get(step)
        if branch is None or branch in chain:
            return None
        chain.append(branch)
        step = parent(branch)
    return chain


def _place(branch: Branch) -> Place:
    return branch.domain, branch.version
