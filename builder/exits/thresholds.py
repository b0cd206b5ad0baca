"""Chooses when texts leave: the thresholds that spare most of the layers' work within a loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import NamedTuple

import numpy as np

from hplm.arrays import Array
from hplm.tenants.exits import NEVER, Plan

CANDIDATES = 40  # thresholds that are tried for an exit
PRICES = np.geomspace(0.02, 200, 40)  # of a text with another answer, in passes through all layers
ROUNDS = 4  # over the exits, for each price
CERTAINTY = 1.96  # standard errors of an interval that holds the truth in 95 of 100 cases


class Estimate(NamedTuple):
    """A mean over texts, in points, and how far off it may be in 95 of 100 cases."""

    points: float
    off: float

    @classmethod
    def of(cls, losses: Array) -> Estimate:
        spread = float(losses.std(ddof=1)) if len(losses) > 1 else 0.0
        return cls(round(100 * float(losses.mean()), 2), round(100 * CERTAINTY * spread / sqrt(len(losses)), 2))


@dataclass(frozen=True)
class Answered:
    """What the exits have answered to texts, beside the full stack. The last row of each array is the full stack's own."""

    confidences: Array  # exits x texts
    agrees: Array  # exits + 1 x texts: the answer is the full stack's
    losses: Array  # exits + 1 x texts: how much worse the answer is expected to be than the full stack's, 0 to 1
    costs: Array  # exits + 1: the share of the layers' work that a text has taken when it leaves there
    look: float  # the share that it takes to look at an exit
    weights: Array  # texts: the share of each in all tokens

    def part(self, texts: Array) -> Answered:
        own = self.confidences[:, texts], self.agrees[:, texts], self.losses[:, texts]
        return Answered(*own, self.costs, self.look, self.weights[texts])

    def left_at(self, thresholds: Sequence[float]) -> Array:
        """Returns the exit at which each text leaves; their number, if at none."""
        sure = self.confidences >= np.array(thresholds)[:, None]
        return np.where(sure.any(axis=0), sure.argmax(axis=0), len(self.confidences))

    def cost_of(self, thresholds: Sequence[float], left: Array) -> float:
        """Returns the share of the layers' work that is left. Long texts take more of it."""
        looks = np.cumsum([0, *(threshold < NEVER for threshold in thresholds)])
        own = self.costs[left] + self.look * looks[np.minimum(left + 1, len(thresholds))]
        return float(own @ self.weights / self.weights.sum())

    def losses_of(self, left: Array) -> Array:
        return self.losses[left, np.arange(len(left))]

    def plan(self, thresholds: Sequence[float]) -> Plan:
        """Returns the plan of thresholds as these texts see it."""
        left = self.left_at(thresholds)
        exits = range(len(thresholds))
        agrees = self.agrees[left, np.arange(len(left))]
        return Plan(
            thresholds=tuple(round(float(one), 6) for one in thresholds),
            leaves=tuple(round(float((left == number).mean()), 4) for number in exits),
            agrees=tuple(round(float(agrees[left == number].mean()), 4) if (left == number).any() else 1.0 for number in exits),
            cost=round(min(1.0, self.cost_of(thresholds, left)), 4),
        )


@dataclass(frozen=True)
class Chosen:
    """A plan, with what it loses and spares on texts that have not chosen it."""

    plan: Plan
    loss: Estimate  # expected, by the full stack's calibrated probabilities
    agrees: float  # the share of all texts with the full stack's answer


def chosen(answered: Answered, most: float) -> Chosen:
    """Returns the plan that spares most within a loss of `most` points.

    What it loses is measured twice: half of the texts choose, and the other half is judged. The plan is chosen by all texts.
    """
    texts = answered.confidences.shape[1]
    order = np.random.default_rng(0).permutation(texts)
    halves = order[::2], order[1::2]
    left = np.empty(texts, dtype=np.int64)
    for mine, others in (halves, halves[::-1]):
        left[others] = answered.part(others).left_at(thresholds(answered.part(mine), most))
    agrees = answered.agrees[left, np.arange(texts)]
    return Chosen(
        answered.plan(thresholds(answered, most)), Estimate.of(answered.losses_of(left)), round(float(agrees.mean()), 4)
    )


def thresholds(answered: Answered, most: float) -> list[float]:
    """Returns the thresholds that spare most within a loss of `most` points, a standard error included.

    For each price of a loss, one exit's threshold after the other is set to what costs least in all.
    """
    exits = len(answered.confidences)
    steps = np.linspace(0, 1, CANDIDATES)
    tried = [[NEVER, *np.unique(np.quantile(own, steps)).tolist()] for own in answered.confidences]
    best, found = [NEVER] * exits, 1.0
    now = [NEVER] * exits
    for price in PRICES[::-1]:
        for _ in range(ROUNDS):
            before = list(now)
            for number in reversed(range(exits)):
                worths = [_worth(answered, [*now[:number], one, *now[number + 1 :]], price) for one in tried[number]]
                now[number] = tried[number][int(np.argmin(worths))]
            if now == before:
                break
        left = answered.left_at(now)
        cost = answered.cost_of(now, left)
        losses = answered.losses_of(left)
        likely = float(losses.mean() + losses.std() / sqrt(len(losses)))  # the best thresholds are also the luckiest ones
        if 100 * likely <= most and cost < found:
            best, found = list(now), cost
    return best


def _worth(answered: Answered, thresholds: Sequence[float], price: float) -> float:
    left = answered.left_at(thresholds)
    return answered.cost_of(thresholds, left) + price * float(answered.losses_of(left).mean())
