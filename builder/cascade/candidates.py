"""Candidates: what each plan would score and cost, from answers of single levels that are computed once (Tabi, section 5).

They are few, because the best of many owes its score to chance: it seems better than it is on the texts that chose it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, pairwise

import numpy as np

from builder.cascade.sheet_times import SheetTimes
from builder.training.labelled import Example
from builder.training.tasks import TrainingTask
from hplm.levels.calibration import Calibration
from hplm.levels.dispatch import reroutes
from hplm.levels.plan import Plan, Step

CUTOFFS = tuple(round(0.95 - 0.05 * step, 2) + 0.0 for step in range(38))  # of Eq. 4, down to -0.9; + 0.0: no -0.0
SLOPE = 64.0  # of Eq. 4: nearly a hard cut, halfway between the cutoff and 1: so a cutoff below 0 has a meaning
ALPHAS = tuple(round(0.3 + 0.1 * step, 1) for step in range(13))  # of Eq. 5; the paper's best ones are 0.7 and 0.9
MOST_LOSS = 0.01  # of the score of a level that reads pruned texts, with the error of this loss
MOST_LEVELS = 3  # of a plan
MOST_TAIL = 1.5  # times the tail of a plan's slowest level alone
TAIL = 75  # the percentile that is held to this
DOUBT = 1.5  # standard errors that are taken off a score before it is trusted
GROUPS = 20  # of texts, one of which is left out at a time


@dataclass(frozen=True)
class Answered:
    """The answers of one level to all texts."""

    logits: list[np.ndarray]  # of each text: answer rows x classes
    tokens: np.ndarray  # that it has read of each text
    words: np.ndarray  # the same, in words


@dataclass(frozen=True)
class Measured:
    """All that is known of the levels, the shallowest first. The last one is the tenant's own."""

    task: TrainingTask
    labels: Sequence[str]
    examples: Sequence[Example]
    spans: Sequence[np.ndarray]  # of each text: its answer rows x 3
    draws: np.ndarray  # steps x texts: which texts go on by chance
    whole: Sequence[Answered]  # by level
    pruned: Callable[[int, int, float], Answered] | None  # takes the first level, a later one and alpha; None: never prune
    calibrations: Sequence[Calibration | None]  # by level, without the last one
    depths: Sequence[float]  # by level: its layers, as a share of the own level's
    times: Sequence[SheetTimes]  # by level
    in_one: np.ndarray  # whether a text is computed in one piece; others go to a plan's last level at once

    @cached_property
    def answers(self) -> list[list[list[str]]]:
        """By level: its answers to all texts."""
        every = np.arange(len(self.examples))
        return [self.answers_to(every, one.logits) for one in self.whole]

    @cached_property
    def confidences(self) -> list[np.ndarray]:
        """By level, without the last one: how sure its answers are."""
        every = np.arange(len(self.examples))
        return [self.sure(level, every, one.logits) for level, one in enumerate(self.whole[:-1])]

    @cached_property
    def scores(self) -> list[float]:
        """By level: its score alone."""
        every = np.arange(len(self.examples))
        return [self.score(every, answers) for answers in self.answers]

    def score(self, texts: np.ndarray, answers: Sequence[Sequence[str]]) -> float:
        return self.task.score(self.labels, [self.examples[i] for i in texts], answers).main

    def answers_to(self, texts: np.ndarray, logits: Sequence[np.ndarray]) -> list[list[str]]:
        served, labels = self.task.served, self.labels
        if served.read_each is not None and len(texts):
            spans = np.concatenate([self.spans[i] for i in texts])
            read = served.read_each(np.concatenate(logits), spans, [labels] * len(texts), [None] * len(texts))
            return [answer.labels for answer in read]
        return [
            served.answer(own, self.spans[i], labels, passage=self.examples[i].pair or "").labels
            for i, own in zip(texts, logits, strict=True)
        ]

    def sure(self, level: int, texts: np.ndarray, logits: Sequence[np.ndarray]) -> np.ndarray:
        served, labels, calibration = self.task.served, self.labels, self.calibrations[level]
        assert calibration is not None  # as `profile_tenant` checks
        return np.array(
            [served.confidence(calibration, own, self.spans[i], labels) for i, own in zip(texts, logits, strict=True)]
        )

    def combined(
        self, texts: np.ndarray, before: Sequence[np.ndarray], now: Sequence[np.ndarray], weight: float
    ) -> list[np.ndarray]:
        """Returns the logits of both answers together."""
        served = self.task.served
        assert served.combined is not None  # as `profile_tenant` checks
        if served.reads_first_token and len(texts):
            joined = served.combined(np.concatenate(before), np.concatenate(now), weight, self.spans[texts[0]])
            return list(joined[:, None])
        combined, spans = served.combined, [self.spans[i] for i in texts]
        return [combined(mine, own, weight, at) for mine, own, at in zip(before, now, spans, strict=True)]

    def share(self, tokens: np.ndarray) -> float:
        """Returns how large a sheet is with so many tokens of each text, as a share of the tokens of the first level's batch.

        A level of another backbone has other tokens of the same texts.
        """
        return float(tokens.sum() / self.whole[0].tokens.sum())

    def seconds(self, level: int, tokens: np.ndarray, watched: bool = False) -> np.ndarray:
        """Returns the seconds that each text takes in a level, which reads so many tokens of it, as a part of a batch.

        `watched`: whether the attention that tokens receive is added up, for pruning.
        """
        return tokens * self.times[level].of_token(self.times[0].batch * self.share(tokens), watched)

    def alone(self, level: int) -> np.ndarray:
        """Returns the seconds of each text in a level that answers all of them by itself, in full batches of its own."""
        times = self.times[level]
        return self.whole[level].tokens * times.of_token(times.batch)

    def read(self, first: int, level: int, alpha: float) -> Answered:
        """Returns what a level answers that reads the words which the plan's first level has left."""
        if not alpha or self.pruned is None:
            return self.whole[level]
        return self.pruned(first, level, alpha)

    def below(self, level: int, answers: Sequence[Sequence[str]]) -> tuple[float, float]:
        """Returns how much less than a level alone these answers to all texts score, and the standard error of that.

        The error is that of the difference on the same texts, by leaving out a part of them at a time (jackknife).
        """
        whole, *others = np.subtract(self._alone_in_parts[level], self._in_parts(answers))
        return float(whole), float(np.sqrt((GROUPS - 1) * np.var(others)))

    @cached_property
    def _alone_in_parts(self) -> list[list[float]]:
        return [self._in_parts(answers) for answers in self.answers]

    def _in_parts(self, answers: Sequence[Sequence[str]]) -> list[float]:
        """Returns the score of all answers, then the scores without one group of texts at a time."""
        group = np.arange(len(answers)) % GROUPS
        parts = [np.flatnonzero(group != left_out) for left_out in (GROUPS, *range(GROUPS))]
        return [self.score(texts, [answers[int(i)] for i in texts]) for texts in parts]


