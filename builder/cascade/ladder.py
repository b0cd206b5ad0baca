"""Chooses the ladders of tenants from their profiles: of one tenant alone, or of several that share batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from builder.cascade.candidates import Candidate
from builder.cascade.common_stacks import Tenants, best, described
from builder.cascade.levels import OpenLevel
from builder.cascade.profile import Profile, read_profile
from builder.cascade.selection import Target, cheapest, ladder_below, reported
from builder.store.levels import save_ladder
from builder.store.store import Store, TenantFile
from hplm.errors import InvalidInput


def profile_of(store: Store, tenant: TenantFile, levels: Sequence[OpenLevel]) -> Profile:
    """Returns the profile of these levels of a tenant's version. Raises if there is none."""
    profile = read_profile(store, tenant)
    if profile is None:
        raise InvalidInput(
            f"tenant {tenant.id!r} has no profile of version {tenant.version}, or one that an earlier hPLM has made: make it "
            "with `hplm cascade profile`"
        )
    if not profile.is_of(levels):
        raise InvalidInput(
            f"the levels of tenant {tenant.id!r} or their calibrations have changed since its profile was made: make it again "
            "with `hplm cascade profile`"
        )
    return profile


def check_target(tenant: TenantFile, profile: Profile, target: Target) -> Candidate:
    """Returns the tenant's cheapest plan that meets the target. Raises if none does."""
    try:
        return cheapest(profile.front, target, profile.own)
    except InvalidInput as error:
        raise InvalidInput(f"tenant {tenant.id!r}: {error}") from None


def choose_ladder(store: Store, tenant: TenantFile, levels: Sequence[OpenLevel], target: Target) -> dict[str, Any]:
    """Stores the ladder beside the version, and returns what is known of its plans. `levels`: as of `profile_tenant`."""
    profile = profile_of(store, tenant, levels)
    return _saved(store, tenant, profile, ladder_below(check_target(tenant, profile, target), profile.front))


def choose_ladders(
    store: Store, tenants: Sequence[TenantFile], profiles: Mapping[str, Profile], target: Target
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Stores the ladders of tenants that share batches. Returns what is known of their plans, and of the sets of stacks.

    The plans of the dearest rungs share few stacks. The rungs below need no other ones as long as that makes them cheaper.
    `profiles`: by tenant. Each has a plan that meets the target.
    """
    _check_same_measure(profiles)
    together = Tenants(profiles)
    choices = together.choices(target)
    chosen = best(choices)
    ladders: list[dict[str, Any]] = []
    for tenant in tenants:
        profile = profiles[tenant.id]
        ladder = ladder_below(chosen.plans[tenant.id], profile.front_within(chosen.stacks), profile.front)
        ladders.append(_saved(store, tenant, profile, ladder))
    return ladders, [described(one, one is chosen) | {"batch_tokens": together.batch} for one in choices]


def _check_same_measure(profiles: Mapping[str, Profile]) -> None:
    """Refuses profiles whose times do not add up to those of a batch."""
    by_measure: dict[str, list[str]] = {}
    for id, profile in profiles.items():
        by_measure.setdefault(profile.measured_in, []).append(id)
    if len(by_measure) > 1:
        tenants = "; ".join(f"{', '.join(ids)} in {measure}" for measure, ids in by_measure.items())
        raise InvalidInput(
            f"the profiles of these tenants were measured in different precisions or on different devices ({tenants}), so "
            "their times do not add up: measure them in one with `hplm cascade profile --again` (--dtype, --device)"
        )


def _saved(store: Store, tenant: TenantFile, profile: Profile, ladder: Sequence[Candidate]) -> dict[str, Any]:
    save_ladder(store, tenant, [one.plan for one in ladder])
    return {
        "tenant": tenant.id,
        "version": tenant.version,
        "metric": profile.report["metric"],
        "own": {"score": profile.own, "mean_ms": profile.report["levels"][-1]["mean_ms"]},
        "ladder": [reported(one, profile.names) for one in ladder],
    }
