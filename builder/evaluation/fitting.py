"""Fits a calibration to answers that are known to be right or wrong, and says how reliable their confidences are."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hplm.arrays import Array
from hplm.calibration import Calibration, Evidence

TEMPERATURES = (0.05, 100.0)  # the range that is searched
STEPS = 40  # of the grid over this range
SURE = 1e-12  # a probability is at least so far from 0 and 1 when its logarithm is taken
DIGITS = 8  # that are kept of a fitted temperature
WIDTHS = 15  # bins of a calibration error, as in Guo et al. 2017

Fit = Callable[["Cases"], Calibration]


@dataclass(frozen=True)
class Cases:
    """Answers that are known to be right or wrong, each with what it rests on."""

    logits: Array  # texts x choices x classes; -inf fills up
    chosen: Array  # texts x choices
    right: Array  # bool
    classes: Array | None  # the right class of each, where an answer rests on one choice

    @classmethod
    def of(cls, evidence: Sequence[Evidence], right: Sequence[bool], classes: Sequence[int] | None = None) -> Cases:
        choices = len(evidence[0].chosen) if evidence else 0
        widest = max((one.logits.shape[1] for one in evidence), default=0)
        logits = np.full((len(evidence), choices, widest), -np.inf)
        for number, one in enumerate(evidence):
            logits[number, :, : one.logits.shape[1]] = one.logits
        chosen, known = np.array([one.chosen for one in evidence]), np.array(classes) if classes is not None else None
        return cls(logits, chosen, np.array(right, dtype=bool), known)

    def __len__(self) -> int:
        return len(self.right)

    def part(self, rows: Array) -> Cases:
        classes = self.classes[rows] if self.classes is not None else None
        return Cases(self.logits[rows], self.chosen[rows], self.right[rows], classes)

    def confidences(self, calibration: Calibration) -> Array:
        found = np.take_along_axis(calibration.log_probabilities(self.logits), self.chosen[..., None], axis=2)
        return np.exp(found.sum(axis=(1, 2)))

    def losses(self, calibration: Calibration) -> Array:
        """Returns the NLL of each text: of the right class, or where no class is known, of whether the answer is right."""
        if self.classes is not None:
            return -calibration.log_probabilities(self.logits[:, 0])[np.arange(len(self)), self.classes]
        sure = self.confidences(calibration).clip(SURE, 1 - SURE)
        return -np.log(np.where(self.right, sure, 1 - sure))


@dataclass(frozen=True)
class Fitted:
    calibration: Calibration  # fitted to all texts
    confidences: Array  # of each text, from a calibration that was fitted without its half
    losses: Array  # the NLL of each, likewise


def fitted(cases: Cases) -> Fitted:
    """Fits a temperature, and returns the calibration with the least NLL on texts that it has not seen.

    NLL: the negative log likelihood.

    The texts are divided at random into two halves. Each fit is made to either half and judged on the other one; its NLL is
    the mean over both. The chosen fit is then made to all texts.
    """
    order = np.random.default_rng(0).permutation(len(cases))
    halves = order[::2], order[1::2]
    # Few texts may give a temperature that is worse on others than none.
    fits: list[Fit] = [lambda _: Calibration(), fit_temperature]
    tried: list[tuple[Fit, Array, Array]] = []
    for fit in fits:
        confidences, losses = np.empty(len(cases)), np.empty(len(cases))
        for mine, others in (halves, halves[::-1]):
            calibration, held_out = fit(cases.part(mine)), cases.part(others)
            confidences[others], losses[others] = held_out.confidences(calibration), held_out.losses(calibration)
        tried.append((fit, confidences, losses))
    fit, confidences, losses = min(tried, key=lambda one: float(one[2].mean()))
    return Fitted(fit(cases), confidences, losses)


def fit_temperature(cases: Cases) -> Calibration:
    """Returns the temperature with the least NLL. It is searched on both sides of the best one of a grid, by its logarithm."""
    from scipy.optimize import minimize_scalar

    def loss(logarithm: float) -> float:
        return float(cases.losses(Calibration(temperature=math.exp(logarithm))).mean())

    least, most = map(math.log, TEMPERATURES)
    grid = np.linspace(least, most, STEPS).tolist()
    best = int(np.argmin([loss(one) for one in grid]))
    around = grid[max(0, best - 1)], grid[min(STEPS - 1, best + 1)]
    found: Any = minimize_scalar(loss, bounds=around, method="bounded", options={"xatol": 1e-9})
    return Calibration(temperature=float(f"{math.exp(found.x):.{DIGITS}g}"))


def calibration_error(confidences: Array, right: Array) -> float:
    """Returns the mean distance between the confidence and the share of right answers, over bins of equal width."""
    places = np.minimum((confidences * WIDTHS).astype(np.int64), WIDTHS - 1)
    members = [places == place for place in np.unique(places)]
    return sum(float(own.sum() * abs(confidences[own].mean() - right[own].mean())) for own in members) / len(right)
