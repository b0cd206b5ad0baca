"""Answers of a tenant's levels to labelled texts, and what plans and simpler ways make of them. No level is computed here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from builder.cascade.candidates import CUTOFFS, Measured
from builder.cascade.report.outcomes import Outcome, values_of
from builder.evaluation.calibration import judged
from hplm.levels.calibration import UNKNOWN, Calibration
from hplm.levels.dispatch import reroutes
from hplm.levels.plan import Plan
from hplm.levels.reliability import Bin, bins_of, calibration_error, debiased_error

DRAWS = 20  # of random re-routing
PLAIN = Calibration()  # the softmax of logits as they are (Eq. 2)

Choose = Callable[[int, np.ndarray, np.ndarray], np.ndarray]  # takes a step, texts and confidences; returns which texts go on


@dataclass(frozen=True)
class Passed:
    """All texts after one way of answering them."""

    answers: list[list[str]]
    tokens: np.ndarray  # levels x texts: what each level has read; 0: it was not asked
    watched: int | None = None  # the level in which the attention is added up that tokens receive
    going: tuple[np.ndarray, ...] = ()  # by step: the texts that went on after it
    words: int = 0  # of texts at later steps
    unread: int = 0  # those of them that pruning has left out


@dataclass(frozen=True)
class Answers:
    measured: Measured
    seed: int = 0  # of random re-routing

    @property
    def last(self) -> int:
        return len(self.measured.whole) - 1

    @cached_property
    def every(self) -> np.ndarray:
        return np.arange(len(self.measured.examples))

    @cached_property
    def hits(self) -> list[np.ndarray]:
        """By level: 1 for an answer that is right, as calibrations count it; 0 also where nothing can be read."""
        measured, delta = self.measured, max(one.delta for one in self.measured.calibrations if one is not None)
        found: list[np.ndarray] = []
        for level in measured.whole:
            cases = [
                judged(measured.task, measured.labels, example, logits, spans, delta)
                for example, logits, spans in zip(measured.examples, level.logits, measured.spans, strict=True)
            ]
            found.append(np.array([case is not None and case.is_right for case in cases], dtype=float))
        return found

    @cached_property
    def uncalibrated(self) -> Answers:
        """The same answers, whose confidence is a plain softmax."""
        return replace(self, measured=replace(self.measured, calibrations=[PLAIN] * self.last))

    def errors(self) -> np.ndarray:
        """Returns of each level that is asked how sure it is: ECE without and with calibration, then both debiased squares."""
        both = self.uncalibrated, self
        return np.array(
            [
                [calibration_error(own.bins(level)) for own in both] + [debiased_error(*own.known(level)) for own in both]
                for level in range(self.last)
            ]
        )

    def bins(self, level: int, texts: np.ndarray | None = None) -> list[Bin]:
        """Returns how often answers of a confidence are right. `texts`: the numbers of some; None: of all."""
        return bins_of(*self.known(level, texts))

    def known(self, level: int, texts: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Returns the confidences of answers, where they are known, and whether these are right."""
        texts = self.every if texts is None else texts
        sure, right = self.measured.confidences[level][texts], self.hits[level][texts]
        known = sure != UNKNOWN
        return sure[known], right[known]

    def outcome(self, passed: Passed) -> Outcome:
        measured, texts = self.measured, len(self.every)
        seconds = [measured.seconds(level, read, level == passed.watched) for level, read in enumerate(passed.tokens)]
        work = np.array(measured.depths) @ passed.tokens / measured.whole[-1].tokens
        went_on = tuple(len(own) / texts for own in passed.going)
        score, values = measured.score(self.every, passed.answers), values_of(measured, passed.answers)
        return Outcome(score, values, np.sum(seconds, axis=0), work, went_on, passed.words, passed.unread)

    def alone(self, level: int) -> Passed:
        tokens = self._no_tokens()
        tokens[level] = self.measured.whole[level].tokens
        return Passed(self.measured.answers[level], tokens)

    def through(self, plan: Plan, choose: Choose | None = None) -> Passed:
        """Takes all texts through a plan as an engine does. `choose`: which texts go on; None: those of Eq. 4."""
        measured, choose = self.measured, choose or self._by_draws(plan)
        first, *later = plan.steps
        passed = self.alone(first.level)
        logits, answers, tokens = list(measured.whole[first.level].logits), list(passed.answers), passed.tokens
        going, before, all_going = self.every[measured.in_one] if later else self.every, first.level, []
        words = read = 0
        for number, step in enumerate(later):
            known = measured.confidences[before][going] if not number else None
            sure = known if known is not None else measured.sure(before, going, [logits[i] for i in going])
            going = going[choose(number, going, sure)]
            now = measured.read(first.level, step.level, first.alpha)
            joined = measured.combined(going, [logits[i] for i in going], [now.logits[i] for i in going], step.weight)
            for i, mine, answer in zip(going, joined, measured.answers_to(going, joined), strict=True):
                logits[i], answers[i] = mine, answer
            tokens[step.level, going] = now.tokens[going]
            words, read = words + int(measured.whole[step.level].words[going].sum()), read + int(now.words[going].sum())
            all_going.append(going)
            before = step.level
        if later:
            self._answer_at_once(plan.steps[-1].level, answers, tokens)
        watched = first.level if later and first.alpha > 0 else None
        return Passed(answers, tokens, watched, tuple(all_going), words, words - read)

    def two(self, first: int, last: int, goes_on: np.ndarray) -> Passed:
        """The last of two levels answers the texts that go on, without the first one's answer."""
        goes_on = goes_on | ~self.measured.in_one
        tokens, answers = self._no_tokens(), self.measured.answers
        tokens[first] = self.measured.whole[first].tokens * self.measured.in_one
        tokens[last, goes_on] = self.measured.whole[last].tokens[goes_on]
        chosen = [answers[last if on else first][i] for i, on in enumerate(goes_on)]
        return Passed(chosen, tokens, going=(np.flatnonzero(goes_on),))

    def by_oracle(self, first: int, last: int) -> Passed:
        """Exactly the first level's wrong answers go on."""
        return self.two(first, last, self.hits[first] == 0)

    def by_hard_cut(self, first: int, last: int, cutoff: float) -> Passed:
        """An answer stands if its plain softmax is above the cutoff."""
        return self.two(first, last, self.uncalibrated.measured.confidences[first] <= cutoff)

    def cheapest_hard_cut(self, first: int, last: int, drop: float) -> float | None:
        """Returns the lowest cutoff that loses no more than so many points; None if all lose more."""
        least = self.measured.scores[last] - drop / 100
        cuts = ((cutoff, self.by_hard_cut(first, last, cutoff).answers) for cutoff in reversed(CUTOFFS) if cutoff > 0)
        return next((cutoff for cutoff, answers in cuts if self.measured.score(self.every, answers) >= least), None)

    def by_vote(self, weights: Sequence[float]) -> Passed:
        """Every level answers; each answer counts with the weight of its level (Cocktail).

        Where a row has one label, levels vote for labels. Otherwise the vote is the weighted mean of all answers.
        """
        tokens = np.array([own.tokens for own in self.measured.whole])
        joined = self._votes(weights) if self.measured.task.one_label_a_row else self._mean(weights)
        return Passed(self.measured.answers_to(self.every, joined), tokens)

    def _votes(self, weights: Sequence[float]) -> list[np.ndarray]:
        votes = [np.zeros_like(own) for own in self.measured.whole[0].logits]
        for level, weight in zip(self.measured.whole, weights, strict=True):
            for own, logits in zip(votes, level.logits, strict=True):
                own[np.arange(len(own)), logits.argmax(axis=1)] += weight
        return votes

    def _mean(self, weights: Sequence[float]) -> list[np.ndarray]:
        first, *later = self.measured.whole
        joined, total = first.logits, max(0.0, weights[0])
        for level, weight in zip(later, weights[1:], strict=True):
            total += max(0.0, weight)
            share = max(0.0, weight) / total if total else 1.0
            joined = self.measured.combined(self.every, joined, level.logits, share)
        return joined

    def by_chance(self, plan: Plan) -> Outcome:
        """As many texts go on at each step as by the plan, but random ones. Returns the mean of some draws."""
        counts = [len(own) for own in self.through(plan).going]
        random = np.random.default_rng(self.seed)

        def chosen(number: int, texts: np.ndarray, sure: np.ndarray) -> np.ndarray:
            return np.isin(texts, random.permutation(texts)[: counts[number]])

        found = [self.outcome(self.through(plan, chosen)) for _ in range(DRAWS)]
        values, seconds, work = (np.mean([getattr(one, of) for one in found], axis=0) for of in ("values", "seconds", "work"))
        return Outcome(float(np.mean([one.score for one in found])), values, seconds, work, found[0].went_on)

    def by_rank(self, plan: Plan) -> Passed:
        """As many texts go on at each step as by the plan, but exactly the least sure ones."""
        counts = [len(own) for own in self.through(plan).going]

        def chosen(number: int, texts: np.ndarray, sure: np.ndarray) -> np.ndarray:
            return np.isin(np.arange(len(texts)), np.argsort(sure, kind="stable")[: counts[number]])

        return self.through(plan, chosen)

    def _by_draws(self, plan: Plan) -> Choose:
        """The dispatcher of the engine (Eq. 4)."""

        def chosen(number: int, texts: np.ndarray, sure: np.ndarray) -> np.ndarray:
            step = plan.steps[number]
            return reroutes(sure, step.cutoff, step.slope, self.measured.draws[number, texts])

        return chosen

    def _answer_at_once(self, level: int, answers: list[list[str]], tokens: np.ndarray) -> None:
        """Lets a level alone answer texts that take several windows."""
        for i in np.flatnonzero(~self.measured.in_one):
            answers[i] = self.measured.answers[level][i]
            tokens[:, i] = 0
            tokens[level, i] = self.measured.whole[level].tokens[i]

    def _no_tokens(self) -> np.ndarray:
        return np.zeros((len(self.measured.whole), len(self.every)), dtype=np.int64)


def pair_of(plan: Plan, last: int) -> tuple[int, int]:
    """Returns the first and the last level of a plan; of all levels if it has a single one."""
    levels = [step.level for step in plan.steps]
    return (levels[0], levels[-1]) if len(levels) > 1 else (0, last)


def with_alpha(plan: Plan, alpha: float) -> Plan:
    first, *later = plan.steps
    return replace(plan, steps=(replace(first, alpha=alpha), *later))


def with_cutoff(plan: Plan, cutoff: float) -> Plan:
    *early, last = plan.steps
    return replace(plan, steps=(*(replace(step, cutoff=cutoff) for step in early), last))


def without_ensemble(plan: Plan) -> Plan:
    return replace(plan, steps=tuple(replace(step, weight=1.0) for step in plan.steps))
