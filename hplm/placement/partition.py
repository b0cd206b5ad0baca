"""The parts of Algorithm 2: buckets of backbones, buckets of devices, and groups of devices (AlpaServe 4.2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations, islice, pairwise

import numpy as np

from hplm.arrays import Array
from hplm.placement.cluster import Cluster, Machine
from hplm.placement.placement import Group
from hplm.placement.problem import Groups, Problem
from hplm.placement.profile import BackboneProfile

CONVOY = 3.0  # backbones whose texts take so many times as long as another's are kept apart
ALIKE = 1.1  # backbones whose times differ by less are never kept apart
MOST_BUCKETS = 3
DISCREPANCY = 2.0  # the most loaded bucket of devices has at most so many times the load a device of the least loaded one
ALLOCATIONS = 4  # of devices to the same buckets: the most even ones


@dataclass(frozen=True, order=True)
class Parallel:
    """How groups are cut: stages, and devices a stage."""

    stages: int
    intra: int

    @property
    def devices(self) -> int:
        return self.stages * self.intra


def backbone_buckets(problem: Problem) -> list[tuple[frozenset[str], ...]]:
    """Returns the partitions of the backbones that have requests in which none delays another too long.

    They differ in the time of their mean text.
    """
    took = {
        name: own.alone().ns(*problem.shapes[name])
        for name, own in problem.profile.backbones.items()
        if any(unit.split("/")[0] == name for unit in problem.requested)
    }
    ordered = sorted(took, key=lambda name: (took[name], name))
    borders = [i for i in range(1, len(ordered)) if took[ordered[i]] > ALIKE * took[ordered[i - 1]]]
    found: list[tuple[frozenset[str], ...]] = []
    for count in range(min(len(borders) + 1, MOST_BUCKETS)):
        for chosen in combinations(borders, count):
            parts = [ordered[a:b] for a, b in pairwise((0, *chosen, len(ordered)))]
            if count == MOST_BUCKETS - 1 or all(took[part[-1]] <= CONVOY * took[part[0]] for part in parts):
                found.append(tuple(map(frozenset, parts)))
    return found


def device_buckets(loads: Sequence[float], devices: int, fits: Callable[[tuple[int, ...]], bool]) -> list[tuple[int, ...]]:
    """Returns how many devices each bucket gets, the most even ones first. `loads`: of each bucket, in devices.

    `fits`: whether each bucket can hold its backbones.

    AlpaServe wants equal rates of requests in all buckets. Here a device of each bucket shall have the same load, which is
    the same if buckets have equal requests, and right if they do not.
    """
    if devices < len(loads):
        return []
    counts = _counts(devices, len(loads))
    a_device = np.maximum(loads, 1e-9) / counts
    discrepancy = a_device.max(axis=1) / a_device.min(axis=1)
    even = np.argsort(discrepancy, kind="stable").tolist()
    fitting = list(islice((i for i in even if fits(tuple(counts[i].tolist()))), ALLOCATIONS))
    allowed = [i for i in fitting if discrepancy[i] <= DISCREPANCY] or fitting[:1]
    return [tuple(counts[i].tolist()) for i in allowed]


def part_of(cluster: Cluster, first: int, count: int) -> Cluster:
    """Returns so many devices in order, from the given one. A machine's memory is divided as its devices are."""
    machines: list[Machine] = []
    for machine in cluster.machines:
        chosen = machine.devices[max(0, first) : max(0, first + count)]
        if chosen:
            memory = machine.memory * len(chosen) // len(machine.devices)
            machines.append(replace(machine, devices=chosen, memory=memory))
        first -= len(machine.devices)
    return Cluster(tuple(machines))


def parallels(problem: Problem, allows: Callable[[Parallel], bool] = lambda _: True) -> list[Parallel]:
    """Returns all ways to cut a group that the backbones and machines allow, the smallest groups first."""
    layers = min(own.layers for own in _backbones(problem))
    largest = max(len(machine.devices) for machine in problem.cluster.machines)
    found = [one for one in _measured(problem, largest) if one.stages <= layers and allows(one)]
    return sorted(found, key=lambda one: (one.devices, one))


def groups_of(problem: Problem, parallel: Parallel) -> Groups:
    """Returns equal groups on each machine, and for its remaining devices smaller ones.

    Devices stay idle where no measured number of devices a stage makes a group of them.
    """
    groups: list[Group] = []
    for machine in problem.cluster.machines:
        names = [device.name for device in machine.devices]
        while names:
            own = parallel if len(names) >= parallel.devices else _smaller(problem, parallel, len(names))
            if own is None:
                break
            groups.append(Group(f"g{len(groups)}", machine.name, tuple(names[: own.devices]), own.intra, {}, ()))
            names = names[own.devices :]
    return tuple(groups)


def _smaller(problem: Problem, parallel: Parallel, most_devices: int) -> Parallel | None:
    """Returns the largest group in a power of two with no more stages, and no wider ones, that was measured."""
    measured = _measured(problem, most_devices)
    fitting = [one for one in measured if one.intra <= parallel.intra and one.stages <= parallel.stages]
    return max(fitting, key=lambda one: (one.devices, one.intra), default=None)


def _measured(problem: Problem, most_devices: int) -> Iterator[Parallel]:
    """Yields groups of powers of two, with as many devices a stage as all backbones were measured with."""
    first, *others = _backbones(problem)
    for size in (2**i for i in range(most_devices.bit_length())):
        for intra in sorted(first.times):
            if size % intra == 0 and all(intra in own.times for own in others):
                yield Parallel(size // intra, intra)


def _backbones(problem: Problem) -> list[BackboneProfile]:
    return [problem.profile.backbones[name] for name in sorted({unit.backbone for unit in problem.units})]


@lru_cache(MOST_BUCKETS)
def _counts(devices: int, buckets: int) -> Array:
    """Returns all ways to divide the devices, in order: ways x buckets. For a thousand devices there are half a million."""
    borders = np.array(list(combinations(range(1, devices), buckets - 1)), dtype=np.int64)
    return np.diff(borders, axis=1, prepend=0, append=devices)
