"""Algorithm 1: which units go on given groups. Guided by the screen, a unit at a time (AlpaServe 4.2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from hplm.errors import InvalidInput
from hplm.placement.attained import Attained
from hplm.placement.placement import Group
from hplm.placement.problem import Groups, Problem

Selector = Callable[[Problem, Groups], "GroupSelection"]


@dataclass(frozen=True, eq=False)
class GroupSelection:
    groups: Groups
    attained: Attained
    screened: int  # placements that were tried

    @property
    def share(self) -> float:
        return self.attained.share


def selector(given: str) -> Selector:
    """Returns a selector by name: `fast`, or `beam:K`."""
    name, _, width = given.partition(":")
    if name == "fast" and not width:
        return fast
    if name == "beam" and (width or "1").isdecimal() and int(width or "1"):
        return lambda problem, groups: beam(problem, groups, int(width or "1"))
    raise InvalidInput(f"--search {given!r}: give fast, or beam:K with the number of selections to keep, such as beam:3")


def beam(problem: Problem, groups: Groups, width: int = 1) -> GroupSelection:
    """Tries every unit in every group, keeps the best `width` selections, and goes on from them until nothing fits.

    A wide beam is an exhaustive search.
    """
    best = GroupSelection(groups, problem.screen.attained(groups), 1)
    kept, screened = [best], 1
    while kept:
        tried: dict[object, GroupSelection] = {}
        for selection in kept:
            for grown in _grown(problem, selection.groups):
                key = tuple(frozenset(group.units) for group in grown)  # the order in which they came does not matter
                if key not in tried:
                    screened += 1
                    tried[key] = GroupSelection(grown, problem.screen.attained(grown), screened)
        kept = sorted(tried.values(), key=lambda one: -one.share)[:width]  # stable: of equal ones the first
        if kept and kept[0].share > best.share:
            best = kept[0]
    return GroupSelection(best.groups, best.attained, screened)


def fast(problem: Problem, groups: Groups) -> GroupSelection:
    """Screens once a step, and gives the unit with the most unserved requests to the least busy group that has room for it.

    It ends when all requests are served, when nothing fits, or when each group could have got a unit without a gain.
    """
    best = latest = GroupSelection(groups, problem.screen.attained(groups), 1)
    fruitless = 0
    while latest.share < 1 and fruitless <= len(groups):
        grown = _next(problem, latest)
        if grown is None:
            break
        latest = GroupSelection(grown, problem.screen.attained(grown), latest.screened + 1)
        fruitless = 0 if latest.share > best.share else fruitless + 1
        best = max(best, latest, key=lambda one: one.share)  # of equal ones the first
    return GroupSelection(best.groups, best.attained, latest.screened)


def completed(problem: Problem, groups: Groups) -> Groups:
    """Gives each unit that no group serves to a group with room, first to one that has its backbone: there it costs nothing.

    A unit with requests is left out where it would make others late, so that fewer requests are answered.
    """
    share = problem.screen.attained(groups).share
    requested = set(problem.requested)
    for unit in problem.units:
        if any(unit.name in group.units for group in groups):
            continue
        for at in sorted(range(len(groups)), key=lambda at: (*_strangers(groups[at], unit.name), at)):
            grown = problem.room.added(groups, at, unit.name)
            if grown is None:
                continue
            attained = problem.screen.attained(grown).share if unit.name in requested else share
            if attained >= share:
                groups, share = grown, attained
                break
    return groups


def _grown(problem: Problem, groups: Groups) -> Iterator[Groups]:
    for unit in problem.units:
        for at in range(len(groups)):
            grown = problem.room.added(groups, at, unit.name)
            if grown is not None:
                yield grown


def _next(problem: Problem, latest: GroupSelection) -> Groups | None:
    unserved, busy = latest.attained.unserved, latest.attained.busy_ns
    by_need: list[int] = np.argsort(-unserved, kind="stable").tolist()
    for unit in by_need:
        if not unserved[unit]:
            return None
        name = problem.trace.names[unit]
        for at in sorted(range(len(latest.groups)), key=lambda at: (busy[at], _strangers(latest.groups[at], name), at)):
            grown = problem.room.added(latest.groups, at, name)
            if grown is not None:
                return grown
    return None


def _strangers(group: Group, unit: str) -> tuple[bool, int]:
    """Prefers, among equally busy groups, one that has the unit's backbone, and then one with few units."""
    return unit.split("/")[0] not in group.cuts, len(group.units)
