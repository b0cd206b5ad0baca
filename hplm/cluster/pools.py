"""The replicas of a cluster on this machine, and the pools that they make."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hplm.errors import InvalidInput
from hplm.placement.cluster import check_cores, cores_of
from hplm.placement.files import refuse_twice
from hplm.placement.placement import Group


@dataclass(frozen=True)
class PlannedReplica:
    """A server that is to run here. Its place on the router's ring depends on its id."""

    id: int
    pool: str  # whose replicas serve the same tenants
    repository: Path
    cores: tuple[int, ...] = ()  # none: all

    @property
    def name(self) -> str:
        return f"replica-{self.id}"


def divided(cores: Sequence[int], count: int) -> list[tuple[int, ...]]:
    """Divides cores into so many parts, as equal as can be."""
    ends = [i * len(cores) // count for i in range(count + 1)]
    return [tuple(cores[begin:end]) for begin, end in itertools.pairwise(ends)]


def one_pool(repository: Path, count: int, cores: Sequence[int] = ()) -> list[PlannedReplica]:
    """Divides the cores among so many replicas of a repository."""
    if count < 1:
        raise InvalidInput(f"--replicas {count}: give 1 or more")
    refuse_twice(f"--cores {','.join(map(str, cores))}", "core", cores, "give each core once")
    check_cores(cores)
    if cores and len(cores) < count:
        raise InvalidInput(
            f"--cores names {len(cores)} cores for {count} replicas: give each replica at least one, or leave out --cores"
        )
    return [PlannedReplica(i, "all", repository, own) for i, own in enumerate(divided(cores, count), start=1)]


def placed_pools(groups: Sequence[Group], folder: Path) -> list[list[PlannedReplica]]:
    """Returns a replica for each group, in pools of the same units. `folder`: of the groups' repositories."""
    machines = sorted({group.machine for group in groups})
    if len(machines) > 1:
        raise InvalidInput(
            f"the placement is for the machines {', '.join(machines)}, but this cluster runs on one: emit it with `hplm place "
            "emit`, and serve each group on its machine"
        )
    alike: dict[frozenset[str], list[Group]] = {}
    for group in groups:
        alike.setdefault(frozenset(group.units), []).append(group)
    for (units, own), (others, other) in itertools.combinations(alike.items(), 2):
        if shared := sorted(units & others):
            raise InvalidInput(
                f"groups {own[0].name!r} and {other[0].name!r} both have unit {shared[0]!r}, but differ in others, so the "
                "router could send its requests to one of them only: search with more memory for each device"
            )
    check_cores([core for group in groups for core in cores_of(group.devices)])
    ids = itertools.count(1)
    return [
        [PlannedReplica(next(ids), own[0].name.lower(), folder / one.name, cores_of(one.devices)) for one in own]
        for own in alike.values()
    ]
