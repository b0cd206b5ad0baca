"""Finds the tenant that a request names, and checks its key."""

from __future__ import annotations

from collections.abc import Mapping

from hplm.errors import InvalidInput, NoTenant
from hplm.tenants.keys import allows, digest_in, new_key, presented_key
from hplm.tenants.snapshot import Snapshot, Tenant

HEADER = "hplm-tenant"  # names the tenant to proxies; Triton adds it to the parameters, in the client's upper and lower case
_STAND_IN_KEYS = (new_key()[1],)  # compared for an unknown tenant, so that its refusal takes as long


def admit(snapshot: Snapshot, parameters: Mapping[str, object], now: float) -> Tenant:
    """Returns the named tenant if the key is valid. An unknown tenant and a wrong key get the same error in the same time.

    Refuses a request whose header names another one: proxies have counted it as a request of that tenant.
    """
    name = parameters.get("tenant")
    if any(value != name for key, value in parameters.items() if key.lower() == HEADER):
        raise InvalidInput(f"the header {HEADER} is not the parameter 'tenant': send the same name in both, or no such header")
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
