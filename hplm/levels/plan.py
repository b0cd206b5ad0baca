"""Plans: which levels of a tenant may answer a text, and when an answer is enough (Tabi).

A ladder is a tenant's plans, the dearest first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Step:
    """A level at which a text is computed, and the decision whether it goes on to the next step."""

    level: int  # 0 is the shallowest level of the tenant
    cutoff: float = 0.0  # c of Eq. 4: at most this sure, a text goes on
    slope: float = 0.0  # k of Eq. 4
    alpha: float = 0.0  # Eq. 5: how many words the next step does not read; 0: it reads all
    weight: float = 1.0  # w of Eq. 6: of this answer; the answer that the steps before have made has the rest


@dataclass(frozen=True)
class Plan:
    steps: tuple[Step, ...]

    @classmethod
    def read(cls, stored: Mapping[str, Any]) -> Plan:
        """Reads what `asdict` has written. Raises TypeError if a field is missing or has another type or value."""
        plan = cls(tuple(Step(**step) for step in stored["steps"]))
        for step in plan.steps:
            numbers = step.cutoff, step.slope, step.alpha, step.weight
            if type(step.level) is not int or not all(type(one) in (int, float) and math.isfinite(one) for one in numbers):
                raise TypeError("a plan holds something other than finite numbers")
            if min(step.level, *numbers) < 0 or max(step.cutoff, step.weight) > 1:
                raise TypeError("a plan holds a number outside its range")
        levels = [step.level for step in plan.steps]
        if not levels or levels != sorted(set(levels)):
            raise TypeError("the steps of a plan do not ascend")
        return plan

    def suits(self, levels: int) -> bool:
        """Whether a tenant with so many levels has all that the plan names."""
        return self.steps[-1].level < levels
