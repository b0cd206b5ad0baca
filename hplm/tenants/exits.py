"""The exits of a tenant: heads between the upper layers, and the plans that say how sure an answer must be to leave there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from hplm.adapters.record import Record
from hplm.levels.calibration import INTERVAL, TEMPERATURE, Calibration

MOST_PLANS = 16  # each request looks at all of them
NEVER = 2.0  # the threshold of a closed exit: no answer is so sure


@dataclass(frozen=True)
class Plan:
    """When texts leave. Of each exit: how sure an answer must be, and what was found where the threshold was chosen."""

    thresholds: tuple[float, ...]  # a text leaves whose answer is at least so sure; NEVER: the exit is closed
    leaves: tuple[float, ...]  # the share of all texts that leaves there
    agrees: tuple[float, ...]  # the share of these that have the full stack's answer
    cost: float  # the share of the layers' work that is left

    @classmethod
    def read(cls, stored: Mapping[str, Any]) -> Plan:
        thresholds, leaves, agrees = (tuple(stored[name]) for name in ("thresholds", "leaves", "agrees"))
        return cls(thresholds, leaves, agrees, stored["cost"])

    def check(self, exits: int) -> None:
        """Raises TypeError if it has other numbers than a plan for so many exits."""
        for numbers, most in ((self.thresholds, NEVER), (self.leaves, 1.0), (self.agrees, 1.0)):
            if len(numbers) != exits or not all(_is_number(number) and 0 <= number <= most for number in numbers):
                raise TypeError(f"a plan for {exits} exits has the numbers {numbers}")
        if not _is_number(self.cost) or not 0 < self.cost <= 1:
            raise TypeError(f"a plan has the cost {self.cost!r}")

    def is_open(self, exit: int) -> bool:
        return exit < len(self.thresholds) and self.thresholds[exit] < NEVER


@dataclass(frozen=True)
class Exits:
    """Exit k is before layer k of the upper ones. Before the first one, only the tables' vectors are there."""

    record: Record | None  # its layer k has the head of exit k; None where the knowledge is not yet in a bank
    calibrations: tuple[Calibration, ...]  # of each exit's logits
    plans: tuple[Plan, ...]  # the dearest first; cheaper ones are for load

    @classmethod
    def read(cls, stored: Mapping[str, Any]) -> Exits:
        """Reads what `asdict` has written. Raises TypeError, KeyError or ValueError if something is missing or wrong."""
        record = stored["record"]
        exits = cls(
            record=Record(**record) if record is not None else None,
            calibrations=tuple(Calibration.read(one) for one in stored["calibrations"]),
            plans=tuple(Plan.read(one) for one in stored["plans"]),
        )
        exits.check()
        return exits

    def suits(self, labels: int, is_number: bool) -> bool:
        """Whether they can be those of a tenant with this number of labels, or whose answer is a number.

        Others would fail a batch, with the texts of other tenants.
        """
        kind = INTERVAL if is_number else TEMPERATURE
        return all(calibration.kind == kind and calibration.suits(labels) for calibration in self.calibrations)

    def described(self) -> dict[str, Any]:
        """Returns what `read` takes."""
        return asdict(self)

    def check(self) -> None:
        """Raises TypeError if its parts do not belong together."""
        if not 1 <= len(self.plans) <= MOST_PLANS:
            raise TypeError(f"exits have {len(self.plans)} plans, not 1 to {MOST_PLANS}")
        for plan in self.plans:
            plan.check(len(self.calibrations))
        if not all(before.cost >= after.cost for before, after in pairwise(self.plans)):
            raise TypeError("the plans of exits do not get cheaper")


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # pyright: ignore[reportArgumentType]
