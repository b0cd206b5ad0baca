"""AlpaServe's baselines: simpler ways to place units."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from hplm.arrays import Array
from hplm.placement.attained import Attained
from hplm.placement.partition import Parallel, groups_of
from hplm.placement.problem import Groups, Problem
from hplm.placement.profile import Cut
from hplm.placement.selection import GroupSelection, fast
from hplm.placement.workload import span_ns

Baseline = Callable[[Problem], GroupSelection]


def greedy(stages: int) -> Baseline:
    """Algorithm 1 on pipelines of so many stages, without a search for groups."""
    return lambda problem: screened(problem, fast(problem, groups_of(problem, Parallel(stages, 1))).groups)


replication = greedy(1)  # Selective Replication: AlpaServe without model parallelism, a device a group


def clockwork(window_s: float) -> Baseline:
    """Clockwork++: replication anew for each window, with free swaps.

    It is an upper bound of Clockwork: it knows each window's requests, and no queue is left over from the last one. Its groups
    are those of the last window.
    """

    def place(problem: Problem) -> GroupSelection:
        ends: list[Array] = []
        busy = np.zeros(problem.cluster.devices)
        groups: Groups = ()
        number = (problem.trace.arrival_ns - problem.trace.arrival_ns[0]) // span_ns(window_s)
        for window in np.unique(number):
            own = replication(problem.on(problem.trace.only(number == window)))
            groups = own.groups
            ends.append(own.attained.end_ns)
            busy[: len(own.attained.busy_ns)] += own.attained.busy_ns
        return GroupSelection(groups, Attained(problem.trace, np.concatenate(ends), busy), 1)

    return place


def round_robin(stages: int) -> Baseline:
    """Gives units in turn to pipelines of so many stages, as long as they fit."""

    def place(problem: Problem) -> GroupSelection:
        groups, at, waiting = groups_of(problem, Parallel(stages, 1)), 0, deque(problem.units)
        while waiting:
            unit = waiting.popleft()
            for step in range(len(groups)):
                if grown := problem.room.added(groups, (at + step) % len(groups), unit.name):
                    groups, at = grown, at + step + 1
                    waiting.append(unit)
                    break
        return screened(problem, groups)

    return place


def manual(stages: int, intra: int) -> Baseline:
    """Gives each unit in turn to a group of so many stages and devices a stage. No unit has a second group."""

    def place(problem: Problem) -> GroupSelection:
        groups = groups_of(problem, Parallel(stages, intra))
        for number, unit in enumerate(problem.units):
            groups = problem.room.added(groups, number % len(groups), unit.name) or groups
        return screened(problem, groups)

    return place


def equal_cut(layers: int, stages: int) -> Cut:
    """Returns stages of equal numbers of layers, as far as these divide."""
    ends = [layers * (stage + 1) // stages for stage in range(stages)]
    return tuple(zip([0, *ends], [end - 1 for end in ends], strict=False))


def screened(problem: Problem, groups: Groups) -> GroupSelection:
    """Returns a placement without the groups that have no units."""
    groups = tuple(group for group in groups if group.units)
    return GroupSelection(groups, problem.screen.attained(groups), 1)
