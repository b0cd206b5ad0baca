"""The answers to texts, and how they are read from logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress, pairwise

import numpy as np

from hplm.arrays import Array, together
from hplm.calibration import UNKNOWN, Calibration, Evidence, confidences

HOLDS = 0.5  # a label of `multilabel` is in the answer from this probability on
LONGEST_ANSWER = 30  # tokens of `span`: without a limit, one high logit far away could make half of the passage the answer
EMBEDDING = "EMBEDDING"  # the output that has an answer which is a vector


@dataclass(slots=True)  # not frozen, which would take three times as long to make
class TextAnswer:
    """The answer to one text. Where each row is a label of the whole text (`multilabel`, `top_k`), `logits` has one row."""

    labels: list[str]
    scores: Array  # rows, fp32
    logits: Array  # rows x classes, fp32
    spans: Array  # rows x 2, int32
    confidence: float = UNKNOWN  # the probability that it is right
    level: int = 1  # of its tenant's levels, the one that has answered; 1 is the shallowest
    tokens: int = 0  # that the model has read


@dataclass(slots=True)
class LabelEach:
    """Answers to texts with one label each, in columns that are made once for a batch: those from `start` to before `stop`."""

    labels: list[str]
    scores: Array  # texts, fp32
    logits: Array  # texts x classes, fp32
    spans: Array  # texts x 2, int32
    confidences: list[float]
    levels: list[int]
    tokens: list[int]
    start: int
    stop: int

    @classmethod
    def of(cls, texts: Sequence[TextAnswer]) -> LabelEach | None:
        """Returns these answers in columns of their own, or None if one of them has not exactly one label."""
        if not all([len(text.labels) == len(text.logits) == 1 for text in texts]):
            return None
        return cls(
            [text.labels[0] for text in texts],
            together([text.scores for text in texts]),
            together([text.logits for text in texts]),
            together([text.spans for text in texts]),
            [text.confidence for text in texts],
            [text.level for text in texts],
            [text.tokens for text in texts],
            *(0, len(texts)),
        )

    @classmethod
    def together(cls, parts: Sequence[LabelEach]) -> LabelEach:
        """Returns all these answers. Mostly they are neighbours in the same columns, and then nothing is copied."""
        first, last = parts[0], parts[-1]
        if all([one.scores is first.scores and one.start == before.stop for before, one in pairwise(parts)]):
            return first.part(first.start, last.stop)
        return cls(
            [label for one in parts for label in one.labels[one.own]],
            together([one.scores[one.own] for one in parts]),
            together([one.logits[one.own] for one in parts]),
            together([one.spans[one.own] for one in parts]),
            [confidence for one in parts for confidence in one.confidences[one.own]],
            [level for one in parts for level in one.levels[one.own]],
            [tokens for one in parts for tokens in one.tokens[one.own]],
            *(0, sum(map(len, parts))),
        )

    def part(self, start: int, stop: int) -> LabelEach:
        """Returns the answers at these places of the columns."""
        columns = self.labels, self.scores, self.logits, self.spans, self.confidences, self.levels, self.tokens
        return LabelEach(*columns, start, stop)

    @property
    def own(self) -> slice:
        """Where its answers are in the columns."""
        return slice(self.start, self.stop)

    def __len__(self) -> int:
        return self.stop - self.start

    def __iter__(self) -> Iterator[TextAnswer]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, text: int) -> TextAnswer:
        at = self.start + text
        own = slice(at, at + 1)
        rows = self.labels[own], self.scores[own], self.logits[own], self.spans[own]
        return TextAnswer(*rows, self.confidences[at], self.levels[at], self.tokens[at])


Answers = list[TextAnswer] | LabelEach  # to texts
ReadBest = Callable[[Array, Array, Sequence[str], int], TextAnswer]  # takes logits, spans, labels, and how many are asked for
# Takes logits and spans of texts with one row each, the labels of each, and the calibration of each, if its confidence counts.
ReadEach = Callable[[Array, Array, Sequence[Sequence[str]], Sequence["Calibration | None"]], LabelEach]


def best_label(logits: Array, spans: Array, labels: Sequence[str], passage: str) -> TextAnswer:
    """Returns a row for each span. A span without a token gets the label "", the score 0 and logits of 0."""
    readable = spans[:, 0] >= 0
    best, scores = _best(logits)
    return TextAnswer(
        labels=[name if known else "" for name, known in zip(names_of(labels, best), readable, strict=True)],
        scores=np.where(readable, scores, 0).astype(np.float32),
        logits=np.where(readable[:, None], logits, 0).astype(np.float32),
        spans=spans[:, 1:],
    )


def best_label_of_each(
    logits: Array, spans: Array, labels: Sequence[Sequence[str]], calibrations: Sequence[Calibration | None]
) -> LabelEach:
    """Returns what `best_label` does for each of many texts that have one row each, with labels of their own.

    `calibrations` make their confidences; None: not asked for, or not known.
    """
    best, scores = _best(logits)
    chosen: list[int] = best.tolist()
    sure = confidences(calibrations, logits) if any(calibrations) else [UNKNOWN] * len(chosen)
    names = [own[index] for own, index in zip(labels, chosen, strict=True)]
    return LabelEach(names, scores, logits, spans[:, 1:], sure, [1] * len(chosen), [0] * len(chosen), 0, len(chosen))


def _best(logits: Array) -> tuple[Array, Array]:
    """Returns the index of each row's highest logit, and its probability."""
    best = logits.argmax(axis=1)
    return best, 1 / np.exp(logits - logits[np.arange(len(best)), best, None]).sum(axis=1)


