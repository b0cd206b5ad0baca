"""Scores, one function a task: of answers as clients get them, of whether one is right, and the threshold of `span`."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, starmap
from operator import and_, eq
from typing import Any

import numpy as np

from builder.tasks.examples import Example
from builder.tasks.nearest import NEAREST
from hplm.calibration import Evidence
from hplm.tasks.answers import TextAnswer
from hplm.tasks.tasks import TASKS

Labels = Sequence[str]  # of one text's rows; for `regress` its value, for `span` its answer
Rows = Sequence[tuple[set[str], set[str]]]  # the labels that are right in each row, and those that were answered
ROUGE = "rouge1", "rouge2", "rougeL"
BIO = re.compile(r"[BI]-.+|O")


@dataclass(frozen=True)
class Scores:
    rows: int  # texts; for `tag`, words
    metric: str  # the name of the deciding metric
    values: dict[str, float]

    @property
    def main(self) -> float:
        return self.values[self.metric]

    @property
    def error(self) -> float:
        """The standard error of the deciding metric, as if it were a share of the rows."""
        share = min(max(self.main, 0.0), 1.0)
        return (share * (1 - share) / self.rows) ** 0.5

    def described(self) -> dict[str, Any]:
        return {"rows": self.rows, "metric": self.metric, **{name: round(value, 4) for name, value in self.values.items()}}


def label_scores(labels: Labels, examples: Sequence[Example], answers: Sequence[Labels]) -> Scores:
    wanted, answered = _row_by_row(examples, answers)
    return Scores(len(wanted), "accuracy", _values(labels, wanted, answered))


def written_scores(labels: Labels, examples: Sequence[Example], answers: Sequence[Labels]) -> Scores:
    """Returns ROUGE: the mean F1 of the words, of pairs of them, and of the longest common sequence, after stemming."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(ROUGE, use_stemmer=True)
    found = [scorer.score(example.target, text) for example, (text,) in zip(examples, answers, strict=True)]
    return Scores(len(found), "rougeL", {name: sum(one[name].fmeasure for one in found) / len(found) for name in ROUGE})


def tag_scores(labels: Labels, examples: Sequence[Example], answers: Sequence[Labels]) -> Scores:
    """Scores tags by F1: most words have the same label, so accuracy would hide the others."""
    from seqeval.metrics import f1_score

    wanted, answered = _row_by_row(examples, answers)
    values = _values(labels, wanted, answered)
    if not is_bio(labels):
        return Scores(len(wanted), "macro_f1", values)
    # As conlleval counts: an entity is right if both ends and its kind are. A word without answer is outside.
    outside = [[label or "O" for label in text] for text in answers]
    zero: Any = 0  # annotated as a string there
    score: Any = f1_score([list(example.labels) for example in examples], outside, zero_division=zero)
    return Scores(len(wanted), "entity_f1", {**values, "entity_f1": float(score)})


def _row_by_row(examples: Sequence[Example], answers: Sequence[Labels]) -> tuple[Labels, Labels]:
    return [label for example in examples for label in example.labels], [label for answer in answers for label in answer]


def is_bio(labels: Labels) -> bool:
    """Returns whether the labels are B- and I- tags of entities."""
    return all(BIO.fullmatch(label) for label in labels) and any(label.startswith("B-") for label in labels)


def confusion(examples: Sequence[Example], answers: Sequence[Labels]) -> dict[str, dict[str, int]]:
    """Returns how often each right label got each answer, the most frequent first; "" counts words without an answer.

    It has only what occurs: a thousand labels have a million pairs.
    """
    found = dict[str, dict[str, int]]()
    for (wanted, answered), count in Counter(zip(*_row_by_row(examples, answers), strict=True)).most_common():
        found.setdefault(wanted, {})[answered] = count
    return found


def _values(labels: Labels, wanted: Labels, answered: Labels) -> dict[str, float]:
    return {
        "accuracy": sum(map(eq, wanted, answered)) / len(wanted),
        "macro_f1": _macro_f1(_counts(labels, _sets(wanted, answered))),
        "majority_share": max(Counter(wanted).values()) / len(wanted),
    }


def holding_scores(labels: Labels, examples: Sequence[Example], answers: Sequence[Labels]) -> Scores:
    rows = [(wanted & {*labels}, answered & {*labels}) for wanted, answered in _held(examples, answers)]
    counts = _counts(labels, rows)
    values = {"micro_f1": _f1(*map(sum, zip(*counts, strict=True))), "macro_f1": _macro_f1(counts)}
    return Scores(len(rows), "micro_f1", {**values, "exact": sum(starmap(eq, rows)) / len(rows)})


def by_label(labels: Labels, examples: Sequence[Example], answers: Sequence[Labels], in_rows: bool) -> list[dict[str, Any]]:
    """Returns how often each label is wanted and answered, and its F1. `in_rows`: each row has one label."""
    counts = _counts(labels, _sets(*_row_by_row(examples, answers)) if in_rows else _held(examples, answers))
    return [
        {"label": label, "wanted": wanted, "answered": answered, "right": right, "f1": round(_f1(wanted, answered, right), 4)}
        for label, (wanted, answered, right) in zip(labels, counts, strict=True) if wanted + answered
    ]  # fmt: skip


def _held(examples: Sequence[Example], answers: Sequence[Labels]) -> Rows:
    """Returns which labels hold for each text, and which were answered."""
    return [({*example.labels}, {*answer}) for example, answer in zip(examples, answers, strict=True)]


