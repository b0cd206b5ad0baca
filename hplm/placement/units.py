"""Units: what placement moves. A unit is the tenants of one domain; a hot tenant may be a unit of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from hplm.errors import InvalidInput
from hplm.placement.files import Positive
from hplm.placement.profile import Cut, Profile


@dataclass(frozen=True)
class Unit:
    name: Annotated[str, Meta(pattern=r"^[^/]*/[^/]*(/[^/]*)?\Z")]  # backbone/domain, or backbone/domain/tenant
    tenants: Positive

    @property
    def backbone(self) -> str:
        return self.name.split("/")[0]

    @property
    def domain(self) -> str:
        return self.name.split("/")[1]

    @property
    def tenant(self) -> str | None:
        """The tenant whose unit this is; None: all tenants of the domain without a unit of their own."""
        return self.name.split("/")[2] if self.name.count("/") == 2 else None


def units_of(profile: Profile, hot: Collection[str] = ()) -> tuple[Unit, ...]:
    """Returns the units of all tenants. `hot`: tenants with a unit of their own, as backbone/tenant."""
    units: list[Unit] = []
    own: set[str] = set()
    for backbone, of_backbone in profile.backbones.items():
        for domain, tenants in of_backbone.tenants.items():
            hot_here = [tenant for tenant in tenants if f"{backbone}/{tenant}" in hot]
            own.update(f"{backbone}/{tenant}" for tenant in hot_here)
            units += [Unit(f"{backbone}/{domain}/{tenant}", 1) for tenant in hot_here]
            if len(hot_here) < len(tenants):
                units.append(Unit(f"{backbone}/{domain}", len(tenants) - len(hot_here)))
    unknown = sorted(set(hot) - own)
    if unknown:
        raise InvalidInput(f"hot tenant {unknown[0]!r} is not in the profile: name tenants as backbone/tenant")
    return tuple(units)


def units_by_name(profile: Profile, units: Sequence[Unit]) -> dict[str, str]:
    """Returns the unit of each name that a trace may have: backbone/tenant, a tenant's where only one has it, or a unit's."""
    existing = {unit.name: unit.name for unit in units}
    known = [
        (backbone, domain, tenant)
        for backbone, own in profile.backbones.items()
        for domain, tenants in own.tenants.items()
        for tenant in tenants
    ]
    times = Counter(tenant for *_, tenant in known)
    found: dict[str, str] = {}
    for backbone, domain, tenant in known:
        unit = existing.get(f"{backbone}/{domain}/{tenant}", f"{backbone}/{domain}")
        found |= {f"{backbone}/{tenant}": unit, **({tenant: unit} if times[tenant] == 1 else {})}
    return existing | found


def stages_bytes(profile: Profile, cuts: Mapping[str, Cut]) -> list[int]:
    """Returns the bytes that each stage of a group with these backbones needs: layers and slots, once for all units."""
    stages = max(map(len, cuts.values()), default=0)
    needed = [0] * stages
    for backbone, cut in cuts.items():
        for stage, (first, last) in enumerate(cut):
            needed[stage] += profile.backbones[backbone].stage_bytes(first, last)
    return needed


def machine_bytes(profile: Profile, units: Iterable[Unit]) -> int:
    """Returns the bytes that a machine with these units needs: tables with those that they fall back to, and records.

    All groups of a machine map the same files, so each table and each unit counts once.
    """
    total = 0
    tables: set[tuple[str, str]] = set()
    for unit in set(units):
        own = profile.backbones[unit.backbone]
        total += own.record_bytes * unit.tenants
        tables.update((unit.backbone, domain) for domain in own.chain(unit.domain))
    return total + sum(profile.backbones[backbone].table_bytes[domain] for backbone, domain in tables)
