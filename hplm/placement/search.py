"""Algorithm 2: the cluster in buckets, each cut into groups, each filled by Algorithm 1 (AlpaServe 4.2).

A search ranks placements by the screen on a sample of the trace, and its best ones again on the whole trace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from hplm.errors import InvalidInput
from hplm.placement.partition import ALLOCATIONS, Parallel, backbone_buckets, device_buckets, groups_of, parallels, part_of
from hplm.placement.problem import Groups, Problem
from hplm.placement.selection import GroupSelection, Selector, completed, fast

SAMPLE = 200_000  # requests of the trace that rank placements
KEPT = 10  # best placements that are screened on the whole trace
Say = Callable[[str], None]
BucketDevices = tuple[frozenset[str], int, int]  # a bucket of backbones, its first device, and its number of devices


class NothingFound(InvalidInput):
    """No placement answers any request in time."""


@dataclass(frozen=True, eq=False)
class FoundGroups(GroupSelection):
    """`attained`: on the whole trace. `screened`: in the whole search."""

    how: str  # stages x devices a stage of the groups of each bucket


def search(
    problem: Problem, select: Selector = fast, allows: Callable[[Parallel], bool] = lambda _: True, sample: int = SAMPLE,
    say: Say = lambda _: None, kept: int = KEPT,
) -> list[FoundGroups]:  # fmt: skip
    """Returns so many of the best placements, the best first. `allows`: whether groups may be cut so."""
    problem.expect_fitting()
    small = problem.on(problem.trace.sampled(sample))
    searched = _Search(small, select, allows, say, kept)
    ranked = sorted(searched.candidates(), key=lambda one: -one.served)[:kept]  # stable: of equal ones the first
    if not ranked or not ranked[0].served:
        raise NothingFound(_nothing_found(problem, searched.screened))
    found: list[FoundGroups] = []
    for one in ranked:
        used = (own for own in completed(small, one.groups) if own.units)
        groups = tuple(replace(group, name=f"group-{i}") for i, group in enumerate(used))
        found.append(FoundGroups(groups, problem.screen.attained(groups), searched.screened + len(ranked), one.how))
    return sorted(found, key=lambda one: -one.share)


@dataclass(frozen=True, eq=False)
class _Candidate:
    groups: Groups
    served: int  # requests
    how: str


class _Search:
    def __init__(self, problem: Problem, select: Selector, allows: Callable[[Parallel], bool], say: Say, kept: int) -> None:
        self._problem = problem
        self._kept = kept
        self._select = select
        self._allows = allows
        self._say = say
        self._known: dict[BucketDevices, list[_Candidate]] = {}
        self._most_served: list[int] = []  # by the best placements so far, the best first
        self._asked: Counter[str] = Counter(problem.trace.backbone.tolist())
        self.screened = 0

    def candidates(self) -> list[_Candidate]:
        problem = self._problem
        found: list[_Candidate] = []
        ways = backbone_buckets(problem)
        devices = f"the {problem.cluster.devices:,} devices in up to {ALLOCATIONS} for each"
        self._say(f"the backbones are divided in {len(ways):,} ways, and {devices}")
        for buckets in ways:
            for one in self._divided(buckets):
                found.append(one)
                self._most_served = sorted([*self._most_served, one.served], reverse=True)[: self._kept]
        if found:
            return found
        # Backbones that ought to be apart share all devices where these cannot be divided.
        return self._bucket(frozenset(name.split("/")[0] for name in problem.requested), 0, problem.cluster.devices)

    def _divided(self, buckets: tuple[frozenset[str], ...]) -> Iterator[_Candidate]:
        """Returns placements of these buckets, with the best ways to divide the devices among them."""
        named = [*zip(self._problem.trace.names, self._problem.load, strict=True)]
        loads = [sum(load for name, load in named if name.split("/")[0] in bucket) for bucket in buckets]
        for counts in device_buckets(loads, self._problem.cluster.devices, lambda counts: self._fits(buckets, counts)):
            parts = list(_parts(buckets, counts))
            if len(buckets) == 1:
                yield from self._bucket(*parts[0])
            elif all(self._may_be_kept(parts) and self._bucket(*own) for own in parts):
                best = [self._bucket(*own)[0] for own in parts]
                groups = tuple(group for one in best for group in one.groups)
                yield _Candidate(groups, sum(one.served for one in best), " and ".join(one.how for one in best))

    def _may_be_kept(self, parts: Sequence[BucketDevices]) -> bool:
        """Whether these parts together may serve more than the worst of the best placements so far. Not if they serve as many:
        of equal ones the first are kept.
        """
        return len(self._most_served) < self._kept or sum(self._at_most(part) for part in parts) > self._most_served[-1]

    def _at_most(self, part: BucketDevices) -> int:
        """Returns how many requests a part can serve: as many as it does if that is known, or all of its backbones."""
        if part in self._known:
            return max((one.served for one in self._known[part]), default=0)
        return sum(self._asked[backbone] for backbone in part[0])

    def _fits(self, buckets: tuple[frozenset[str], ...], counts: tuple[int, ...]) -> bool:
        cluster, backbones = self._problem.cluster, self._problem.profile.backbones
        return all(
            max(backbones[name].stage_bytes() for name in own) <= part_of(cluster, first, count).room
            for own, first, count in _parts(buckets, counts)
        )

    def _bucket(self, bucket: frozenset[str], first: int, count: int) -> list[_Candidate]:
        """Returns placements of some backbones on some devices, the best first."""
        key = bucket, first, count
        if key not in self._known:
            self._known[key] = sorted(self._filled(*key), key=lambda one: -one.served)
        return self._known[key]

    def _filled(self, bucket: frozenset[str], first: int, count: int) -> Iterator[_Candidate]:
        names = {unit.name for unit in self._problem.units if unit.backbone in bucket}
        part = self._problem.of(names, part_of(self._problem.cluster, first, count))
        for parallel in parallels(part, self._allows):
            selection = self._select(part, groups_of(part, parallel))
            self.screened += selection.screened
            how = f"{parallel.stages}x{parallel.intra} on {count}"
            self._say(f"{len(bucket)} backbones, {how} devices: {selection.share:.2%} after {selection.screened} screens")
            yield _Candidate(selection.groups, int(selection.attained.served.sum()), how)


def _parts(buckets: Sequence[frozenset[str]], counts: Sequence[int]) -> Iterator[BucketDevices]:
    return zip(buckets, accumulate(counts[:-1], initial=0), counts, strict=True)


def _nothing_found(problem: Problem, screened: int) -> str:
    if not screened:
        return (
            "no group can be made: all backbones must be measured with a number of devices a stage that is a power of two, and "
            "that a machine has. Measure them with `hplm place profile --intra 1`"
        )
    machine = problem.cluster.machines[0]
    device = machine.devices[0]
    needed = ", ".join(
        f"{name!r} {own.stage_bytes():,} bytes in {own.layers} layers" for name, own in problem.profile.backbones.items()
    )
    return (
        f"no placement answers any request in time, of {screened:,} tried: the backbones need {needed}; {machine.name!r} has "
        f"{len(machine.devices)} devices, {device.name!r} with {device.memory:,}. Allow more time (--slo-scale), more stages, "
        "or larger devices"
    )
