"""Finds the tenant that a request names, and checks its key."""

from __future__ import annotations

from collections.abc import Mapping

from hplm.errors import Draining, InvalidInput, NoTenant
from hplm.tenants.keys import allows, digest_in, new_key, presented_key
from hplm.tenants.snapshot import Snapshot, Tenant

HEADER = "hplm-tenant"  # names the tenant to proxies; Triton adds it to the parameters, in the client's upper and lower case
UNSEEN = "-"  # what the router writes into that header if it has seen no tenant in a request
_STAND_IN_KEYS = (new_key()[1],)  # compared for an unknown tenant, so that its refusal takes as long


def admit(snapshot: Snapshot, parameters: Mapping[str, object], now: float, is_stale: bool = False) -> Tenant:
    """Returns the named tenant if the key is valid. An unknown tenant and a wrong key get the same error in the same time.

    Refuses a request whose header names another one: proxies have counted it as a request of that tenant. A tenant that the
    router has not seen is refused too: its quotas would be granted once at each replica. `is_stale`: the registry was not seen
    for so long that the key may have been revoked.
    """
    name = parameters.get("tenant")
    if name is not None and not isinstance(name, str):
        raise InvalidInput(f"parameter 'tenant' is {name!r}: send the name of a tenant")
    headers = [value for key, value in parameters.items() if key.lower() == HEADER]
    if not all([value in (name, UNSEEN) for value in headers]):
        raise InvalidInput(f"the header {HEADER} is not the parameter 'tenant': send the same name in both, or no such header")
    try:
        tenant = snapshot.find(name)
    except NoTenant:
        tenant = None
    is_open = tenant is not None and not tenant.keys
    allowed = is_open or allows(tenant.keys if tenant is not None else _STAND_IN_KEYS, presented_key(parameters), now)
    if tenant is None or not allowed:
        raise NoTenant
    if is_stale and tenant.keys:
        raise Draining(
            "this server has not seen the registry of its tenants for longer than its lease, so the key may have been revoked: "
            "send the request to another server, or again when the registry answers"
        )
    if UNSEEN in headers:
        raise InvalidInput(f"the router has not found the tenant in this request: send its name in the header {HEADER}")
    return tenant


def opened(snapshot: Snapshot, parameters: Mapping[str, object], now: float) -> list[str]:
    """Returns the ids of the tenants that a request may use: those without keys, and those that its key opens."""
    header = presented_key(parameters)
    keyed = [tenant for tenant in snapshot.by_digest.get(digest_in(header), []) if allows(tenant.keys, header, now)]
    return sorted(tenant.id for tenant in [*snapshot.without_keys, *keyed])
