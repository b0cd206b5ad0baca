"""The interface of policies, which choose the next batch, their names and options, and the simple ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hplm.arrays import Array
from hplm.errors import InvalidInput
from hplm.registered import POLICIES, made
from hplm.scheduling.columns import Columns
from hplm.scheduling.cost import Cost
from hplm.scheduling.filling import Room, by_priority, first_come, full_batch_ns, shortest_first
from hplm.scheduling.selection import Capacity, Selection

OURS = {
    "timely": "hplm.scheduling.timely:Timely",
    "das": "hplm.scheduling.das:DeadlineAware",
    "fcfs": "hplm.scheduling.policy:FirstComeFirstServed",
    "sjf": "hplm.scheduling.policy:ShortestJobFirst",
    "edf": "hplm.scheduling.policy:EarliestDeadlineFirst",
}
DEFAULT = "timely"


class Policy(Protocol):
    def select(self, columns: Columns, start_ns: int, capacity: Capacity, cost: Cost) -> Array | Selection:
        """Returns the indexes of the next batch, which will start to compute at `start_ns`, or a selection with their places.

        `columns` are in the order in which texts joined the line, not empty, and hold no expired text. A policy must not change
        or keep them.
        It must choose something while a text waits that can be answered in time. It must not choose a text twice, or more
        than `capacity`, except for a single text that is larger.
        """
        ...


def policy(given: str) -> Policy:
    """Makes a policy from a name and options, such as `das:eta=0.5,rows=16`."""
    return made(POLICIES, given, "policy", OURS)


def between_0_and_1(**options: object) -> None:
    """Raises if one of a policy's options is not a number above 0 and below 1."""
    for name, value in options.items():
        if not isinstance(value, int | float) or not 0 < value < 1:
            raise InvalidInput(f"policy option {name}={value} is not between 0 and 1: give a number above 0 and below 1")


def whole(**options: object) -> None:
    """Raises if one of a policy's options is not a whole number of at least 0."""
    for name, value in options.items():
        if not isinstance(value, int) or value < 0:
            raise InvalidInput(f"policy option {name}={value} is not a whole number: give 0 or more")


class FirstComeFirstServed:
    """Takes texts in order of arrival. It stops at the first text that does not fit, so no text overtakes another."""

    def select(self, columns: Columns, start_ns: int, capacity: Capacity, cost: Cost) -> Array:
        room = Room(columns, capacity)
        room.prefix(first_come(columns))
        return room.taken


@dataclass
class ShortestJobFirst:
    in_time: int = 0  # 1: texts that cannot be answered in time go last

    def __post_init__(self) -> None:
        whole(in_time=self.in_time)

    def select(self, columns: Columns, start_ns: int, capacity: Capacity, cost: Cost) -> Array:
        ordered = shortest_first(columns)
        if self.in_time:
            late = columns.deadline < start_ns + full_batch_ns(columns, capacity, cost)
            ordered = ordered[np.argsort(late[ordered], kind="stable")]
        room = Room(columns, capacity)
        room.greedily(by_priority(columns, ordered))
        return room.taken


class EarliestDeadlineFirst:
    def select(self, columns: Columns, start_ns: int, capacity: Capacity, cost: Cost) -> Array:
        room = Room(columns, capacity)
        room.greedily(by_priority(columns, np.argsort(columns.deadline, kind="stable")))
        return room.taken