@dataclass(frozen=True)
class Candidate:
    """A plan, and what it does to the texts."""

    plan: Plan
    score: float
    mean: float  # seconds a text, as a part of a batch, without waiting
    tail: float  # the 75th percentile of the seconds
    pruned: float  # share of the words of texts that have gone on which the later steps do not read
    shares: tuple[float, ...] = ()  # by step: how large its sheet is, as a share of the batch's tokens
    error: float = 0.0  # standard error of the score beside that of the tenant's own level, on the same texts

    @property
    def trusted(self) -> float:
        """The score less what it may owe to chance."""
        return self.score - DOUBT * self.error

    @property
    def reached(self) -> list[float]:
        """By step: the share of the texts that it computes."""
        return [step.reached for step in self.plan.steps]


def candidates(measured: Measured) -> Iterator[Candidate]:
    """Yields single levels, and plans of two and three levels that may end anywhere.

    All steps of a plan have the same cutoff and slope. The first one prunes: the later ones read the words that it has left.
    """
    levels = range(len(measured.whole))
    alone = [tried(measured, (level,)) for level in levels]
    yield from alone
    for size in range(2, MOST_LEVELS + 1):
        for chosen in combinations(levels, size):
            most = MOST_TAIL * max(alone[level].tail for level in chosen)
            yield from (one for one in _plans(measured, chosen) if one.tail <= most)


