"""From logits to what a client reads: labels, probabilities, the code points they speak of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Rows:
    """The answer to one text."""

    labels: list[str]
    scores: np.ndarray  # rows, fp32
    logits: np.ndarray  # rows x classes, fp32
    spans: np.ndarray  # rows x 2, int32


def answer(logits: np.ndarray, spans: np.ndarray, labels: Sequence[str], top_k: int = 0) -> Rows:
    """One row a span; with `top_k`, the k best labels of the first. A span without a token has no label: "", 0 and NaN."""
    readable = spans[:, 0] >= 0
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities = shifted / shifted.sum(axis=1, keepdims=True)
    if top_k:
        best = np.argsort(-logits[0], kind="stable")[:top_k]
        repeat = np.zeros(len(best), dtype=np.int64)
        return Rows([labels[i] for i in best], probabilities[0, best], logits[repeat], spans[repeat, 1:])
    best = logits.argmax(axis=1)
    return Rows(
        labels=[labels[i] if known else "" for i, known in zip(best, readable, strict=True)],
        scores=np.where(readable, probabilities[np.arange(len(best)), best], 0).astype(np.float32),
        logits=np.where(readable[:, None], logits, np.nan).astype(np.float32),
        spans=spans[:, 1:],
    )


@dataclass(frozen=True)
class Filled:
    """The answers to a request's texts as rectangles; short ones filled up with "", 0, NaN and -1."""

    labels: np.ndarray  # texts x rows, object
    scores: np.ndarray
    logits: np.ndarray
    spans: np.ndarray


def fill(texts: Sequence[Rows]) -> Filled:
    count, rows = len(texts), max(len(text.labels) for text in texts)
    classes = texts[0].logits.shape[1]
    filled = Filled(
        labels=np.full((count, rows), "", dtype=object),
        scores=np.zeros((count, rows), dtype=np.float32),
        logits=np.full((count, rows, classes), np.nan, dtype=np.float32),
        spans=np.full((count, rows, 2), -1, dtype=np.int32),
    )
    for i, text in enumerate(texts):
        used = len(text.labels)
        filled.labels[i, :used] = text.labels
        filled.scores[i, :used] = text.scores
        filled.logits[i, :used] = text.logits
        filled.spans[i, :used] = text.spans
    return filled