def _sets(wanted: Labels, answered: Labels) -> Rows:
    return [({label}, {answer}) for label, answer in zip(wanted, answered, strict=True)]


def _counts(labels: Labels, rows: Rows) -> list[tuple[int, int, int]]:
    """Returns how often each label is wanted, answered, and both."""
    wanted, answered = (Counter(chain.from_iterable(own)) for own in zip(*rows, strict=True))
    right = Counter(chain.from_iterable(starmap(and_, rows)))
    return [(wanted[label], answered[label], right[label]) for label in labels]


def _macro_f1(counts: Sequence[tuple[int, int, int]]) -> float:
    """Returns the mean F1 of the labels that occur or were answered; 0 if there are none."""
    f1 = [_f1(*own) for own in counts if own[0] + own[1]]
    return sum(f1) / len(f1) if f1 else 0.0


def _f1(wanted: int, answered: int, right: int) -> float:
    return 2 * right / (wanted + answered) if wanted + answered else 0.0


def value_scores(labels: Labels, examples: Sequence[Example], answers: Sequence[Labels]) -> Scores:
    from scipy.stats import pearsonr, spearmanr

    wanted, answered = np.array([example.value for example in examples]), np.array([float(answer[0]) for answer in answers])
    measures: dict[str, Any] = {"pearson": pearsonr, "spearman": spearmanr}  # whose results' classes are made at run time
    varied = len(set(wanted)) > 1 and len(set(answered)) > 1  # otherwise no correlation is defined
    found = {name: float(of(wanted, answered).statistic) if varied else 0.0 for name, of in measures.items()}
    return Scores(len(wanted), "pearson", {**found, "rmse": float(np.sqrt(np.mean((wanted - answered) ** 2)))})


def near_scores(labels: Labels, examples: Sequence[Example], answers: Sequence[Labels]) -> Scores:
    """Returns nDCG of the ten nearest texts, where every positive of a text is right; of rated pairs the rank correlation."""
    rated = [number for number, example in enumerate(examples) if example.is_rated]
    values: dict[str, float] = {}
    if rated:
        found = value_scores(labels, [examples[number] for number in rated], [answers[number] for number in rated])
        values = {name: found.values[name] for name in ("spearman", "pearson")}
    right, ranked = dict[str, set[str]](), dict[str, Labels]()
    for example, answer in zip(examples, answers, strict=True):
        if not example.is_rated:
            right.setdefault(example.text, set()).add(example.pair or "")
            ranked[example.text] = answer
    if not right:
        return Scores(len(rated), "spearman", values)
    gains = 1 / np.log2(np.arange(2, NEAREST + 2))
    hits = {text: np.array([one in right[text] for one in own], dtype=float) for text, own in ranked.items()}
    found = [float(own @ gains[: len(own)] / gains[: len(right[text])].sum()) for text, own in hits.items()]
    first = float(np.mean([own[0] for own in hits.values()]))
    return Scores(len(found), "ndcg10", {"ndcg10": float(np.mean(found)), "first_right": first, **values})


def span_scores(labels: Labels, examples: Sequence[Example], answers: Sequence[Labels]) -> Scores:
    """Returns SQuAD 2's exact match and F1 against the best fitting right answer, without articles and punctuation.

    A question without an answer is right if it is left unanswered. With some of these, both kinds are also scored apart.
    """
    exact, f1 = (np.array(scores) for scores in zip(*map(exact_and_f1, examples, answers), strict=True))
    values = {"exact_match": float(exact.mean()), "f1": float(f1.mean())}
    answerable = np.array([bool(example.answers) for example in examples])
    if not answerable.all():
        values["unanswerable_right"] = float(f1[~answerable].mean())
        if answerable.any():
            values["answerable_f1"] = float(f1[answerable].mean())
    return Scores(len(examples), "f1", values)


def exact_and_f1(example: Example, answer: Labels) -> tuple[float, float]:
    """Returns SQuAD's exact match and F1 of one answer."""
    passage, answered = example.pair or "", _words(answer[0])
    right = [words for start, stop in example.answers if (words := _words(passage[start:stop]))] or [[]]
    return max(float(words == answered) for words in right), max(_overlap(words, answered) for words in right)


def _words(text: str) -> list[str]:
    bare = "".join(character for character in text.lower() if character not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", bare).split()


def _overlap(wanted: list[str], answered: list[str]) -> float:
    if not wanted or not answered:
        return float(wanted == answered)
    common = sum((Counter(wanted) & Counter(answered)).values())
    return 2 * common / (len(wanted) + len(answered))


def right_label(example: Example, evidence: Evidence, labels: Sequence[str]) -> int:
    """Returns the number of the right label, of the word that the evidence is about."""
    return labels.index(example.labels[evidence.about])


def right_holding(example: Example, evidence: Evidence, labels: Sequence[str]) -> int:
    """Returns 1 if the label that the evidence is about holds."""
    return int(labels[evidence.about] in example.labels)


def is_exact(example: Example, answer: TextAnswer) -> bool:
    """Whether the answer is one of the right ones, or rightly none, without articles and punctuation."""
    return exact_and_f1(example, answer.labels)[0] == 1


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
        lead[i] = own[places[:, 2] == 0, 2].min() - best.logits.sum()  # of no answer in any window before the best one
        gain[i] = exact_and_f1(example, [""])[1] - exact_and_f1(example, best.labels)[1]  # if it is left unanswered
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