def _plans(measured: Measured, levels: tuple[int, ...]) -> Iterator[Candidate]:
    """Yields plans with a lower and lower cutoff while they score no less than their levels do on average."""
    least = float(np.mean([measured.scores[level] for level in levels]))
    for alpha in sorted({0.0, most_pruning(measured, levels)}):
        for cutoff in CUTOFFS:
            found = tried(measured, levels, cutoff, SLOPE, alpha)
            if found.score < least:
                break
            yield found


def most_pruning(measured: Measured, levels: tuple[int, ...]) -> float:
    """Returns the alpha up to which no later level loses too much. It is chosen before any plan is tried."""
    first, *later = levels
    most = 0.0
    for alpha in ALPHAS if measured.pruned is not None else ():
        for level in later:
            every = np.arange(len(measured.examples))
            loss, error = measured.below(level, measured.answers_to(every, measured.read(first, level, alpha).logits))
            if loss + error > MOST_LOSS:
                return most
        most = alpha
    return most


def tried(measured: Measured, levels: Sequence[int], cutoff: float = 0.0, slope: float = 0.0, alpha: float = 0.0) -> Candidate:
    """Takes all texts through a plan as an engine does, with answers that are known already. The last answer counts alone."""
    *early, last = levels
    first = levels[0]
    steps = [Step(level, cutoff, slope, alpha if level == first else 0.0) for level in early]
    now, answers = measured.whole[first], list(measured.answers[first])
    texts = len(measured.examples)
    read = np.zeros((len(levels), texts), dtype=np.int64)  # tokens that each step reads
    read[0] = now.tokens
    going = np.flatnonzero(measured.in_one) if early else np.arange(texts)
    reached, left, all_words = [len(going)], 0, 0
    for number, (before, level) in enumerate(pairwise(levels)):
        sure = measured.sure(before, going, [now.logits[i] for i in going]) if number else measured.confidences[before][going]
        going = going[reroutes(sure, cutoff, slope, measured.draws[number, going])]
        now = measured.read(first, level, alpha)
        read[number + 1, going] = now.tokens[going]
        left, all_words = left + int(now.words[going].sum()), all_words + int(measured.whole[level].words[going].sum())
        for i, answer in zip(going, measured.answers_to(going, [now.logits[i] for i in going]), strict=True):
            answers[i] = answer
        reached.append(len(going))
    if early:
        windows = np.flatnonzero(~measured.in_one)
        read[:, windows] = 0
        read[-1, windows] = measured.whole[last].tokens[windows]
        for i in windows:
            answers[i] = measured.answers[last][i]
        reached[-1] += len(windows)
    profiled = tuple(replace(step, reached=count / texts) for step, count in zip([*steps, Step(last)], reached, strict=True))
    passes = [measured.depths[level] * float(own.sum()) for level, own in zip(levels, read, strict=True)]
    seconds = np.sum(
        [measured.seconds(level, own, step.alpha > 0) for level, own, step in zip(levels, read, profiled, strict=True)], axis=0
    )
    return Candidate(
        plan=Plan(profiled, cost=sum(passes) / float(measured.whole[last].tokens.sum())),
        score=measured.score(np.arange(texts), answers),
        mean=float(seconds.mean()),
        tail=float(np.percentile(seconds, TAIL)),
        pruned=1 - left / all_words if all_words else 0.0,
        shares=tuple(measured.share(own) for own in read),
        error=measured.below(-1, answers)[1],
    )
