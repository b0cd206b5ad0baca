"""Chooses where and when texts leave: the exit and threshold that spare most of the layers' work within a loss.

One exit a plan: on nine tenants, several at once spared no more, and each look at an exit costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import NamedTuple

import numpy as np

from hplm.arrays import Array
from hplm.tenants.exits import Plan

CERTAINTY = 1.96  # standard errors of an interval that holds the truth in 95 of 100 cases


class Leaving(NamedTuple):
    exit: int | None  # where texts may leave; None: nowhere
    threshold: float = 1.0  # how sure they must be


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

    def exits_of(self, leaving: Leaving | Plan) -> Array:
        """Returns the exit at which each text leaves; their number, if at none."""
        if leaving.exit is None:
            return np.full(len(self.weights), len(self.confidences))
        return np.where(self.confidences[leaving.exit] >= leaving.threshold, leaving.exit, len(self.confidences))

    def cost_of(self, leaving: Leaving | Plan) -> float:
        """Returns the share of the layers' work that is left. Long texts take more of it."""
        cost = float(self.costs[self.exits_of(leaving)] @ self.weights / self.weights.sum())
        return cost if leaving.exit is None else cost + self.look

    def losses_of(self, exits: Array) -> Array:
        return self.losses[exits, np.arange(len(exits))]

    def plan(self, leaving: Leaving) -> Plan:
        """Returns the plan as these texts see it."""
        exits = self.exits_of(leaving)
        leaves = exits < len(self.confidences)
        agrees = self.agrees[exits, np.arange(len(exits))][leaves]
        share, same = round(float(leaves.mean()), 4), round(float(agrees.mean()), 4) if len(agrees) else 1.0
        return Plan(*leaving, leaves=share, agrees=same, cost=round(min(1.0, self.cost_of(leaving)), 4))


@dataclass(frozen=True)
class Chosen:
    """A plan, with what it loses and spares on texts that have not chosen it."""

    plan: Plan
    loss: Estimate  # expected, by the full stack's calibrated probabilities
    agrees: float  # the share of all texts with the full stack's answer
    exits: Array  # of each text, by the plan that the other half of the texts chose


def chosen(answered: Answered, drops: Sequence[float]) -> list[Chosen]:
    """Returns for each drop the plan that spares most and loses that many points at most.

    What it loses is measured twice: half of the texts choose, and the other half is judged. All texts choose the plan.
    """
    texts = len(answered.weights)
    order = np.random.default_rng(0).permutation(texts)
    halves = order[::2], order[1::2]
    exits = np.empty((len(drops), texts), dtype=np.int64)
    for mine, others in (halves, halves[::-1]):
        judged = answered.part(others)
        for number, leaving in enumerate(within(answered.part(mine), drops)):
            exits[number, others] = judged.exits_of(leaving)
    agree = answered.agrees[exits, np.arange(texts)].mean(axis=1)
    return [
        Chosen(answered.plan(leaving), Estimate.of(answered.losses_of(own)), round(float(same), 4), own)
        for leaving, own, same in zip(within(answered, drops), exits, agree, strict=True)
    ]


def within(answered: Answered, drops: Sequence[float]) -> list[Leaving]:
    """Returns for each drop what spares most, and whose loss with its standard error is not larger."""
    best = [(0.0, Leaving(None)) for _ in drops]
    weights, texts = answered.weights / answered.weights.sum(), len(answered.weights)
    for exit, confidences in enumerate(answered.confidences):
        surest_first = np.argsort(-confidences, kind="stable")
        sure, losses = confidences[surest_first], answered.losses[exit, surest_first]
        spared = np.cumsum(weights[surest_first]) * (answered.costs[-1] - answered.costs[exit]) - answered.look
        means = np.cumsum(losses) / texts
        spreads = np.sqrt(np.maximum(0, np.cumsum(losses**2) / texts - means**2))
        likely = 100 * (means + spreads / sqrt(texts))  # the best thresholds are also the luckiest ones
        may_end = np.append(sure[1:] < sure[:-1], True)  # texts that are equally sure leave together
        for number, drop in enumerate(drops):
            able = np.where(may_end & (likely <= drop), spared, 0.0)
            last = int(able.argmax())
            if able[last] > best[number][0]:
                best[number] = float(able[last]), Leaving(exit, float(sure[last : last + 2].mean()))
    return [leaving for _, leaving in best]
