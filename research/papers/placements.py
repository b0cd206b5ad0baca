"""AlpaServe's baselines: simpler ways to place units."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle

import numpy as np

from hplm.arrays import Array
from hplm.placement.attained import Attained
from hplm.placement.partition import Parallel, groups_of
from hplm.placement.problem import Groups, Problem
from hplm.placement.search import Found
from hplm.placement.selection import fast

Baseline = Callable[[Problem], Found]
ONE = Parallel(1, 1)


def replication(problem: Problem) -> Found:
    """Places as AlpaServe does without model parallelism (Selective Replication): a device a group."""
    return _selected(problem, ONE, "replication")


def clockwork(window_s: float) -> Baseline:
    """Clockwork++: replication anew for each window, with free swaps.

    It is an upper bound of Clockwork: it knows each window's requests, and no queue is left over from the last one. Its groups
    are those of the last window.
    """

    def place(problem: Problem) -> Found:
        ends: list[Array] = []
        busy = np.zeros(problem.cluster.devices)
        groups: Groups = ()
        screened = 0
        for window in problem.trace.windows(window_s):
            own = replication(problem.on(window))
            groups, screened = own.groups, screened + own.screened
            ends.append(own.attained.end_ns)
            busy[: len(own.attained.busy_ns)] += own.attained.busy_ns
        attained = Attained(problem.trace, np.concatenate(ends), busy)
        return Found(groups, attained, f"clockwork, windows of {window_s:g} s", screened)

    return place


def round_robin(stages: int) -> Baseline:
    """Gives units in turn to pipelines of so many stages, as long as they fit."""

    def place(problem: Problem) -> Found:
        groups = groups_of(problem, Parallel(stages, 1))
        at, grew = 0, True
        while grew:
            grew = False
            for unit in problem.units:
                for step in range(len(groups)):
                    grown = problem.room.added(groups, (at + step) % len(groups), unit.name)
                    if grown is not None:
                        groups, at, grew = grown, at + step + 1, True
                        break
        return _found(problem, groups, f"round robin, {stages} stages", 1)

    return place


def greedy(stages: int) -> Baseline:
    """Algorithm 1 on pipelines of so many stages, without a search for groups."""
    return lambda problem: _selected(problem, Parallel(stages, 1), "greedy")


def manual(stages: int, intra: int) -> Baseline:
    """Gives each unit in turn to a group of so many stages and devices a stage. No unit has a second group."""

    def place(problem: Problem) -> Found:
        groups = groups_of(problem, Parallel(stages, intra))
        for unit, at in zip(problem.units, cycle(range(len(groups))), strict=False):
            grown = problem.room.added(groups, at, unit.name)
            groups = groups if grown is None else grown
        return _found(problem, groups, f"manual, {stages}x{intra}", 1)

    return place


def _selected(problem: Problem, parallel: Parallel, name: str) -> Found:
    selection = fast(problem, groups_of(problem, parallel))
    return _found(problem, selection.groups, f"{name}, {parallel.stages}x{parallel.intra}", selection.screened)


def _found(problem: Problem, groups: Groups, how: str, screened: int) -> Found:
    """Leaves out groups without units."""
    groups = tuple(group for group in groups if group.units)
    return Found(groups, problem.screen.attained(groups), how, screened)
