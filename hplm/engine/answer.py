"""From logits to what a client reads: labels, probabilities, the code points they speak of. One function a task."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

HOLDS = 0.5  # the probability from which on a label of `multilabel` is answered
LONGEST_ANSWER = 30  # tokens of `span`: without a bound, a far end with a high logit makes half of the passage the answer


@dataclass(frozen=True)
class Rows:
    """The answer to one text. Rows that are labels (`multilabel`, the k best) share one row of logits."""

    labels: list[str]
    scores: np.ndarray  # rows, fp32
    logits: np.ndarray  # rows x classes, fp32
    spans: np.ndarray  # rows x 2, int32


def answer(task: str, logits: np.ndarray, spans: np.ndarray, labels: Sequence[str], top_k: int = 0, passage: str = "") -> Rows:
    """`logits` and `spans` have a row for each token that was read; `passage` is what the spans of `span` speak of."""
    if task == "span":
        return _span(logits, spans, passage)
    if top_k:
        return _best_labels(logits, spans, labels, top_k)
    return _BY_TASK[task](logits, spans, labels)


def _best_label(logits: np.ndarray, spans: np.ndarray, labels: Sequence[str]) -> Rows:
    """One row a span. A span without a token has no label: "", 0 and NaN."""
    readable = spans[:, 0] >= 0
    best = logits.argmax(axis=1)
    scores = _softmax(logits)[np.arange(len(best)), best]
    return Rows(
        labels=[labels[i] if known else "" for i, known in zip(best, readable, strict=True)],
        scores=np.where(readable, scores, 0).astype(np.float32),
        logits=np.where(readable[:, None], logits, np.nan).astype(np.float32),
        spans=spans[:, 1:],
    )


def _best_labels(logits: np.ndarray, spans: np.ndarray, labels: Sequence[str], count: int) -> Rows:
    best = np.argsort(-logits[0], kind="stable")[:count]
    repeat = np.zeros(len(best), dtype=np.int64)
    return Rows([labels[i] for i in best], _softmax(logits)[0, best], logits[:1], spans[repeat, 1:])


def _holding_labels(logits: np.ndarray, spans: np.ndarray, labels: Sequence[str]) -> Rows:
    """The most probable first; none may hold."""
    probabilities = 1 / (1 + np.exp(-logits[0].astype(np.float64)))
    holding = [i for i in np.argsort(-logits[0], kind="stable") if probabilities[i] >= HOLDS]
    repeat = np.zeros(len(holding), dtype=np.int64)
    return Rows([labels[i] for i in holding], probabilities[holding].astype(np.float32), logits[:1], spans[repeat, 1:])


def _value(logits: np.ndarray, spans: np.ndarray, labels: Sequence[str]) -> Rows:
    """A number is no label and has no probability; it is spelt out where one is read anyway."""
    return Rows([f"{logits[0, 0]:.6g}"], np.zeros(1, dtype=np.float32), logits[:1], spans[:1, 1:])


def _span(logits: np.ndarray, spans: np.ndarray, passage: str) -> Rows:
    first, last = best_span(logits)
    start, stop = int(spans[first, 1]), int(spans[last, 2])
    start_of, stop_of = _softmax(logits.T)
    return Rows(
        labels=[passage[start:stop]],
        scores=np.array([start_of[first] * stop_of[last]], dtype=np.float32),
        logits=np.array([[logits[first, 0], logits[last, 1]]], dtype=np.float32),
        spans=np.array([[start, stop]], dtype=np.int32),
    )


def best_span(logits: np.ndarray) -> tuple[int, int]:
    """The tokens at which the likeliest answer starts and ends: the sum of their two logits is the highest."""
    starts, ends = logits[:, 0], logits[:, 1]
    best, found = -np.inf, (0, 0)
    for distance in range(min(LONGEST_ANSWER, len(logits))):
        sums = starts[: len(starts) - distance] + ends[distance:]
        first = int(sums.argmax())
        if sums[first] > best:
            best, found = sums[first], (first, first + distance)
    return found


def _softmax(logits: np.ndarray) -> np.ndarray:
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
    return shifted / shifted.sum(axis=1, keepdims=True)


_BY_TASK: dict[str, Callable[[np.ndarray, np.ndarray, Sequence[str]], Rows]] = {
    "classify": _best_label,
    "tag": _best_label,
    "multilabel": _holding_labels,
    "regress": _value,
}


@dataclass(frozen=True)
class Filled:
    """The answers to a request's texts as rectangles. Short answers are filled up with "", 0, NaN and -1."""

    labels: np.ndarray  # texts x rows, object
    scores: np.ndarray
    logits: np.ndarray
    spans: np.ndarray

    def outputs(self, wanted: Collection[str], version: int) -> dict[str, np.ndarray]:
        """Returns the requested outputs by their names on the wire, with strings as bytes."""
        versions = np.full((len(self.labels), 1), str(version), dtype=object)
        numbers = {"SCORE": self.scores, "LOGITS": self.logits, "SPAN": self.spans}
        strings = {name: _utf8(values) for name, values in (("LABEL", self.labels), ("VERSION", versions)) if name in wanted}
        return strings | {name: values for name, values in numbers.items() if name in wanted}


def size_of(outputs: Mapping[str, np.ndarray]) -> int:
    """Returns the bytes of outputs on the way to the server process."""
    return sum(
        sum(4 + len(one) for one in values.flat) if values.dtype == object else values.nbytes for values in outputs.values()
    )


def _utf8(strings: np.ndarray) -> np.ndarray:
    """Encodes strings as Python objects. In numpy's own type, every string would take the size of the longest."""
    encoded = np.empty(strings.size, dtype=object)
    encoded[:] = [one.encode() for one in strings.flat]
    return encoded.reshape(strings.shape)


def fill(texts: Sequence[Rows]) -> Filled:
    count, rows = len(texts), max(1, *(len(text.labels) for text in texts))  # a text may have no labels
    logit_rows, classes = max(len(text.logits) for text in texts), texts[0].logits.shape[1]
    filled = Filled(
        labels=np.full((count, rows), "", dtype=object),
        scores=np.zeros((count, rows), dtype=np.float32),
        logits=np.full((count, logit_rows, classes), np.nan, dtype=np.float32),
        spans=np.full((count, rows, 2), -1, dtype=np.int32),
    )
    for i, text in enumerate(texts):
        used = len(text.labels)
        filled.labels[i, :used] = text.labels
        filled.scores[i, :used] = text.scores
        filled.logits[i, : len(text.logits)] = text.logits
        filled.spans[i, :used] = text.spans
    return filled
