"""How good answers are: accuracy, macro-F1, and what the most frequent label alone would score."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Scores:
    rows: int  # texts for `classify`, words for `tag`
    accuracy: float
    macro_f1: float  # over the labels that occur, or are answered
    majority_share: float


def score(targets: np.ndarray, answers: np.ndarray, labels: int) -> Scores:
    """Numbers of labels, row by row; an answer that is no label (negative) is wrong."""
    counts = np.bincount(targets, minlength=labels)
    answered = np.bincount(answers[answers >= 0], minlength=labels)
    right = np.bincount(targets[targets == answers], minlength=labels)
    concerned = counts + answered > 0
    f1 = 2 * right[concerned] / (counts + answered)[concerned]
    return Scores(
        rows=len(targets),
        accuracy=float((targets == answers).mean()),
        macro_f1=float(f1.mean()),
        majority_share=float(counts.max() / len(targets)),
    )
