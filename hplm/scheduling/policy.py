"""A policy chooses the next batch: `select(columns, start_ns, capacity, cost)`, columns in, indexes out."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Protocol

import numpy as np

from hplm.errors import InvalidInput
from hplm.scheduling.columns import Columns
from hplm.scheduling.cost import Cost
from hplm.scheduling.waiting import Capacity

GROUP = "hplm.policies"  # of Python entry points: what other packages register here is a policy like ours
OURS = {
    "timely": "hplm.scheduling.timely:Timely",
    "das": "hplm.scheduling.das:DeadlineAware",
    "slotted_das": "hplm.scheduling.das:SlottedDeadlineAware",
    "fcfs": "hplm.scheduling.orders:FirstComeFirstServed",
    "sjf": "hplm.scheduling.orders:ShortestJobFirst",
    "edf": "hplm.scheduling.orders:EarliestDeadlineFirst",
    "length_aware": "hplm.scheduling.orders:LengthAware",
}
DEFAULT = "timely"


class Policy(Protocol):
    def select(self, columns: Columns, start_ns: int, capacity: Capacity, cost: Cost) -> np.ndarray:
        """The indexes of the next batch, which will start to compute at `start_ns`.

        `columns` are in order of arrival, not empty, hold nothing expired, and are not to be changed or kept. Never empty while
        something waits that can be done in time, never more than `capacity` (but for a single text that is larger), nothing
        twice.
        """
        ...


def policy(given: str) -> Policy:
    """From a name and options, such as `das:eta=0.5,rows=16`."""
    name, _, options = given.partition(":")
    point = _known().get(name)
    if point is None:
        raise InvalidInput(f"policy {name!r} is not known: choose one of {', '.join(_known())}")
    try:
        made = point.load()
    except (ImportError, AttributeError) as error:
        raise InvalidInput(f"policy {name!r} cannot be loaded from {point.value!r}: {error}") from error
    try:
        return made(**_options(options))
    except TypeError as error:
        raise InvalidInput(f"policy {given!r}: {error}") from error


def _known() -> dict[str, EntryPoint]:
    """Ours cannot be replaced: a name in a configuration means the same everywhere."""
    ours = {name: EntryPoint(name, value, GROUP) for name, value in OURS.items()}
    return {point.name: point for point in entry_points(group=GROUP)} | ours


def _options(given: str) -> dict[str, int | float | str]:
    options = {}
    for part in filter(None, given.split(",")):
        name, equals, value = part.partition("=")
        if not equals:
            raise InvalidInput(f"policy option {part!r}: write name=value, options separated by commas")
        options[name.strip()] = _value(value.strip())
    return options


def _value(given: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(given)
        except ValueError:
            continue
    return given


def positive(**options: float) -> None:
    """For a policy's own check of its options."""
    for name, value in options.items():
        if not isinstance(value, int | float) or not value > 0:
            raise InvalidInput(f"policy option {name}={value}: a number above 0")
