"""Baselines: simpler ways to place units, each by a name and options, such as `round-robin:4` or `manual:8,2`.

replication             AlpaServe's placement without model parallelism (Selective Replication): a device a group
clockwork:SECONDS       Clockwork++: replication anew for each window, from the window's own requests, with free swaps
round-robin:STAGES      units in turn to pipelines of so many stages, as long as they fit; without a number at most 4
greedy:STAGES           Algorithm 1 on pipelines of so many stages, without a search for groups
manual:STAGES,INTRA     a group of so many stages and devices a stage for each unit in turn; no unit has a second group
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import cycle

import numpy as np

from hplm.arrays import Array
from hplm.errors import InvalidInput
from hplm.placement.attained import Attained
from hplm.placement.partition import Parallel, groups_of
from hplm.placement.problem import Groups, Problem
from hplm.placement.search import Found
from hplm.placement.selection import Selector, fast

Baseline = Callable[[Problem, Selector, list[float]], Found]
WINDOW_S = 60.0
STAGES = 4  # AlpaServe's ablation


def baseline(given: str, problem: Problem, select: Selector = fast) -> Found:
    """Returns what a baseline attains. The groups of `clockwork` are those of its last window."""
    name, _, options = given.partition(":")
    if name not in BASELINES:
        raise InvalidInput(f"--baseline {given!r}: choose from {', '.join(BASELINES)}")
    try:
        numbers = [float(part) for part in options.split(",") if part]
        if not all(0 < number < math.inf for number in numbers):
            raise ValueError("numbers are above 0, and finite")
        if len(numbers) > MOST_OPTIONS.get(name, 1):
            raise ValueError(f"{len(numbers)} numbers are too many")
        problem.expect_fitting()
        return BASELINES[name](problem, select, numbers)
    except ValueError as error:
        raise InvalidInput(f"--baseline {given!r}: {error}; give numbers, such as round-robin:4 or manual:8,2") from None


def replication(problem: Problem, select: Selector, numbers: list[float]) -> Found:
    return _selected(problem, select, Parallel(1, 1), "replication")


def clockwork(problem: Problem, select: Selector, numbers: list[float]) -> Found:
    """An upper bound of Clockwork: it knows each window's requests, and no queue is left over from the last one."""
    window_s = numbers[0] if numbers else WINDOW_S
    ends: list[Array] = []
    busy = np.zeros(problem.cluster.devices)
    groups: Groups = ()
    screened = 0
    for window in problem.trace.windows(window_s):
        own = _selected(problem.on(window), select, Parallel(1, 1), "")
        groups, screened = own.groups, screened + own.screened
        ends.append(own.attained.end_ns)
        busy[: len(own.attained.busy_ns)] += own.attained.busy_ns
    attained = Attained(problem.trace, np.concatenate(ends), busy)
    return Found(groups, attained, f"clockwork, windows of {window_s:g} s", screened)


def round_robin(problem: Problem, select: Selector, numbers: list[float]) -> Found:
    parallel = _pipelines(problem, numbers)
    groups = groups_of(problem, parallel)
    at, grew = 0, True
    while grew:
        grew = False
        for unit in problem.units:
            for step in range(len(groups)):
                grown = problem.room.added(groups, (at + step) % len(groups), unit.name)
                if grown is not None:
                    groups, at, grew = grown, at + step + 1, True
                    break
    return _found(problem, groups, f"round robin, {parallel.stages} stages", 1)


def greedy(problem: Problem, select: Selector, numbers: list[float]) -> Found:
    return _selected(problem, select, _pipelines(problem, numbers), "greedy")


def manual(problem: Problem, select: Selector, numbers: list[float]) -> Found:
    if len(numbers) != 2:
        raise ValueError(f"{len(numbers)} numbers instead of STAGES,INTRA")
    parallel = _parallel(problem, *numbers)
    groups = groups_of(problem, parallel)
    for unit, at in zip(problem.units, cycle(range(len(groups))), strict=False):
        grown = problem.room.added(groups, at, unit.name)
        groups = groups if grown is None else grown
    return _found(problem, groups, f"manual, {parallel.stages}x{parallel.intra}", 1)


def _selected(problem: Problem, select: Selector, parallel: Parallel, name: str) -> Found:
    selection = select(problem, groups_of(problem, parallel))
    return _found(problem, selection.groups, f"{name}, {parallel.stages}x{parallel.intra}", selection.screened)


def _found(problem: Problem, groups: Groups, how: str, screened: int) -> Found:
    """Leaves out groups without units."""
    groups = tuple(group for group in groups if group.units)
    return Found(groups, problem.screen.attained(groups), how, screened)


def _pipelines(problem: Problem, numbers: list[float]) -> Parallel:
    """Without a number, pipelines are as long as the largest machine allows, at most STAGES."""
    return _parallel(problem, numbers[0] if numbers else min(STAGES, 2 ** (_largest(problem).bit_length() - 1)))


def _parallel(problem: Problem, stages: float, intra: float = 1) -> Parallel:
    if stages % 1 or intra % 1:
        raise ValueError(f"{stages:g} stages of {intra:g} devices are not whole numbers")
    parallel = Parallel(int(stages), int(intra))
    if parallel.devices > _largest(problem):
        raise ValueError(f"a group has {parallel.devices} devices, but the largest machine has {_largest(problem)}")
    return parallel


def _largest(problem: Problem) -> int:
    return max(len(machine.devices) for machine in problem.cluster.machines)


MOST_OPTIONS = {"replication": 0, "manual": 2}  # numbers after a name; of the others 1
BASELINES: dict[str, Baseline] = {
    "replication": replication,
    "clockwork": clockwork,
    "round-robin": round_robin,
    "greedy": greedy,
    "manual": manual,
}
