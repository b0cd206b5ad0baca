"""Chooses which students of a team are asked first, and how sure they must be to answer alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from builder.exits.thresholds import Answered, within
from hplm.arrays import Array
from hplm.levels.calibration import confidences
from hplm.tenants.students import First, Team


def asked_first(teams: Sequence[Team], logits: Sequence[Array], lengths: Array, drop: float) -> list[Team]:
    """Returns teams of which a few members are asked first, if that spares work and loses at most so many points.

    `teams`: of each number of members, the largest first, with calibrations. `logits`: what one member says of the dev texts,
    what two say together, and so on. A team that is not cheaper than a larger one is left out.
    """
    found: list[Team] = []
    calibrations, texts = [team.calibration for team in reversed(teams)], np.arange(len(lengths))
    labels = [own.argmax(axis=1) for own in logits]
    sure = [confidences([calibration] * len(texts), own) for calibration, own in zip(calibrations, logits, strict=False)]
    for team in teams:
        size, each = team.members, team.cost / team.members
        assert team.calibration is not None  # as the task has one label a text
        expected = np.exp(team.calibration.log_probabilities(logits[size - 1]))
        losses = np.array([expected.max(axis=1) - expected[texts, own] for own in labels[:size]])
        agrees = np.array([own == labels[size - 1] for own in labels[:size]])
        costs = each * np.arange(1, size + 1)
        answered = Answered(np.array(sure[: size - 1]), agrees, losses, costs, 0.0, lengths / lengths.sum())
        (leaving,) = within(answered, [drop])
        if leaving.exit is not None and (calibration := calibrations[leaving.exit]) is not None:
            alone = float(answered.weights[answered.confidences[leaving.exit] >= leaving.threshold].sum())
            first = First(leaving.exit + 1, round(leaving.threshold, 6), round(alone, 6), calibration)
            team = replace(team, first=first)
            team = replace(team, cost=each * team.asked)
        if not found or team.cost < found[-1].cost:
            found.append(team)
    return found
