"""The problem that a search solves: a cluster, measured backbones, units and their requests. It knows what fits where."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hplm.arrays import Array
from hplm.errors import InvalidInput
from hplm.placement.cluster import Cluster
from hplm.placement.placement import Group
from hplm.placement.profile import Cut, Profile, Shape, best_cut
from hplm.placement.screen import Screen, each_ns
from hplm.placement.units import Unit, machine_bytes, stages_bytes
from hplm.placement.workload import Trace

Groups = tuple[Group, ...]


@dataclass(frozen=True, eq=False)
class Problem:
    cluster: Cluster
    profile: Profile
    units: tuple[Unit, ...]
    trace: Trace  # its names are those of the units
    most_texts: int = 1  # of a batch of the screen

    @cached_property
    def screen(self) -> Screen:
        return Screen(self.profile, self.trace, self.most_texts)

    @cached_property
    def unit(self) -> dict[str, Unit]:
        return {unit.name: unit for unit in self.units}

    @cached_property
    def requested(self) -> list[str]:
        """The units that have requests."""
        return [name for name, requests in zip(self.trace.names, self.trace.counts.tolist(), strict=True) if requests]

    @cached_property
    def load(self) -> Array:
        """The devices that each unit of the trace would keep busy, if nothing were ever idle."""
        busy_ns = each_ns({name: own.alone() for name, own in self.profile.backbones.items()}, self.trace)
        return np.bincount(self.trace.unit, busy_ns, len(self.trace.names)) / (self.trace.seconds * 1e9)

    @cached_property
    def shapes(self) -> dict[str, Shape]:
        """The mean text of each backbone, for which cuts are balanced."""
        backbone, tokens = self.trace.backbone, self.trace.tokens.astype(np.int64)
        found: dict[str, Shape] = {}
        for name in self.profile.backbones:
            mine = tokens[backbone == name]
            mine = mine if len(mine) else tokens
            found[name] = Shape(float(mine.mean()), float((mine**2).mean()), 1)
        return found

    @cached_property
    def room(self) -> GroupMemory:
        return GroupMemory(self)

    def of(self, units: Collection[str], cluster: Cluster | None = None) -> Problem:
        """Returns the same problem with some of the units and their requests, on the whole cluster or a part of it."""
        mine = np.array([name in units for name in self.trace.names])
        chosen = tuple(unit for unit in self.units if unit.name in units)
        return replace(self, units=chosen, trace=self.trace.only(mine[self.trace.unit]), cluster=cluster or self.cluster)

    def on(self, trace: Trace) -> Problem:
        return replace(self, trace=trace)

    def expect_fitting(self) -> None:
        """Refuses a backbone that no machine of the cluster can hold, however it is cut."""
        room = self.cluster.room
        for name in sorted({unit.backbone for unit in self.units}):
            needed = self.profile.backbones[name].stage_bytes()
            if needed > room:
                raise InvalidInput(
                    f"backbone {name!r} fits no cut: its layers and slots need {needed:,} bytes, and the devices of the "
                    f"largest machine have {room:,} together: name larger devices"
                )


class GroupMemory:
    """Adds units to groups as long as the memory of stages and machines holds them."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._cuts: dict[tuple[object, ...], Cut] = {}
        self._bytes: dict[frozenset[str], int] = {}

    def added(self, groups: Groups, at: int, unit: str) -> Groups | None:
        """Returns the groups after a unit was added to one of them, or None if it does not fit or is there already."""
        group, backbone = groups[at], unit.split("/")[0]
        if unit in group.units or not self._machine_holds(groups, group.machine, unit):
            return None
        cuts = group.cuts
        if backbone not in cuts:
            cut = self._cut(group, backbone)
            if not cut:
                return None
            cuts = {**cuts, backbone: cut}
        grown = replace(group, cuts=cuts, units=(*group.units, unit))
        return (*groups[:at], grown, *groups[at + 1 :])

    def _machine_holds(self, groups: Groups, machine: str, unit: str) -> bool:
        here = frozenset({unit}.union(*(group.units for group in groups if group.machine == machine)))
        needed = self._bytes.get(here)
        if needed is None:
            units = [self._problem.unit[name] for name in here]
            needed = self._bytes[here] = machine_bytes(self._problem.profile, units)
        return needed <= self._problem.cluster.by_name[machine].memory

    def _cut(self, group: Group, backbone: str) -> Cut:
        """Returns the fastest cut that fits beside the group's other backbones; an empty one if none does."""
        own = self._problem.profile.backbones[backbone]
        serves = own.slots > group.stages  # for a batch in each stage and the next one
        if not serves or group.intra not in own.times or group.stages > own.layers:
            return ()
        free = self._free(group)
        best = self._best(group, backbone, None)
        if all(np.less_equal(stages_bytes(self._problem.profile, {backbone: best}), free)):
            return best
        return () if group.stages == 1 else self._best(group, backbone, tuple(free))

    def _free(self, group: Group) -> list[int]:
        memory = self._problem.cluster.by_name[group.machine].memory_of
        used = stages_bytes(self._problem.profile, group.cuts) or [0] * group.stages
        return [sum(memory[device] for device in group.devices_of(stage)) - used[stage] for stage in range(group.stages)]

    def _best(self, group: Group, backbone: str, room: tuple[int, ...] | None) -> Cut:
        key = backbone, group.intra, group.stages, room
        if key not in self._cuts:
            profile, shape = self._problem.profile, self._problem.shapes[backbone]
            self._cuts[key] = best_cut(profile.backbones[backbone], profile.hop, group.intra, group.stages, shape, room)
        return self._cuts[key]
