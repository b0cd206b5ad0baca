"""A plan: the levels that a text passes, shallow ones first, until one of them is sure enough of its answer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

MOST_RUNGS = 16  # of a ladder: each request looks at all of them


@dataclass(frozen=True)
class Step:
    """A level, and what follows from its answer. The equations are those of Tabi (EuroSys '23)."""

    level: int  # 0: the tenant's shallowest one; its own one, on the full stack, is the last
    cutoff: float = 0.0  # c of Eq. 4: an answer with no more confidence than this goes on to the next step; -1 to 1
    slope: float = 0.0  # k of Eq. 4: the larger it is, the fewer of the surer answers go on
    alpha: float = 0.0  # of Eq. 5: the next step reads no words that got at most this share of the mean attention; 0: all
    weight: float = 1.0  # w of Eq. 6: this answer's; 1 - w is that of what the earlier steps have answered together
    reached: float = 1.0  # the share of texts that came as far when the plan was profiled


@dataclass(frozen=True)
class Plan:
    """The last step's answer is final: its `cutoff`, `slope` and `alpha` have no meaning."""

    steps: tuple[Step, ...]
    cost: float = 1.0  # passes through all layers that a token took on average when the plan was profiled, without pruned words

    @classmethod
    def read(cls, stored: Mapping[str, Any]) -> Plan:
        """Reads what `asdict` has written. Raises TypeError if a field is missing or has another type or value.

        Ladders of earlier versions have no `cost`: they cost as much as the full stack.
        """
        plan = cls(tuple(_step(own) for own in stored["steps"]), stored.get("cost", 1.0))
        plan._check()
        return plan

    def _check(self) -> None:
        if not self.steps:
            raise TypeError("a plan has no steps")
        levels = [step.level for step in self.steps]
        if levels[0] < 0 or not all(before < after for before, after in pairwise(levels)):
            raise TypeError(f"a plan's levels {levels} do not ascend from 0 or more")
        for step in self.steps:
            numbers = {"cutoff": step.cutoff, "slope": step.slope, "alpha": step.alpha}
            numbers |= {"weight": step.weight, "reached": step.reached}
            for name, number in numbers.items():
                least, most = -1.0 if name == "cutoff" else 0.0, 1.0 if name in ("cutoff", "weight", "reached") else math.inf
                if type(number) not in (int, float) or not math.isfinite(number) or not least <= number <= most:
                    raise TypeError(f"a plan has the {name} {number!r}")
        if type(self.cost) not in (int, float) or not 0 < self.cost < math.inf:
            raise TypeError(f"a plan has the cost {self.cost!r}")
        if not max(step.reached for step in self.steps) > 0:
            raise TypeError("a plan has no step that a text reaches")
        if self.steps[0].weight != 1:
            raise TypeError(f"the first step of a plan has the weight {self.steps[0].weight}, and no answer to share it with")

    def suits(self, levels: int) -> bool:
        """Whether a tenant with so many levels, its own one included, has all that the plan names."""
        return self.steps[-1].level < levels


def _step(stored: Mapping[str, Any]) -> Step:
    if set(stored) != {field.name for field in fields(Step)} or type(stored["level"]) is not int:
        raise TypeError(f"a step of a plan is {dict(stored)}")
    return Step(**stored)
