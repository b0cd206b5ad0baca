"""The interface of policies, which choose the next batch, and their names and options."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Protocol

from hplm.arrays import Array
from hplm.errors import InvalidInput
from hplm.scheduling.columns import Columns
from hplm.scheduling.cost import Cost
from hplm.scheduling.selection import Selection
from hplm.scheduling.waiting import Capacity

GROUP = "hplm.policies"  # entry-point group: other packages register policies here
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
    name, _, options = given.partition(":")
    point = _known().get(name)
    if point is None:
        raise InvalidInput(f"unknown policy {name!r}: choose one of {', '.join(_known())}")
    try:
        made = point.load()
    except (ImportError, AttributeError) as error:
        raise InvalidInput(f"policy {name!r} cannot be loaded from {point.value!r}: {error}") from error
    try:
        return made(**_options(options))
    except TypeError as error:
        raise InvalidInput(f"policy {given!r}: {error}") from error


def _known() -> dict[str, EntryPoint]:
    """Returns all policies by name. Ours cannot be replaced, so that their names mean the same everywhere."""
    ours = {name: EntryPoint(name, value, GROUP) for name, value in OURS.items()}
    return {point.name: point for point in entry_points(group=GROUP)} | ours


def _options(given: str) -> dict[str, int | float | str]:
    options: dict[str, int | float | str] = {}
    for part in filter(None, given.split(",")):
        name, equals, value = part.partition("=")
        if not equals:
            raise InvalidInput(f"policy option {part!r} has no value: write name=value, and separate options by commas")
        options[name.strip()] = _value(value.strip())
    return options


def _value(given: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(given)
        except ValueError:
            continue
    return given


def positive(**options: object) -> None:
    """Raises if one of a policy's options is not a positive number."""
    for name, value in options.items():
        if not isinstance(value, int | float) or not value > 0:
            raise InvalidInput(f"policy option {name}={value} is not above 0: give a number above 0")


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
