"""The exits of a tenant: heads between the upper layers, and the plans that say where a text may leave, and when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from hplm.adapters.record import Record
from hplm.levels.calibration import INTERVAL, TEMPERATURE, Calibration

MOST_PLANS = 16  # each request looks at all of them
Share = Annotated[float, Meta(ge=0, le=1)]


@dataclass(frozen=True)
class Plan:
    """When texts leave, and what was found where that was chosen."""

    exit: Annotated[int, Meta(ge=0)] | None  # where they may leave; None: nowhere
    threshold: Share  # how sure an answer must be
    leaves: Share  # the share of all texts that leaves
    agrees: Share  # the share of these that have the full stack's answer
    cost: Annotated[float, Meta(gt=0, le=1)]  # the share of the layers' work that is left


@dataclass(frozen=True)
class Exits:
    """Exit k is before layer k of the upper ones. Before the first one, only the tables' vectors are there."""

    record: Record | None  # its layer k has the head of exit k; None where the weights are not yet in a record file
    calibrations: tuple[Calibration, ...]  # of each exit's logits
    plans: Annotated[tuple[Plan, ...], Meta(min_length=1, max_length=MOST_PLANS)]  # the dearest first; cheaper: for load

    @classmethod
    def read(cls, stored: Mapping[str, Any]) -> Exits:
        """Reads what `asdict` has written. Raises TypeError, KeyError or ValueError if something is missing or wrong."""
        calibrations = tuple(Calibration.read(one) for one in stored["calibrations"])
        exits = replace(msgspec.convert(stored, cls), calibrations=calibrations)
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
        if any(plan.exit is not None and plan.exit >= len(self.calibrations) for plan in self.plans):
            raise TypeError(f"a plan has an exit beyond the {len(self.calibrations)} that there are")
        if not all(before.cost >= after.cost for before, after in pairwise(self.plans)):
            raise TypeError("the plans of exits do not get cheaper")
