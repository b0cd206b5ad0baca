"""A trace and a placement as columns of numbers, as the screen's loops take them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

import numpy as np

from hplm.arrays import Array
from hplm.placement.attained import REFUSED
from hplm.placement.placement import Group
from hplm.placement.profile import Profile
from hplm.placement.stages import Cut
from hplm.placement.workload import Trace

TERMS = 4  # of `Terms`


@dataclass(frozen=True, eq=False)
class Case:
    """Nanoseconds as 64-bit floats, numbers as the kernel has them. `clock`, `end` and `busy` are results."""

    arrival: Array  # by text, as the three below
    timeout: Array
    unit: Array
    tokens: Array
    backbone: Array  # of each unit
    first_group: Array  # the groups of unit u: group[first_group[u]:first_group[u + 1]]
    group: Array
    first_unit: Array  # the units of each group, in the same way
    units_of: Array
    depth: Array  # stages of each group
    terms: Array  # by group, backbone, stage and term
    around: Array  # by backbone and term
    clock: Array  # by group and stage: when each stage is free
    end: Array  # by text: when it is answered, or REFUSED
    busy: Array  # by group


class Cases:
    """Makes the cases of one trace. What does not depend on the placement is computed once."""

    def __init__(self, profile: Profile, trace: Trace) -> None:
        self._profile = profile
        self._names = trace.names
        self._backbones = {name: i for i, name in enumerate(profile.backbones)}
        self._backbone_of = np.array([self._backbones[name.split("/")[0]] for name in trace.names], np.int32)
        self._around = np.array([astuple(own.around) for own in profile.backbones.values()])
        self._known: dict[tuple[str, int, Cut], Array] = {}
        self._arrival, self._timeout = (np.ascontiguousarray(own, np.int64) for own in (trace.arrival_ns, trace.timeout_ns))
        self._unit, self._tokens = (np.ascontiguousarray(own, np.int32) for own in (trace.unit, trace.tokens))

    def of(self, groups: Sequence[Group]) -> Case:
        number = {name: i for i, name in enumerate(self._names)}
        units = [sorted(number[name] for name in group.units if name in number) for group in groups]
        groups_of: list[list[int]] = [[] for _ in self._names]
        for group, own in enumerate(units):
            for unit in own:
                groups_of[unit].append(group)
        depth = np.array([group.stages for group in groups], np.int32)
        stages = int(depth.max(initial=1))
        terms = np.zeros((len(groups), len(self._backbones), stages, TERMS))
        for i, group in enumerate(groups):
            for backbone, own in self._terms_of(group).items():
                terms[i, self._backbones[backbone], : len(own)] = own
        return Case(
            arrival=self._arrival, timeout=self._timeout, unit=self._unit, tokens=self._tokens,
            backbone=self._backbone_of, first_group=_firsts(groups_of), group=_flat(groups_of),
            first_unit=_firsts(units), units_of=_flat(units), depth=depth, terms=terms, around=self._around,
            clock=np.zeros((len(groups), stages)), end=np.full(len(self._unit), REFUSED), busy=np.zeros(len(groups)),
        )  # fmt: skip

    def _terms_of(self, group: Group) -> Mapping[str, Array]:
        """Returns the terms of each stage, by backbone."""
        found: dict[str, Array] = {}
        for backbone, cut in group.cuts.items():
            key = backbone, group.intra, cut
            if key not in self._known:
                own, hop = self._profile.backbones[backbone], self._profile.hop
                self._known[key] = np.array([astuple(stage) for stage in own.stages(hop, group.intra, cut)])
            found[backbone] = self._known[key]
        return found


def _firsts(lists: Sequence[Sequence[int]]) -> Array:
    return np.cumsum([0, *map(len, lists)]).astype(np.int32)


def _flat(lists: Sequence[Sequence[int]]) -> Array:
    return np.array([number for own in lists for number in own], np.int32)
