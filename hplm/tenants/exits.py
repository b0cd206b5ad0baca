"""The exits of a tenant: heads between the upper layers, and the plans that say where a text may leave, and when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from hplm.adapters.record import Record
from hplm.calibration import TEMPERATURE, Calibration

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
        """Reads what `asdict` has written. Raises TypeError or ValueError if something is missing or wrong."""
        exits = msgspec.convert(stored, cls)
        exits.check()
        return exits

    @property
    def other_kind(self) -> str | None:
        """The kind of a calibration that only another release knows."""
        return next((one.kind for one in self.calibrations if one.kind != TEMPERATURE), None)

    def check(self) -> None:
        """Raises TypeError if its parts do not belong together."""
        for calibration in self.calibrations:
            calibration.check()
        if any(plan.exit is not None and plan.exit >= len(self.calibrations) for plan in self.plans):
            raise TypeError(f"a plan has an exit beyond the {len(self.calibrations)} that there are")
        if not all(before.cost >= after.cost for before, after in pairwise(self.plans)):
            raise TypeError("the plans of exits do not get cheaper")
