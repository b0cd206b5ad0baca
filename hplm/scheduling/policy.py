"""A policy chooses the next batch: `select(columns, start_ns, capacity, cost)`, columns in, indexes out."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from hplm.errors import InvalidInput
from hplm.scheduling.columns import Columns
from hplm.scheduling.cost import Cost
from hplm.scheduling.filling import Room, first_come
from hplm.scheduling.waiting import Capacity


class Policy(Protocol):
    def select(self, columns: Columns, start_ns: int, capacity: Capacity, cost: Cost) -> np.ndarray:
        """The indexes of the next batch, which will start to compute at `start_ns`.

        `columns` are in order of arrival, hold nothing expired, and are not to be changed or kept. Never empty while something
        waits that can be done in time, never more than `capacity` (but for a single text that is larger), nothing twice.
        """
        ...


class FirstComeFirstServed:
    """In order of arrival within a priority; stops at the first text that does not fit, so that nobody is overtaken."""

    def select(self, columns: Columns, start_ns: int, capacity: Capacity, cost: Cost) -> np.ndarray:
        room = Room(columns, capacity)
        room.prefix(first_come(columns))
        return room.taken


POLICIES = {"fcfs": FirstComeFirstServed}


def policy(name: str) -> Policy:
    if name not in POLICIES:
        raise InvalidInput(f"policy {name!r} is not known: choose one of {', '.join(POLICIES)}")
    return POLICIES[name]()
