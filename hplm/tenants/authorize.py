"""Finds the tenant that a request names, and checks its key."""

from __future__ import annotations

from collections.abc import Mapping

from hplm.errors import NoTenant
from hplm.tenants.keys import allows, digest_in, new_key, presented_key
from hplm.tenants.snapshot import Snapshot, Tenant

_STAND_IN_KEYS = (new_key()[1],)  # compared for an unknown tenant, so that its refusal takes as long


def admit(snapshot: Snapshot, parameters: Mapping[str, object], now: float) -> Tenant:
    """Returns the named tenant if the key is valid. An unknown tenant and a wrong key get the same error in the same time."""
    name = parameters.get("tenant")
    try:
        tenant = snapshot.find(name if isinstance(name, str) else None)
    except NoTenant:
        tenant = None
    if tenant is not None and not tenant.keys:
        return tenant
    allowed = allows(tenant.keys if tenant is not None else _STAND_IN_KEYS, presented_key(parameters), now)
    if tenant is None or not allowed:
        raise NoTenant
    return tenant


def follow(snapshot: Snapshot, parameters: Mapping[str, object]) -> Tenant:
    """Returns the named tenant to a request that follows a link to it. Whoever made the link had the stores of both tenants."""
    name = parameters.get("tenant")
    return snapshot.find(name if isinstance(name, str) else None)


def opened(snapshot: Snapshot, parameters: Mapping[str, object], now: float) -> list[str]:
    """Returns the ids of the tenants that a request may use: those without keys, and those that its key opens."""
    header = presented_key(parameters)
    keyed = [tenant for tenant in snapshot.with_digest(digest_in(header)) if allows(tenant.keys, header, now)]
    return sorted(tenant.id for tenant in [*snapshot.without_keys, *keyed])
