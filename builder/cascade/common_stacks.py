"""Chooses the stacks that the plans of all tenants share: each further stack divides a batch into smaller sheets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any

from builder.cascade.candidates import Candidate
from builder.cascade.levels import OWN
from builder.cascade.profile import Profile
from builder.cascade.selection import Target, cheapest
from hplm.errors import InvalidInput

LONGER = 0.03  # the share of the least time by which a choice with fewer stacks may take longer


MOST_STACKS = 8  # all sets of which are tried; of more, those of at most FEW stacks, and the set of all of them
FEW = 3


@dataclass(frozen=True)
class Choice:
    """A plan for each tenant, and what a batch takes that has as many texts of each of them."""

    plans: Mapping[str, Candidate]  # by tenant
    stacks: tuple[str, ...]  # that the plans need besides the full one
    seconds: float  # of a whole batch
    work: float  # tokens times layers, of the full stack's


@dataclass(frozen=True)
class Tenants:
    """The profiles of tenants that are served together."""

    profiles: Mapping[str, Profile]

    @cached_property
    def batch(self) -> int:
        """The tokens of a whole batch, on average over the tenants."""
        return round(sum(profile.times[-1].batch for profile in self.profiles.values()) / len(self.profiles))

    @cached_property
    def stacks(self) -> list[str]:
        """The stacks on which any tenant has a level, the full one not included."""
        return list(dict.fromkeys(name for profile in self.profiles.values() for name in profile.names if name != OWN))

    def choices(self, target: Target) -> list[Choice]:
        """Returns the best choice for each tried set of stacks, the fewest stacks first. Each tenant must reach the target."""
        found: dict[tuple[str, ...], Choice] = {}
        count = len(self.stacks)
        for size in range(count + 1) if count <= MOST_STACKS else (*range(FEW + 1), count):
            for stacks in combinations(self.stacks, size):
                if (plans := self._plans(stacks, target)) is not None:
                    choice = self.choice(plans)
                    found.setdefault(choice.stacks, choice)
        return sorted(found.values(), key=lambda one: len(one.stacks))

    def _plans(self, stacks: Sequence[str], target: Target) -> dict[str, Candidate] | None:
        """Returns the cheapest plan of each tenant that needs only these stacks; None if one of them has none."""
        try:
            return {id: cheapest(own.front_within(stacks), target, own.own) for id, own in self.profiles.items()}
        except InvalidInput:
            return None

    def choice(self, plans: Mapping[str, Candidate]) -> Choice:
        used = {name for id, plan in plans.items() for name, _ in self._steps(id, plan)} - {OWN}
        stacks = tuple(name for name in self.stacks if name in used)
        work = sum(self._part(id) * plan.plan.cost for id, plan in plans.items())
        return Choice(plans, stacks, self.seconds(plans, self.batch), work)

    def seconds(self, plans: Mapping[str, Candidate], batch: int) -> float:
        """Returns how long a batch of so many tokens takes. Texts of all tenants share the sheets of a stack."""
        sheets: dict[str, float] = {}
        for id, plan in plans.items():
            for name, share in self._steps(id, plan):
                sheets[name] = sheets.get(name, 0.0) + batch * self._part(id) * share
        total = 0.0
        for id, plan in plans.items():
            times = self.profiles[id].times
            for (name, share), step in zip(self._steps(id, plan), plan.plan.steps, strict=True):
                total += batch * self._part(id) * share * times[step.level].of_token(sheets[name], step.alpha > 0)
        return total

    def alone(self) -> dict[str, Candidate]:
        """Returns the own level alone of each tenant."""
        return {id: profile.own_alone for id, profile in self.profiles.items()}

    def _steps(self, id: str, plan: Candidate) -> Iterator[tuple[str, float]]:
        """Yields the stack of each step, and the share of the tenant's tokens that it reads."""
        names = self.profiles[id].names
        return ((names[step.level], share) for step, share in zip(plan.plan.steps, plan.shares, strict=True))

    def _part(self, id: str) -> float:
        """The tenant's share of a batch's tokens, if each tenant has as many texts in it."""
        return self.profiles[id].times[-1].text / self._tokens

    @cached_property
    def _tokens(self) -> int:
        """The tokens of a mean text of each tenant."""
        return sum(profile.times[-1].text for profile in self.profiles.values())


def best(choices: Sequence[Choice]) -> Choice:
    """Returns the fastest choice, or one with fewer stacks that takes little longer."""
    fastest = min(one.seconds for one in choices)
    good = [one for one in choices if one.seconds <= fastest * (1 + LONGER)]
    return min(good, key=lambda one: (len(one.stacks), one.seconds))


def described(choice: Choice, is_chosen: bool) -> dict[str, Any]:
    return {
        "stacks": list(choice.stacks),
        "batch_ms": round(1000 * choice.seconds, 3),
        "work": round(choice.work, 4),
        "chosen": is_chosen,
    }
