"""Decides which pool and which homes each tenant has. The router's maps hold the result."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hplm.cluster.description import Pool
from hplm.tenants.snapshot import Tenant


@dataclass
class Routes:
    """Tenants for which the rule, any replica of the first pool, does not hold."""

    pools: dict[str, str] = field(default_factory=dict[str, str])  # by tenant; without those of the first pool
    homes: dict[str, str] = field(default_factory=dict[str, str])  # of tenants with limits: COUNT/ID/ID..., all replicas
    conflicts: list[str] = field(default_factory=list[str])  # tenants that no pool or several claim
    notes: list[str] = field(default_factory=list[str])


def routes_of(pools: Sequence[Pool], served: Mapping[str, Sequence[Tenant]]) -> Routes:
    """`served`: the tenants of each pool. A tenant that several pools claim goes to the first of them."""
    routes = Routes()
    by_pool = {name: defaultdict[str, list[Tenant]](list) for name in served}
    for name, tenants in served.items():
        for tenant in tenants:  # several backbones of a repository may have a tenant of this name
            by_pool[name][tenant.id].append(tenant)
    first = pools[0].name
    for name in sorted({tenant for of_pool in by_pool.values() for tenant in of_pool}):
        claims = _claims(pools, by_pool, name)
        if not claims:
            routes.conflicts.append(f"tenant {name!r} is in no pool's 'tenants': name it there")
            continue
        if len(claims) > 1:
            both = " and ".join(repr(pool.name) for pool in claims)
            routes.conflicts.append(
                f"pools {both} both serve tenant {name!r}: name it in 'tenants' of the one that is to answer"
            )
        pool = claims[0]
        if pool.name != first:
            routes.pools[name] = pool.name
        limited = [tenant for tenant in by_pool[pool.name][name] if tenant.has_quotas]
        if limited:
            homes = min(tenant.homes for tenant in limited)  # never more than any of them counts on
            if homes > len(pool.replicas):
                routes.notes.append(
                    f"tenant {name!r} has {homes} homes, but pool {pool.name!r} has {len(pool.replicas)} replicas, so it gets "
                    "only this part of its limits: give `hplm tenant limit --homes` fewer"
                )
            routes.homes[name] = "/".join(map(str, [homes, *homes_of(name, pool)]))
    return routes


def homes_of(tenant: str, pool: Pool) -> list[int]:
    """Returns the ids of all replicas, the tenant's first home first. Its homes are the first of those that run.

    This is rendezvous hashing: every router finds the same order, and a further replica takes only the tenants that it leads.
    """

    def rank(replica: int) -> bytes:
        return hashlib.sha256(f"{tenant}/{replica}".encode()).digest()

    return sorted((replica.id for replica in pool.replicas), key=rank)


def _claims(pools: Sequence[Pool], by_pool: Mapping[str, Mapping[str, object]], tenant: str) -> list[Pool]:
    """Returns the pools that are to answer a tenant: those that name it, else those that take all."""
    serving = [pool for pool in pools if tenant in by_pool.get(pool.name, {})]
    naming = [pool for pool in serving if pool.tenants is not None and tenant in pool.tenants]
    return naming or [pool for pool in serving if pool.tenants is None]
