"""Right answers and work of plans and of simpler ways, from logits of single levels. Nothing here is timed.

Work is counted in tokens times layers, as a share of what the full upper stack takes for the same text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from bench.measuring.cascade_material import Cascaded, Material
from builder.cascade.candidates import CUTOFFS, Measured
from builder.cascade.kept import Kept
from builder.cascade.workload import Workload
from builder.store.resumable import digest_of
from builder.training.examples import Reader
from builder.training.tasks import training_task
from hplm.levels.calibration import Calibration
from hplm.levels.dispatch import reroutes
from hplm.levels.plan import Plan
from hplm.levels.reliability import bins_of, calibration_error, debiased_error

ALPHAS = (0.5, 0.7, 0.9, 1.1)  # of Eq. 5; the paper's best ones are 0.7 and 0.9
DRAWS = 20  # of random re-routing
CASCADE, UNPRUNED, RANDOM = "cascade", "cascade, no word pruned", "random, same share"
PLAIN = Calibration()  # the softmax of logits as they are

Choose = Callable[[int, np.ndarray, np.ndarray], np.ndarray]  # takes a step, texts and confidences; returns which texts go on


@dataclass(frozen=True)
class Outcome:
    right: np.ndarray  # of each text: 1, 0, or how often it is right
    work: np.ndarray  # of each text
    went_on: tuple[float, ...] = ()  # by step: the share of the texts that went on after it
    words: int = 0  # of texts at later steps
    unread: int = 0  # those of them that pruning has left out


@dataclass(frozen=True)
class Answers:
    """The answers of one tenant's levels to some texts."""

    of: Cascaded
    measured: Measured

    @property
    def last(self) -> int:
        return len(self.measured.whole) - 1

    @cached_property
    def wanted(self) -> list[str]:
        return [example.labels[0] for example in self.measured.examples]

    @cached_property
    def every(self) -> np.ndarray:
        return np.arange(len(self.wanted))

    @cached_property
    def logits(self) -> list[np.ndarray]:
        """By level: texts x classes."""
        return [np.concatenate(own.logits) for own in self.measured.whole]

    @cached_property
    def hits(self) -> list[np.ndarray]:
        """By level: whether its answers are right."""
        return [self.right(answers) for answers in self.measured.answers]

    def right(self, answers: Sequence[Sequence[str]]) -> np.ndarray:
        return np.array([found[0] == label for found, label in zip(answers, self.wanted, strict=True)], dtype=float)

    def share(self, level: int) -> float:
        """The layers of a level, as a share of the full stack's."""
        return self.of.levels[level].layers / self.of.levels[-1].layers

    def alone(self, level: int) -> Outcome:
        return Outcome(self.hits[level], np.full(len(self.every), self.share(level)))

    @property
    def pair(self) -> tuple[int, int]:
        """The first and the last level of the dearest plan; of all levels if it has a single one, or there is none."""
        levels = [step.level for step in self.of.ladder[0].steps] if self.of.ladder else []
        return (levels[0], levels[-1]) if len(levels) > 1 else (0, self.last)

    def plain(self, level: int) -> np.ndarray:
        """The largest probability of an uncalibrated softmax (Eq. 2)."""
        return np.exp(PLAIN.log_probabilities(self.logits[level])).max(axis=1)

    def by_draws(self, plan: Plan) -> Choose:
        """The dispatcher of the engine (Eq. 4)."""

        def chosen(number: int, texts: np.ndarray, sure: np.ndarray) -> np.ndarray:
            step = plan.steps[number]
            return reroutes(sure, step.cutoff, step.slope, self.measured.draws[number, texts])

        return chosen

    def through(self, plan: Plan, choose: Choose | None = None) -> Outcome:
        """Takes all texts through a plan as an engine does."""
        measured, choose = self.measured, choose or self.by_draws(plan)
        first, *later = plan.steps
        logits = list(measured.whole[first.level].logits)
        work = np.full(len(self.every), self.share(first.level))
        whole, going, before, went_on = measured.whole[self.last].tokens, self.every, first, []
        words = read = 0
        for number, step in enumerate(later):
            sure = measured.sure(before.level, going, [logits[i] for i in going])
            going = going[choose(number, going, sure)]
            now = measured.read(first.level, step.level, first.alpha)
            joined = measured.combined(going, [logits[i] for i in going], [now.logits[i] for i in going], step.weight)
            for i, mine in zip(going, joined, strict=True):
                logits[i] = mine
            work[going] += self.share(step.level) * now.tokens[going] / whole[going]
            words += int(measured.whole[step.level].words[going].sum())
            read += int(now.words[going].sum())
            went_on.append(len(going) / len(self.every))
            before = step
        right = self.right(measured.answers_to(self.every, logits))
        return Outcome(right, work, tuple(went_on), words, words - read)

    def by_hard_cut(self, cutoff: float) -> Outcome:
        """An answer of the first level stands if its plain softmax is above the cutoff; the last level answers the others."""
        return self._two(self.plain(self.pair[0]) <= cutoff)

    def cheapest_hard_cut(self, drop: float) -> float | None:
        """Returns the lowest cutoff that loses no more than so many points; None if all lose more."""
        least = self.hits[self.last].mean() - drop / 100
        meeting = (cutoff for cutoff in reversed(CUTOFFS) if cutoff > 0 and self.by_hard_cut(cutoff).right.mean() >= least)
        return next(meeting, None)

    def hard_cut_of(self, profile: Answers, drop: float) -> Outcome:
        """`profile`: answers of the same levels, which choose the cutoff."""
        cutoff = profile.cheapest_hard_cut(drop)
        return self.by_hard_cut(cutoff) if cutoff is not None else self.alone(self.last)

    def by_oracle(self) -> Outcome:
        """Exactly the first level's wrong answers go on."""
        return self._two(self.hits[self.pair[0]] == 0)

    def _two(self, goes_on: np.ndarray) -> Outcome:
        first, last = self.pair
        work = self.share(first) + self.share(last) * goes_on
        return Outcome(np.where(goes_on, self.hits[last], self.hits[first]), work, (float(goes_on.mean()),))

    def by_vote(self, weights: Sequence[float]) -> Outcome:
        """Every level answers; each answer counts with the weight of its level (Cocktail)."""
        votes = np.zeros_like(self.logits[0])
        for logits, weight in zip(self.logits, weights, strict=True):
            votes[self.every, logits.argmax(axis=1)] += weight
        labels = self.of.tenant.labels
        right = self.right([[labels[number]] for number in votes.argmax(axis=1)])
        return Outcome(right, np.full(len(self.every), sum(self.share(level) for level in range(self.last + 1))))

    def by_chance(self, plan: Plan) -> Outcome:
        """As many texts go on at each step as by the plan, but random ones."""
        shares = self.through(plan).went_on
        random = np.random.default_rng(self.of.seed)

        def chosen(number: int, texts: np.ndarray, sure: np.ndarray) -> np.ndarray:
            going = round(shares[number] * len(self.every))
            return np.isin(texts, random.permutation(texts)[:going])

        found = [self.through(plan, chosen) for _ in range(DRAWS)]
        mean_right, mean_work = (np.mean([getattr(one, part) for one in found], axis=0) for part in ("right", "work"))
        return Outcome(mean_right, mean_work, found[0].went_on)

    def errors(self) -> np.ndarray:
        """Returns of each level that is asked how sure it is: ECE without and with calibration, then both debiased squares."""
        return np.array(
            [_errors_of(self.hits[level], self.plain(level), sure) for level, sure in enumerate(self.measured.confidences)]
        )


