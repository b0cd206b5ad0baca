"""Chooses the ladder of a tenant from its profile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from builder.cascade.levels import OpenLevel
from builder.cascade.profile import Profile, read_profile
from builder.cascade.selection import Target, reported, select
from builder.store.levels import save_ladder
from builder.store.store import Store, TenantFile
from hplm.errors import InvalidInput


def profile_of(store: Store, tenant: TenantFile, levels: Sequence[OpenLevel]) -> Profile:
    """Returns the profile of these levels of a tenant's version. Raises if there is none."""
    profile = read_profile(store, tenant)
    if profile is None:
        raise InvalidInput(
            f"tenant {tenant.id!r} has no profile of version {tenant.version}: make it with `hplm cascade profile`"
        )
    if not profile.is_of(levels):
        raise InvalidInput(
            f"the levels of tenant {tenant.id!r} or their calibrations have changed since its profile was made: make it again "
            "with `hplm cascade profile`"
        )
    return profile


def choose_ladder(store: Store, tenant: TenantFile, levels: Sequence[OpenLevel], target: Target) -> dict[str, Any]:
    """Stores the ladder beside the version, and returns what is known of its plans. `levels`: as of `profile_tenant`."""
    profile = profile_of(store, tenant, levels)
    try:
        chosen = select(profile.front, target, profile.own)
    except InvalidInput as error:
        raise InvalidInput(f"tenant {tenant.id!r}: {error}") from None
    save_ladder(store, tenant, [one.plan for one in chosen])
    return {
        "tenant": tenant.id,
        "version": tenant.version,
        "metric": profile.report["metric"],
        "own": {"score": profile.own, "mean_ms": profile.report["levels"][-1]["mean_ms"]},
        "ladder": [reported(one, profile.names) for one in chosen],
    }
