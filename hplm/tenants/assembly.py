"""Decides what a copy of a registry serves next, from the newest snapshot and from what is here."""

from __future__ import annotations

from collections.abc import Callable, Collection

from hplm.plot.table import Branch, BranchId
from hplm.tenants.snapshot import Snapshot, Tenant


def assemble(
    wanted: Snapshot,
    local: Snapshot,
    here: Callable[[Branch], bool],
    parent: Callable[[Branch], BranchId | None],
    has: Callable[[Tenant], bool],
) -> tuple[tuple[Branch, ...], tuple[Tenant, ...]]:
    """Returns the tables and tenants of the next snapshot of a copy whose newest one is `local`.

    `here`: whether a table is here. `parent`: the table that one falls back to. `has`: whether a tenant's records are here.
    """
    branches = [branch for branch in wanted.branches if here(branch)]
    new = {branch.id: branch for branch in branches}
    old = {branch.id: new.get(branch.id, branch) for branch in local.branches if here(branch)}
    kept: dict[Branch, None] = {}  # the older tables that tenants still need
    tenants: list[Tenant] = []
    before = {tenant.id: tenant for tenant in local.tenants}
    for tenant in wanted.tenants:
        if _chain(tenant, new, parent) is not None and has(tenant):
            tenants.append(tenant)
            continue
        then = before.get(tenant.id)
        if then is not None and then.uid == tenant.uid:
            chain = _chain(then, old, parent)
            if chain is not None and all(branch in local.branches for branch in chain):
                tenants.append(then.set_as(tenant))
                kept |= dict.fromkeys(branch for branch in chain if branch not in branches)
    return (*branches, *kept), tuple(tenants)


def _chain(
    tenant: Tenant, known: dict[BranchId, Branch], parent: Callable[[Branch], BranchId | None]
) -> Collection[Branch] | None:
    """Returns the tables that a tenant reads, its domain's first. None: one of them is not here."""
    chain: dict[Branch, None] = {}
    step: BranchId | None = tenant.branch_id
    while step is not None:
        branch = known.get(step)
        if branch is None or branch in chain:
            return None
        chain[branch] = None
        step = parent(branch)
    return chain
