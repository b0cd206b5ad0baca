"""Evidence for a confidence: the choices between classes that an answer rests on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hplm.arrays import Array


@dataclass(frozen=True)
class Evidence:
    """Some choices. The answer is right if all of them are. A number is a choice from one class: its logit is the number."""

    logits: Array  # choices x classes; -inf: a class that cannot be chosen
    chosen: Array  # the chosen class of each
    about: int = 0  # the row or the label that the choice is about


def log_softmax(logits: Array) -> Array:
    """Returns log probabilities over the last axis, in 64 bits."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


# Functions for `Task.evidence`, which also get spans and labels.


def of_first_row(logits: Array, *_: object) -> Evidence:
    """Returns the choice of a text's one label, or its number."""
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
