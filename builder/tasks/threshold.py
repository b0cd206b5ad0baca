"""The threshold of `span`: how much likelier no answer must be than the best one (SQuAD 2's null score)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from builder.tasks.examples import Example
from builder.tasks.scores import overlap_of
from hplm.tasks import TASKS


def none_shift(
    labels: Sequence[str], examples: Sequence[Example], spans: Sequence[np.ndarray], logits: Sequence[np.ndarray]
) -> np.ndarray:
    """Returns what to add to each output, so that the examples score best.

    It is 0 if nothing scores better, or if the examples are all answerable or all unanswerable.
    """
    shift = np.zeros(len(labels), dtype=np.float32)
    if len(labels) < 3 or len({bool(example.answers) for example in examples}) < 2:
        return shift
    lead, gain = np.empty(len(examples)), np.empty(len(examples))
    for i, (example, own, places) in enumerate(zip(examples, logits, spans, strict=True)):
        best = TASKS["span"].answer(own[:, :2], places, labels[:2], passage=example.pair or "")
        lead[i] = own[0, 2] - best.logits.sum()  # of no answer before the best one
        gain[i] = overlap_of(example, "") - overlap_of(example, best.labels[0])  # if it is left unanswered
    shift[2] = -_best_threshold(lead, gain)
    return shift


def _best_threshold(lead: np.ndarray, gain: np.ndarray) -> float:
    """Returns the threshold, above which a lead counts, with the highest sum of gains; of equal ones the nearest to 0."""
    known = np.unique(lead)
    between = (known[:-1] + known[1:]) / 2
    thresholds = np.array([0.0, known[0] - 1, *between, known[-1] + 1])
    sums = np.array([gain[lead > threshold].sum() for threshold in thresholds])
    best = thresholds[sums >= sums.max() - 1e-9]
    return float(best[np.abs(best).argmin()])