def _errors_of(right: np.ndarray, *confidences: np.ndarray) -> list[float]:
    return [calibration_error(bins_of(one, right)) for one in confidences] + [debiased_error(one, right) for one in confidences]


def answers_of(material: Material, cascaded: Cascaded, file: Path, kept: Path) -> Answers:
    """Computes all levels on a file of texts. `kept`: a folder in which logits stay."""
    tenant, task, store = cascaded.tenant, training_task(cascaded.tenant.task), material.store
    labelled = task.read(file)
    reader = Reader(store, tenant.domain, tenant.domain_version)
    texts = reader.read(labelled, task, tenant.labels, False)
    shared = {"texts": digest_of(file), "precision": material.precision.name}
    kept.mkdir(parents=True, exist_ok=True)
    work = Workload(
        tenant, task, cascaded.levels, labelled, reader, texts, material.precision, material.device,
        Kept(kept, shared),
    )  # fmt: skip
    return Answers(cascaded, work.measured())


@dataclass(frozen=True)
class Examined:
    """The answers of a tenant, and of its twin with an early exit, to the test texts and to those that choose."""

    test: Answers
    profile: Answers
    exit_test: Answers
    exit_profile: Answers

    def ways(self, drop: float) -> dict[str, Outcome]:
        """Returns what each way does to the test texts. Whatever a way chooses, it chooses on the other ones."""
        test, plan, last = self.test, self.test.of.ladder[0], self.test.last
        scores = [float(hits.mean()) for hits in self.profile.hits]
        meeting = [level for level in range(last + 1) if scores[level] >= scores[last] - drop / 100]
        return {
            "strong": test.alone(last),
            CASCADE: test.through(plan),
            UNPRUNED: test.through(unpruned(plan)),
            RANDOM: test.by_chance(plan),
            "oracle": test.by_oracle(),
            "softmax, hard cut": test.hard_cut_of(self.profile, drop),
            "early exit": self._early_exit(drop),
            "INFaaS-like": test.alone(meeting[0]),
            "Cocktail-like vote": test.by_vote(scores),
            "small": test.alone(0),
        }

    def _early_exit(self, drop: float) -> Outcome:
        """Texts that go on take the other layers only, as if their vectors were still there."""
        found = self.exit_test.hard_cut_of(self.exit_profile, drop)
        return replace(found, work=np.minimum(found.work, 1.0))


