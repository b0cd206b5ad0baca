"""Chooses when texts leave: the thresholds that spare most of the layers' work within a loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import NamedTuple

import numpy as np

from hplm.arrays import Array
from hplm.tenants.exits import NEVER, Plan

PRICES = np.geomspace(0.02, 200, 120)  # of a text with another answer, in passes through all layers
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


def chosen(answered: Answered, drops: Sequence[float]) -> list[Chosen]:
    """Returns for each drop the plan that spares most and loses that many points at most.

    What it loses is measured twice: half of the texts choose, and the other half is judged. All texts choose the plan.
    """
    texts = answered.confidences.shape[1]
    order = np.random.default_rng(0).permutation(texts)
    halves = order[::2], order[1::2]
    left = np.empty((len(drops), texts), dtype=np.int64)
    for mine, others in (halves, halves[::-1]):
        judged = answered.part(others)
        for number, thresholds in enumerate(_within(answered.part(mine), drops)):
            left[number, others] = judged.left_at(thresholds)
    return [
        Chosen(
            answered.plan(thresholds),
            Estimate.of(answered.losses_of(own)),
            round(float(answered.agrees[own, np.arange(texts)].mean()), 4),
        )
        for thresholds, own in zip(_within(answered, drops), left, strict=True)
    ]


def _within(answered: Answered, drops: Sequence[float]) -> list[list[float]]:
    """Returns for each drop the thresholds that spare most, and whose loss with its standard error is not larger."""
    tried: list[tuple[float, float, list[float]]] = []  # cost, loss, thresholds
    for thresholds in by_price(answered):
        left = answered.left_at(thresholds)
        losses = answered.losses_of(left)
        likely = 100 * float(losses.mean() + losses.std() / sqrt(len(losses)))  # the best thresholds are also the luckiest ones
        tried.append((answered.cost_of(thresholds, left), likely, thresholds))
    return [min(one for one in tried if one[1] <= drop)[2] for drop in drops]


def by_price(answered: Answered) -> list[list[float]]:
    """Returns thresholds for each price of a loss, the highest price first: no text leaves at the first, which is infinite."""
    now = [NEVER] * len(answered.confidences)
    found = [list(now)]
    for price in PRICES[::-1]:
        for _ in range(ROUNDS):
            before = list(now)
            _improve(now, answered, float(price))
            if now == before:
                break
        found.append(list(now))
    return found


def _improve(thresholds: list[float], answered: Answered, price: float) -> None:
    """Sets one exit's threshold after the other to what costs least in all, from the last one to the first."""
    weights, losses = answered.weights / answered.weights.sum(), price * answered.losses / len(answered.weights)
    stays = weights * answered.costs[-1] + losses[-1]  # what each text costs if it goes on
    for number in reversed(range(len(thresholds))):
        reaches = answered.left_at([*thresholds[:number], *[NEVER] * (len(thresholds) - number)]) == len(thresholds)
        sure, leaves, looks = (
            answered.confidences[number],
            weights * answered.costs[number] + losses[number],
            answered.look * weights,
        )
        thresholds[number] = _best(sure[reaches], (stays - leaves)[reaches], float(looks[reaches].sum()))
        if thresholds[number] < NEVER:
            stays = np.where(sure >= thresholds[number], leaves, stays) + looks


def _best(sure: Array, gains: Array, looks: float) -> float:
    """Returns the threshold that gains most, or NEVER if it is not worth the looks. `gains`: of texts that leave."""
    if not len(sure):
        return NEVER
    order = np.argsort(-sure, kind="stable")
    sure = sure[order]
    may_end = np.append(sure[1:] < sure[:-1], True)  # texts that are equally sure leave together
    total = np.where(may_end, np.cumsum(gains[order]), -np.inf)
    last = int(total.argmax())
    return float(sure[last : last + 2].mean()) if total[last] > looks else NEVER
