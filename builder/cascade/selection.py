"""Selection: which plan meets a target at the lowest latency, and the ladder of cheaper ones below it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from builder.cascade.candidates import DOUBT, Candidate
from hplm.errors import InvalidInput
from hplm.levels.plan import MOST_RUNGS

MOST_DOUBT = 10.0
CHEAPER = 0.9  # a rung costs at most this share of the one above: a smaller step would not help in a rush


@dataclass(frozen=True)
class Target:
    """The demands on a plan. One of `drop` and `accuracy` is given."""

    drop: float | None = None  # points that it may score below the tenant's own level alone
    accuracy: float | None = None  # the least score
    latency_ms: float | None = None  # the most milliseconds a text, on average, as a part of a batch
    doubt: float = DOUBT  # standard errors by which a score is trusted less: the best of many plans looks better than it is

    def __post_init__(self) -> None:
        if (self.drop is None) == (self.accuracy is None):
            raise InvalidInput("give either --drop or --accuracy: a plan needs one target for its score")
        if not 0 <= self.doubt <= MOST_DOUBT:
            raise InvalidInput(f"--doubt {self.doubt:g}: give a number from 0 to {MOST_DOUBT:g}")
        for name, value, most in (("drop", self.drop, 100), ("accuracy", self.accuracy, 1)):
            if value is not None and not 0 <= value <= most:
                raise InvalidInput(f"--{name} {value:g}: give a number from 0 to {most}")
        if self.latency_ms is not None and not self.latency_ms > 0:
            raise InvalidInput(f"--latency-ms {self.latency_ms:g}: give a number above 0")

    def least(self, own: float) -> float:
        """Returns the least score. `own`: that of the tenant's own level."""
        return self.accuracy if self.accuracy is not None else own - (self.drop or 0) / 100


def front_of(candidates: Iterable[Candidate], own: int) -> list[Candidate]:
    """Returns the plans that no other one beats in both trusted score and mean seconds, the dearest first.

    The tenant's own level alone, number `own`, is always among them: what seems to beat it may owe that to chance.
    """
    front: list[Candidate] = []
    best = -math.inf
    for one in sorted(candidates, key=lambda one: (one.mean, -one.trusted, len(one.plan.steps))):
        if one.trusted > best or [step.level for step in one.plan.steps] == [own]:
            front.append(one)
            best = max(best, one.trusted)
    return front[::-1]


def best_of_each(candidates: Iterable[Candidate], own: int) -> list[Candidate]:
    """Returns the plans that no other plan of the same levels beats. The front of any choice of levels is among them."""
    by_levels: dict[tuple[int, ...], list[Candidate]] = {}
    for one in candidates:
        by_levels.setdefault(tuple(step.level for step in one.plan.steps), []).append(one)
    return [one for plans in by_levels.values() for one in front_of(plans, own)]


def select(front: Sequence[Candidate], target: Target, own: float) -> list[Candidate]:
    """Returns a ladder: the fastest plan that meets the target, then cheaper ones.

    `front`: the dearest first. `own`: the score of the tenant's own level.
    """
    return ladder_below(cheapest(front, target, own), front)


def ladder_below(chosen: Candidate, *fronts: Sequence[Candidate]) -> list[Candidate]:
    """Returns a plan and the cheaper ones of the first front, then those of the next front that are cheaper still."""
    ladder = [chosen]
    for one in chain(*fronts):
        if one.mean <= CHEAPER * ladder[-1].mean:
            ladder.append(one)
    return ladder[:MOST_RUNGS]


def cheapest(front: Sequence[Candidate], target: Target, own: float) -> Candidate:
    """Returns the fastest plan that meets the target, or raises. Arguments as of `select`."""
    least = target.least(own)
    in_time = [one for one in front if target.latency_ms is None or one.mean * 1000 <= target.latency_ms]
    meeting = [one for one in in_time if one.score - target.doubt * one.error >= least]
    if not meeting:
        wanted = f"a score of {least:.4f}" + (f" within {target.latency_ms:g} ms" if target.latency_ms is not None else "")
        best = max(in_time, key=lambda one: one.score) if in_time else front[-1]
        what = "the best one in time" if in_time else "the fastest one"
        raise InvalidInput(
            f"no plan reaches {wanted} with --doubt {target.doubt:g}: {what}, {described(best)}, reaches {best.score:.4f} "
            f"+- {best.error:.4f} in {best.mean * 1000:.3g} ms"
        )
    return meeting[-1]


def reported(candidate: Candidate, names: Sequence[str]) -> dict[str, Any]:
    """Returns what a command shows of a plan."""
    return {
        "plan": described(candidate, names),
        "score": round(candidate.score, 4),
        "error": round(candidate.error, 4),
        "mean_ms": round(1000 * candidate.mean, 4),
        "p75_ms": round(1000 * candidate.tail, 4),
        "cost": round(candidate.plan.cost, 4),
        "reached": [round(share, 4) for share in candidate.reached],
        "pruned": round(candidate.pruned, 4),
    }


def described(candidate: Candidate, names: Sequence[str] = ()) -> str:
    """Returns the levels of a plan, by name or by number from 1, with its numbers."""
    levels = [names[step.level] if names else str(step.level + 1) for step in candidate.plan.steps]
    first = candidate.plan.steps[0]
    if len(levels) == 1:
        return f"level {levels[0]} alone"
    numbers = f"c {first.cutoff:g}, k {first.slope:g}" + (f", alpha {first.alpha:g}" if first.alpha else "")
    return f"levels {' -> '.join(levels)} ({numbers})"
