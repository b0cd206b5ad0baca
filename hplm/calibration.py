"""A tenant's calibration turns the evidence for an answer, its logits, into the probability that it is right.

Plain softmax (Tabi, Eq. 2) is mostly too sure. A temperature divides the logits (Eq. 3; Guo et al. 2017). A number has no
probability, and so no confidence.
No calibration changes an answer's label: its confidence is the calibrated probability of the label that is answered.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hplm.arrays import Array

UNKNOWN = -1.0  # the confidence where there is no calibration: JSON has no NaN
TEMPERATURE = "temperature"  # the one kind; 0.1.0 had others, for numbers
COLDEST = 1e-100  # temperature: logits divided by less may be infinite, and their confidence no number


@dataclass(frozen=True)
class Evidence:
    """Some choices. The answer is right if all of them are."""

    logits: Array  # choices x classes; -inf: a class that cannot be chosen
    chosen: Array  # the chosen class of each
    about: int = 0  # the row or the label that the choice is about


def log_softmax(logits: Array) -> Array:
    """Returns log probabilities over the last axis, in 64 bits."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


@dataclass(frozen=True)
class Calibration:
    kind: str = TEMPERATURE
    temperature: float = 1.0
    # Of numbers, in 0.1.0. With these values the same version is the same record file, and part of the same export.
    delta: float = 0.0
    edges: tuple[float, ...] = ()
    shares: tuple[float, ...] = ()

    @classmethod
    def read(cls, stored: Mapping[str, Any]) -> Calibration:
        """Reads what `asdict` has written. Raises TypeError or KeyError if a field is missing or has another type or value."""
        calibration = cls(stored["kind"], stored["temperature"])
        calibration.check()
        return calibration

    def check(self) -> None:
        """Raises TypeError if it is of another kind, or its temperature is none."""
        if self.kind != TEMPERATURE:
            raise TypeError(f"a calibration has the kind {self.kind!r}, not {TEMPERATURE!r}")
        if type(self.temperature) not in (int, float) or not COLDEST <= self.temperature < math.inf:
            raise TypeError(f"a calibration has the temperature {self.temperature!r}: it is above 0 and finite")

    def confidence(self, evidence: Evidence) -> float:
        found = self.log_probabilities(evidence.logits)[np.arange(len(evidence.chosen)), evidence.chosen]
        return float(np.exp(found.sum()))

    def log_probabilities(self, logits: Array) -> Array:
        """Returns calibrated log probabilities of classes, which are the last axis."""
        return log_softmax(logits.astype(np.float64) / self.temperature)


def confidences(calibrations: Sequence[Calibration | None], logits: Array) -> list[float]:
    """Returns the confidence in the best class of each row: what each `confidence` does, all at once."""
    temperatures = np.array([1.0 if one is None else one.temperature for one in calibrations])
    found = np.exp(log_softmax(logits / temperatures[:, None]).max(axis=1))
    found[[one is None for one in calibrations]] = UNKNOWN
    return found.tolist()


# Functions for `Task.evidence`, which also get spans and labels.


def of_first_row(logits: Array, *_: object) -> Evidence:
    """Returns the choice of a text's one label."""
    return Evidence(logits[:1], logits[:1].argmax(axis=1))


def of_least_certain_row(logits: Array, spans: Array, *_: object) -> Evidence | None:
    """Returns the choice of the row whose best label is the least probable; None if no row has a token."""
    rows = np.flatnonzero(spans[:, 0] >= 0)
    if not len(rows):
        return None
    about = int(rows[log_softmax(logits[rows]).max(axis=1).argmin()])
    return Evidence(logits[about : about + 1], logits[about : about + 1].argmax(axis=1), about)


def of_least_certain_label(logits: Array, *_: object) -> Evidence:
    """Returns the choice whether the label holds whose probability is the nearest to one half."""
    about = int(np.abs(logits[0]).argmin())
    held = float(logits[0, about])
    return Evidence(np.array([[0.0, held]]), np.array([int(held >= 0)]), about)