def unpruned(plan: Plan) -> Plan:
    return Plan(tuple(replace(step, alpha=0.0) for step in plan.steps))


def pruned(plan: Plan, alpha: float) -> Plan:
    first, *later = plan.steps
    return Plan((replace(first, alpha=alpha), *later))


def lost(strong: Mapping[str, Sequence[Outcome]], other: Mapping[str, Sequence[Outcome]]) -> tuple[float, float]:
    """Returns how many points fewer another way scores, and the standard error of that.

    Both take the outcomes of each question, one for each seed. Texts are paired; seeds of a text are not independent.
    """
    means, variances = [], []
    for question, own in strong.items():
        apart = np.mean([mine.right - theirs.right for mine, theirs in zip(own, other[question], strict=True)], axis=0)
        means.append(apart.mean())
        variances.append(apart.var(ddof=1) / len(apart))
    return 100 * float(np.mean(means)), 100 * float(np.sqrt(np.sum(variances))) / len(means)


def figures_of(found: Sequence[Examined], drop: float) -> dict[str, Any]:
    outcomes: dict[str, dict[str, list[Outcome]]] = {}
    for one in found:
        for way, outcome in one.ways(drop).items():
            outcomes.setdefault(way, {}).setdefault(one.test.of.question.name, []).append(outcome)
    strong, cascade = outcomes["strong"], outcomes[CASCADE]
    before, after, *squares = np.concatenate([one.test.errors() for one in found]).mean(axis=0)
    debiased = np.sqrt(np.maximum(squares, 0.0))
    points, error = lost(strong, cascade)
    words = sum(one.words for own in cascade.values() for one in own)
    return {
        "points_lost": round(points, 3),
        "points_lost_error": round(error, 3),
        "random_points_lost": round(lost(strong, outcomes[RANDOM])[0], 3),
        "pruned_share": round(sum(one.unread for own in cascade.values() for one in own) / max(1, words), 4),
        "pruning_points": round(lost(outcomes[UNPRUNED], cascade)[0], 3),
        "ece_before": round(float(before), 4),
        "ece_after": round(float(after), 4),
        "ece_ratio": round(float(after / before), 3),
        "debiased_before": round(float(debiased[0]), 4),
        "debiased_after": round(float(debiased[1]), 4),
        "ways": {way: _described(strong, own) for way, own in outcomes.items()},
        "pruning": {f"{alpha:g}": _swept(found, alpha) for alpha in ALPHAS},
        "tenants": {one.test.of.tenant.id: _of_tenant(one.test) for one in found},
    }


def _described(strong: Mapping[str, Sequence[Outcome]], own: Mapping[str, Sequence[Outcome]]) -> dict[str, float]:
    points, error = lost(strong, own)
    every = [one for outcomes in own.values() for one in outcomes]
    return {
        "accuracy": round(float(np.mean([one.right.mean() for one in every])), 4),
        "points_lost": round(points, 3),
        "error": round(error, 3),
        "work": round(float(np.mean([one.work.mean() for one in every])), 3),
        "went_on": round(float(np.mean([one.went_on[0] if one.went_on else 0.0 for one in every])), 3),
    }


def _swept(found: Sequence[Examined], alpha: float) -> dict[str, float]:
    """Returns what so much pruning does to the dearest plans with several steps."""
    words = unread = 0
    points: list[float] = []
    for test in (one.test for one in found):
        plan = test.of.ladder[0]
        if len(plan.steps) == 1:
            continue
        own, whole = test.through(pruned(plan, alpha)), test.through(unpruned(plan))
        words, unread = words + own.words, unread + own.unread
        points.append(100 * float((whole.right - own.right).mean()))
    return {"share": round(unread / max(1, words), 4), "points": round(float(np.mean(points or [0.0])), 3)}


def _of_tenant(test: Answers) -> dict[str, Any]:
    plan = test.of.ladder[0]
    return {
        "texts": len(test.every),
        "accuracy": [round(float(hits.mean()), 4) for hits in test.hits],
        "plan": [[step.level, step.cutoff, step.slope, step.alpha, step.weight] for step in plan.steps],
        "cascade": round(float(test.through(plan).right.mean()), 4),
        "rungs": len(test.of.ladder),
        "ece": test.errors()[:, :2].round(4).tolist(),
    }