def best_labels(logits: Array, spans: Array, labels: Sequence[str], count: int) -> TextAnswer:
    """Returns the `count` most probable labels of the first row, the most probable first."""
    return _likeliest(logits, spans, labels, count, softmax(logits)[0])


def _likeliest(logits: Array, spans: Array, labels: Sequence[str], count: int, probabilities: Array) -> TextAnswer:
    best = np.argsort(-logits[0], kind="stable")[:count]
    repeat = np.zeros(len(best), dtype=np.int64)
    return TextAnswer(names_of(labels, best), probabilities[best].astype(np.float32), logits[:1], spans[repeat, 1:])


def holding_labels(logits: Array, spans: Array, labels: Sequence[str], passage: str) -> TextAnswer:
    """Returns all labels with a probability of at least HOLDS, the most probable first. There may be none."""
    return likeliest_labels(logits, spans, labels, int((_holding(logits[0]) >= HOLDS).sum()))


def likeliest_labels(logits: Array, spans: Array, labels: Sequence[str], count: int) -> TextAnswer:
    """Returns the `count` labels that most probably hold, the most probable first."""
    return _likeliest(logits, spans, labels, count, _holding(logits[0]))


def _holding(logits: Array) -> Array:
    """Returns the probability that each label holds."""
    return 1 / (1 + np.exp(-logits.astype(np.float64)))


def vector_of_each(
    logits: Array, spans: Array, labels: Sequence[Sequence[str]], calibrations: Sequence[Calibration | None]
) -> LabelEach:
    """Returns the vectors of texts, which stand in place of logits, beside one empty label each."""
    count = len(logits)
    scores = np.zeros(count, dtype=np.float32)
    return LabelEach([""] * count, scores, logits, spans[:, 1:], [UNKNOWN] * count, [1] * count, [0] * count, 0, count)


def vector(logits: Array, spans: Array, labels: Sequence[str], passage: str) -> TextAnswer:
    return vector_of_each(logits, spans, (), ())[0]


def value(logits: Array, spans: Array, labels: Sequence[str], passage: str) -> TextAnswer:
    """Returns a number. Its digits are the label, and the score is 0 because a number has no probability."""
    return TextAnswer([f"{logits[0, 0]:.6g}"], np.zeros(1, dtype=np.float32), logits[:1], spans[:1, 1:])


def piece_of_passage(logits: Array, spans: Array, labels: Sequence[str], passage: str) -> TextAnswer:
    """Returns the best piece of the passage, or "" at 0-0 if the score of no answer is higher (SQuAD 2).

    A piece lies in one window. The score of no answer is the lowest of all windows: in one of them, an answer is likely.
    """
    best, ends = _ends(logits, spans, labels)
    first, last = ends.chosen.tolist()
    start, stop = int(spans[first, 1]), int(spans[last, 2])
    start_of, stop_of = softmax(ends.logits)
    return TextAnswer(
        labels=[passage[start:stop]],
        scores=np.array([start_of[first] * stop_of[last]], dtype=np.float32),
        logits=best,
        spans=np.array([[start, stop]], dtype=np.int32),
    )


def window_heads(spans: Array) -> Array:
    """Returns which rows are for a whole window. No token of a passage ends at code point 0."""
    return np.flatnonzero(spans[:, 2] == 0)


def of_ends(logits: Array, spans: Array, labels: Sequence[str]) -> Evidence:
    """Returns what the confidence of a piece rests on."""
    return _ends(logits, spans, labels)[1]


def _ends(logits: Array, spans: Array, labels: Sequence[str]) -> tuple[Array, Evidence]:
    """Returns the logits of the best piece, and its two ends among all tokens; without an answer both are a window's first."""
    heads = window_heads(spans)
    pieces = [(head + 1, *best_span(own[1:])) for head, own in zip(heads.tolist(), np.split(logits, heads[1:]), strict=True)]
    found = ((at + start, at + end) for at, start, end in pieces)
    first, last = max(found, key=lambda ends: float(logits[ends[0], 0] + logits[ends[1], 1]))
    chosen, best = [first, last], np.array([[logits[first, 0], logits[last, 1]]], dtype=np.float32)
    ends = logits[:, :2].copy()
    ends[heads] = -np.inf
    if len(labels) > 2:
        head = int(heads[logits[heads, 2].argmin()])
        best = np.append(best, logits[head : head + 1, 2:3], axis=1)
        ends[head] = best[0, 2] / 2
        if best[0, 2] > best[0, :2].sum():
            chosen = [head, head]
    return best, Evidence(ends.T, np.array(chosen))


def best_span(logits: Array) -> tuple[int, int]:
    """Returns the tokens at which the best answer starts and ends: the sum of their two logits is the highest."""
    starts, ends = logits[:, 0], logits[:, 1]
    best, found = -np.inf, (0, 0)
    for distance in range(min(LONGEST_ANSWER, len(logits))):
        sums = starts[: len(starts) - distance] + ends[distance:]
        first = int(sums.argmax())
        if sums[first] > best:
            best, found = sums[first], (first, first + distance)
    return found


def same_labels(one: TextAnswer, other: TextAnswer) -> bool:
    return one.labels == other.labels


def same_set(one: TextAnswer, other: TextAnswer) -> bool:
    """Whether the same labels hold, also among the k best."""
    mine, theirs = ({*compress(own.labels, own.scores >= HOLDS)} for own in (one, other))
    return mine == theirs


def names_of(labels: Sequence[str], indexes: Array) -> list[str]:
    chosen: list[int] = indexes.tolist()
    return [labels[i] for i in chosen]


def softmax(logits: Array) -> Array:
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
    return shifted / shifted.sum(axis=1, keepdims=True)
