"""Calibrations of the tenants of `tests.tasks`, and the confidences that they give, in plain numpy."""

from __future__ import annotations

import numpy as np

from hplm.levels.calibration import BINS, DIRICHLET, Calibration

SPAN, WORD, STUDENTS = 6.0, 2.5, 1.5  # temperatures
CALIBRATIONS = {  # `find` has none
    "many": Calibration(temperature=1.7),
    "mark": Calibration(BINS, delta=0.5, edges=(-1.0, 1.0), shares=(0.25, 0.5, 0.75)),
    "perhaps": Calibration(temperature=SPAN),
    "pair": Calibration(DIRICHLET, weights=((0.5, 0.1), (-0.2, 0.3)), bias=(0.1, -0.3)),
    "word": Calibration(temperature=WORD),
}


def softmax(logits):
    p = np.exp(logits - logits.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def of_logits(tenant_id, labels, logits):
    """Returns the confidence in an answer by its labels and the rows of its logits; None if these do not tell it."""
    logits = np.asarray(logits, dtype=np.float64)
    if tenant_id == "pair":
        p = softmax(logits[0])
        mapped = [0.5 * np.log(p[0]) + 0.1 * np.log(p[1]) + 0.1, -0.2 * np.log(p[0]) + 0.3 * np.log(p[1]) - 0.3]
        return softmax(np.array(mapped))[p.argmax()]
    if tenant_id == "many":
        return 1 / (1 + np.exp(-np.abs(logits[0]).min() / 1.7))
    if tenant_id == "mark":
        return 0.25 if logits[0, 0] < -1 else 0.5 if logits[0, 0] < 1 else 0.75
    if tenant_id == "word":
        rows = logits[[number for number, label in enumerate(labels) if label]]
        least = rows[softmax(rows).max(1).argmin()] if len(rows) else None
        return -1 if least is None else softmax(least / WORD).max()
    return None


def expected(reference, tenant_id, labels, logits, text, pair):
    """Returns the confidence in an answer of any tenant; -1 for one without a calibration."""
    if tenant_id == "iris":
        return softmax(np.asarray(logits, dtype=np.float64)[0] / STUDENTS).max()
    sure = of_logits(tenant_id, labels, logits) if tenant_id in CALIBRATIONS else -1.0
    return of_passage(reference.windows(text, tenant_id, pair)) if sure is None else sure


def of_passage(windows):
    """Returns the confidence of `perhaps` in the best piece of a passage, or in none, from what the reference says of it."""
    best = max((window.best for window in windows), key=lambda piece: piece.sum)
    none = min(float(window.logits[0, 2]) for window in windows)
    starts, stops = (np.array([float(row[end]) for window in windows for row in window.logits[1:]]) for end in (0, 1))
    chosen = best.logits if best.sum >= none else (none / 2, none / 2)
    ends = zip(chosen, (starts, stops), strict=True)
    return np.prod([np.exp(own / SPAN) / (np.exp(all / SPAN).sum() + np.exp(none / 2 / SPAN)) for own, all in ends])
