"""Outcomes of ways of answering texts, and the differences between them with their standard errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from builder.cascade.candidates import Measured

GROUPS = 10  # of texts, one of which is left out at a time


@dataclass(frozen=True)
class Outcome:
    """The score and the costs of one way of answering."""

    score: float
    values: np.ndarray  # their mean is the score and their spread gives its error: see `values_of`
    seconds: np.ndarray  # of each text
    work: np.ndarray  # of each text: tokens times layers, as a share of what the tenant's own level takes
    went_on: tuple[float, ...] = ()  # by step: the share of the texts that went on after it
    words: int = 0  # of texts at later steps
    unread: int = 0  # those of them that pruning has left out


@dataclass(frozen=True)
class Difference:
    """A difference, or a ratio, between two ways of answering the same texts."""

    value: float
    values: np.ndarray  # of each text, or of each group of texts: their spread gives the error

    @property
    def error(self) -> float:
        return error_of(self.values)


def values_of(measured: Measured, answers: list[list[str]], texts: np.ndarray | None = None) -> np.ndarray:
    """Returns 1 for each right answer, where a text has one label. Otherwise the score's pseudo-values (see `left_out`).

    `texts`: the numbers of some; None: of all.
    """
    texts = np.arange(len(answers)) if texts is None else texts
    if measured.task.one_label_a_row and measured.task.served.reads_first_token:
        return np.array([answers[i][0] == measured.examples[i].labels[0] for i in texts], dtype=float)
    return left_out(lambda own: measured.score(texts[own], [answers[i] for i in texts[own]]), len(texts))


def left_out(statistic: Callable[[np.ndarray], float], texts: int) -> np.ndarray:
    """Returns a pseudo-value of a statistic for each group of texts (the jackknife).

    The statistic takes the numbers of texts. The pseudo-values of two ways are paired: they leave out the same texts.
    """
    group = np.arange(texts) % GROUPS
    whole = statistic(np.arange(texts))
    without = np.array([statistic(np.flatnonzero(group != one)) for one in range(GROUPS)])
    return GROUPS * whole - (GROUPS - 1) * without


def error_of(values: np.ndarray) -> float:
    """Returns the standard error of their mean."""
    return float(np.sqrt(values.var(ddof=1) / len(values)))


def points_between(one: Outcome, other: Outcome) -> Difference:
    """Returns how many points more the first one scores."""
    return Difference(100 * (one.score - other.score), 100 * (one.values - other.values))


def ratio_between(one: np.ndarray, other: np.ndarray) -> Difference:
    """Returns the ratio of the mean costs of the same texts."""
    mean = float(other.mean())
    ratio = float(one.mean()) / mean
    return Difference(ratio, (one - ratio * other) / mean)


def pooled(sets: Mapping[str, Sequence[Difference]]) -> tuple[float, float]:
    """Returns the mean of differences over sets of texts, and its standard error.

    A set has a difference for each tenant that answers it. Its tenants are not independent, so each text counts once.
    """
    means = [np.mean([one.value for one in own]) for own in sets.values()]
    errors = [error_of(np.mean([one.values for one in own], axis=0)) for own in sets.values()]
    return float(np.mean(means)), float(np.sqrt(np.sum(np.square(errors)))) / len(errors)


def points_lost(strong: Mapping[str, Sequence[Outcome]], other: Mapping[str, Sequence[Outcome]]) -> tuple[float, float]:
    """Returns how many points fewer another way scores, as `pooled`. Both take outcomes by the set of texts."""
    return pooled(
        {
            name: [points_between(mine, theirs) for mine, theirs in zip(own, other[name], strict=True)]
            for name, own in strong.items()
        }
    )
