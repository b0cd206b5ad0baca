"""Finds the tenant that a request names, checks its key, and lists the tenants that a key opens."""

from __future__ import annotations

import json
from collections.abc import Mapping

import msgspec

from hplm.errors import Draining, InvalidInput, NoTenant
from hplm.tenants.keys import allows, by_digest, digest_in, new_key, presented_key
from hplm.tenants.snapshot import Snapshot, Tenant, listed_row, listed_rows

HEADER = "hplm-tenant"  # names the tenant to proxies; Triton adds it to the parameters, in the client's upper and lower case
UNSEEN = "-"  # what the router writes into that header if it has seen no tenant in a request
DIFFERENT = f"the header {HEADER} and the parameter 'tenant' name different tenants: send the same name, or one"
STALE = (
    "this server has not seen the registry of its tenants for longer than its lease, so the key may have been revoked: "
    "send the request to another server, or again when the registry answers"
)
_STAND_IN = by_digest([new_key()[1]])  # looked up for an unknown tenant, so that its refusal takes as long


LIST = "hplm_tenants"  # a parameter: the request asks which tenants it may name, instead of their answer


def named(parameters: Mapping[str, object]) -> str | None:
    """Returns the tenant that a request names in the parameter `tenant`, in the header, or in both; None: in neither.

    They must agree: proxies have counted the request for the tenant in the header.
    """
    names = {str(value) for key, value in parameters.items() if key.lower() == HEADER} - {UNSEEN}
    if (name := parameters.get("tenant")) is not None:
        if not isinstance(name, str):
            raise InvalidInput(f"parameter 'tenant' is {name!r}: send the name of a tenant")
        names.add(name)
    if len(names) > 1:
        raise InvalidInput(DIFFERENT)
    return names.pop() if names else None


def check_header(parameters: str) -> None:
    """Raises if a parameter in this JSON has the header's name and another value: of both, one would be read."""
    if parameters.count(f'"{HEADER}"') > 1:
        pairs: list[tuple[str, object]] = json.loads(parameters, object_pairs_hook=list)
        if len({str(value) for key, value in pairs if key == HEADER}) > 1:
            raise InvalidInput(DIFFERENT)


def admit(snapshot: Snapshot, parameters: Mapping[str, object], now: float, is_stale: bool = False) -> Tenant:
    """Returns the named tenant if the key is valid. An unknown tenant and a wrong key get the same error in the same time.

    Refuses a tenant that the router has not seen: its quotas would be granted once at each replica. `is_stale`: the registry
    was not seen for so long that the key may have been revoked.
    """
    name = named(parameters)
    try:
        tenant = snapshot.find(name)
    except NoTenant:
        tenant = None
    is_open = tenant is not None and not tenant.keys
    allowed = is_open or allows(tenant.keys_by_digest if tenant is not None else _STAND_IN, presented_key(parameters), now)
    if tenant is None or not allowed:
        raise NoTenant
    if is_stale and tenant.keys:
        raise Draining(STALE)
    if any(value == UNSEEN for key, value in parameters.items() if key.lower() == HEADER):
        raise InvalidInput(f"the router has not found the tenant in this request: send its name in the header {HEADER}")
    return tenant


def listed(snapshot: Snapshot, parameters: Mapping[str, object], now: float, is_stale: bool = False) -> bytes:
    """Returns in JSON the tenants that a request may ask: those without keys, then those that its key opens.

    If it names a tenant, only that one, with its labels: the labels of thousands of tenants would be too long.
    """
    if named(parameters) is not None:
        tenant = admit(snapshot, parameters, now, is_stale)
        return msgspec.json.encode([{**listed_row(tenant), "labels": tenant.labels}])
    header = presented_key(parameters)
    keyed = [tenant for tenant in snapshot.by_digest.get(digest_in(header), []) if allows(tenant.keys_by_digest, header, now)]
    if is_stale and keyed:
        raise Draining(STALE)
    return b"[%b]" % b",".join(filter(None, (snapshot.open_rows, listed_rows(keyed))))
