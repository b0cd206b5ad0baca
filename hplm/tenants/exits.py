"""The exits of a tenant: heads between the upper layers, and the plans that say where a text may leave, and when."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from hplm.adapters.record import Record
from hplm.levels.calibration import INTERVAL, TEMPERATURE, Calibration

MOST_PLANS = 16  # each request looks at all of them


@dataclass(frozen=True)
class Plan:
    """When texts leave, and what was found where that was chosen."""

    exit: int | None  # where they may leave; None: nowhere
    threshold: float  # how sure an answer must be
    leaves: float  # the share of all texts that leaves
    agrees: float  # the share of these that have the full stack's answer
    cost: float  # the share of the layers' work that is left

    def check(self, exits: int) -> None:
        """Raises TypeError if it is not a plan for so many exits."""
        shares = self.threshold, self.leaves, self.agrees, self.cost
        is_exit = self.exit is None or (type(self.exit) is int and 0 <= self.exit < exits)
        if not is_exit or not all(_is_number(share) and 0 <= share <= 1 for share in shares) or not self.cost:
            raise TypeError(f"{self} is not a plan for {exits} exits")


@dataclass(frozen=True)
class Exits:
    """Exit k is before layer k of the upper ones. Before the first one, only the tables' vectors are there."""

    record: Record | None  # its layer k has the head of exit k; None where the weights are not yet in a record file
    calibrations: tuple[Calibration, ...]  # of each exit's logits
    plans: tuple[Plan, ...]  # the dearest first; cheaper ones are for load

    @classmethod
    def read(cls, stored: Mapping[str, Any]) -> Exits:
        """Reads what `asdict` has written. Raises TypeError, KeyError or ValueError if something is missing or wrong."""
        record = stored["record"]
        exits = cls(
            record=Record(**record) if record is not None else None,
            calibrations=tuple(Calibration.read(one) for one in stored["calibrations"]),
            plans=tuple(Plan(**one) for one in stored["plans"]),
        )
        exits.check()
        return exits

    def suits(self, labels: int, is_number: bool) -> bool:
        """Whether they can be those of a tenant with this number of labels, or whose answer is a number.

        Others would fail a batch, with the texts of other tenants.
        """
        kind = INTERVAL if is_number else TEMPERATURE
        return all(calibration.kind == kind and calibration.suits(labels) for calibration in self.calibrations)

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
