"""The figures of one tenant: Table 2, Table 3 and Figs. 6 to 9 of Tabi, and what each part of a cascade does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from builder.cascade.candidates import CUTOFFS, Candidate
from builder.cascade.report.answers import Answers, Passed, pair_of, with_alpha, with_cutoff, without_ensemble
from builder.cascade.report.outcomes import (
    Difference,
    Outcome,
    left_out,
    points_between,
    pooled,
    ratio_between,
    values_of,
)
from builder.cascade.report.subject import Subject
from builder.cascade.report.ways import CASCADE, INFAAS, ORACLE, RANDOM, STRONG, VOTE, ways_of
from builder.cascade.selection import described
from hplm.levels.plan import Plan
from hplm.levels.reliability import calibration_error

ALPHAS = (0.5, 0.7, 0.9, 1.1)  # of Eq. 5; the paper's best ones are 0.7 and 0.9
PERCENTILES = (1, 25, 50, 75, 99)  # of latency: those of the paper's boxes
PARTS = 10  # of the confidences from 0 to 1, for the shares that go on
FEWEST = 40  # texts, of which a score says something

# Replacements for one part of a plan.
PLAIN_SOFTMAX, RANDOM_TEXTS, BY_RANK = "plain softmax, same c and k", "random texts go on, same share", "hard cut, same share"
UNPRUNED, LAST_ALONE = "no word pruned", "last answer alone"


@dataclass(frozen=True)
class Examined:
    """A tenant's answers to texts that have chosen nothing."""

    subject: Subject
    answers: Answers
    drop: float

    @cached_property
    def ways(self) -> dict[str, Outcome]:
        """Returns the paper's ways, in the order of its table, with the single levels behind strong."""
        answers, names = self.answers, self.subject.profile.names
        scores = [level["score"] for level in self.subject.profile.report["levels"]]
        found = ways_of(answers, self.plan, scores, self.drop)
        single = {level_way(name): answers.outcome(answers.alone(level)) for level, name in enumerate(names[:-1])}
        return {STRONG: found[STRONG], **single, **{way: found[way] for way in (INFAAS, VOTE, CASCADE, RANDOM, ORACLE)}}

    @property
    def plan(self) -> Plan:
        return self.subject.plan

    @property
    def texts(self) -> str:
        """Names the texts: tenants with the same ones are not independent."""
        unseen = self.subject.unseen
        return f"{unseen.digest} {len(self.answers.every)}"

    def figures(self, done: Callable[[str], None]) -> dict[str, Any]:
        """`done`: is told what comes next."""
        figures = self._about()
        done("ways")
        figures["ways"] = {way: self._way(outcome) for way, outcome in self.ways.items()}
        figures["against"] = {way: self._gained(self.ways[way]) for way in (INFAAS, VOTE)}
        done("plans of the profile")
        figures["targets"] = [self._promised(one) for one in self.subject.profile.front]
        if self.subject.rung is None:
            return figures
        done("confidence")
        figures["confidence"] = self._confidence()
        done("parts")
        figures["parts"] = {
            part: {**self._gained(outcome), "went_on": round(outcome.went_on[0], 4)}
            for part, outcome in self._without_parts().items()
        }
        figures["dispatch"] = self._dispatch()
        done("cutoffs")
        cutoffs = sorted({*CUTOFFS, self.plan.steps[0].cutoff})
        figures["cutoffs"] = [{"cutoff": cutoff, **self._swept(with_cutoff(self.plan, cutoff))} for cutoff in cutoffs]
        if self.answers.measured.pruned is not None:
            alphas = sorted({0.0, *ALPHAS, self.plan.steps[0].alpha})
            figures["alphas"] = [self._on_texts_that_went_on(alpha, done) for alpha in alphas]
        return figures

    def _about(self) -> dict[str, Any]:
        subject, profile = self.subject, self.subject.profile
        return {
            "tenant": subject.tenant.id,
            "version": subject.tenant.version,
            "task": subject.tenant.task,
            "metric": profile.report["metric"],
            "file": str(subject.unseen.file),
            "texts": len(self.answers.every),
            "left_out": subject.unseen.left_out,
            "precision": profile.asked["precision"],
            "levels": [{"name": level.name, "layers": level.layers} for level in subject.levels],
            "plan": asdict(self.plan) | {"described": self._described(self.plan)},
            "rung": subject.rung,
        }

    def _described(self, plan: Plan) -> str:
        return described(Candidate(plan, 0.0, 0.0, 0.0, 0.0), self.subject.profile.names)

    @cached_property
    def _passed(self) -> Passed:
        return self.answers.through(self.plan)

    def _way(self, own: Outcome) -> dict[str, Any]:
        strong, seconds = self.ways[STRONG], 1000 * own.seconds
        return {
            "score": round(own.score, 4),
            **_numbers("points", points_between(own, strong)),
            "mean_ms": round(float(seconds.mean()), 4),
            "percentiles_ms": [round(float(one), 4) for one in np.percentile(seconds, PERCENTILES)],
            **_numbers("mean_over_strong", ratio_between(own.seconds, strong.seconds)),
            "work": round(float(own.work.mean()), 4),
            "went_on": [round(share, 4) for share in own.went_on],
        }

    def _promised(self, candidate: Candidate) -> dict[str, Any]:
        """Returns what a plan of the profile scores and costs there, and here."""
        own, profile = self.answers.outcome(self.answers.through(candidate.plan)), self.subject.profile
        return {
            "plan": self._described(candidate.plan),
            "profiled": {
                "points": round(100 * (candidate.score - profile.own), 3),
                "points_error": round(100 * candidate.error, 3),
                "mean_ms": round(1000 * candidate.mean, 4),
            },
            "score": round(own.score, 4),
            **_numbers("points", points_between(own, self.ways[STRONG])),
            "mean_ms": round(1000 * float(own.seconds.mean()), 4),
            "chosen": candidate.plan == self.plan,
        }

    def _confidence(self) -> dict[str, Any]:
        """Fig. 6: how true the confidence of the plan's first level is, and which answers go on."""
        answers, (level, _) = self.answers, pair_of(self.plan, self.answers.last)
        sides = {"before": answers.uncalibrated, "after": answers}
        if answers.measured.task.is_number:
            del sides["before"]  # a number has no softmax
        found: dict[str, Any] = {"level": self.subject.profile.names[level]}
        for name, side in sides.items():
            bins = side.bins(level)
            found[name] = {"ece": round(calibration_error(bins), 4), "bins": [asdict(one) for one in bins]}

        def gain(texts: np.ndarray) -> float:
            before, after = (calibration_error(side.bins(level, texts)) for side in sides.values())
            return before - after

        if len(sides) == 2:
            values = left_out(gain, len(answers.every))
            found |= _numbers("ece_gain", Difference(found["before"]["ece"] - found["after"]["ece"], values), 4)
        sure, went_on = answers.measured.confidences[level], np.isin(answers.every, self._passed.going[0])
        part = np.clip((sure * PARTS).astype(int), 0, PARTS - 1)
        members = [(part == number) & answers.measured.in_one for number in range(PARTS)]
        found["parts"] = [
            {"texts": int(own.sum()), "went_on": round(float(went_on[own].mean()), 4) if own.any() else None} for own in members
        ]
        return found

    def _without_parts(self) -> dict[str, Outcome]:
        """Returns the plan without each of its parts."""
        answers, plan = self.answers, self.plan
        found = {RANDOM_TEXTS: self.ways[RANDOM], BY_RANK: answers.outcome(answers.by_rank(plan))}
        if not answers.measured.task.is_number:
            found = {PLAIN_SOFTMAX: answers.outcome(answers.uncalibrated.through(plan)), **found}
        if plan.steps[0].alpha and answers.measured.pruned is not None:
            found[UNPRUNED] = answers.outcome(answers.through(with_alpha(plan, 0.0)))
        return {**found, LAST_ALONE: answers.outcome(answers.through(without_ensemble(plan)))}

    def _gained(self, other: Outcome) -> dict[str, Any]:
        """Returns how many points more the plan scores than another way, and its cost over that of the other."""
        own = self.ways[CASCADE]
        return {
            **_numbers("points", points_between(own, other)),
            **_numbers("mean_over_other", ratio_between(own.seconds, other.seconds)),
        }

    def _dispatch(self) -> dict[str, Any]:
        """Returns how texts that were answered early and texts that went on are answered, and would be by the other level."""
        answers, (first, last) = self.answers, pair_of(self.plan, self.answers.last)
        went_on = self._passed.going[0]
        early = np.setdiff1d(answers.every[answers.measured.in_one], went_on)  # others are answered by the last level at once
        levels = answers.measured.answers
        return {
            "early": self._apart(early, self._passed.answers, levels[last]),
            "went_on": self._apart(went_on, self._passed.answers, levels[first]),
        }

    def _apart(self, texts: np.ndarray, own: list[list[str]], other: list[list[str]]) -> dict[str, Any]:
        """Returns what some texts score, and how many points more than with other answers."""
        found: dict[str, Any] = {"share": round(len(texts) / len(self.answers.every), 4)}
        if len(texts) < FEWEST:
            return found | {"score": None}
        return found | self._score(texts, own, other)

    def _score(self, texts: np.ndarray, own: list[list[str]], other: list[list[str]]) -> dict[str, Any]:
        measured = self.answers.measured
        mine, theirs = (measured.score(texts, [some[i] for i in texts]) for some in (own, other))
        values = values_of(measured, own, texts) - values_of(measured, other, texts)
        return {"score": round(mine, 4), **_numbers("points", Difference(100 * (mine - theirs), 100 * values))}

    def _swept(self, plan: Plan) -> dict[str, Any]:
        own = self.answers.outcome(self.answers.through(plan))
        return {
            "score": round(own.score, 4),
            **_numbers("points", points_between(own, self.ways[STRONG])),
            "mean_ms": round(1000 * float(own.seconds.mean()), 4),
            "went_on": round(own.went_on[0], 4),
            "chosen": plan == self.plan,
        }

    def _on_texts_that_went_on(self, alpha: float, done: Callable[[str], None]) -> dict[str, Any]:
        """Fig. 9 and Table 3: what pruning does to texts that went on, in the levels after the first."""
        done(f"pruning, alpha {alpha:g}")
        texts, whole = self._passed.going[0], self.answers.through(with_alpha(self.plan, 0.0))
        own = self.answers.through(with_alpha(self.plan, alpha))
        found = {"alpha": alpha, "chosen": alpha == self.plan.steps[0].alpha, "score": None}
        found["pruned"] = round(own.unread / max(1, own.words), 4)
        if len(texts) < FEWEST:
            return found
        mine, theirs = (self._later_seconds(passed)[texts] for passed in (own, whole))
        return {
            **found,
            **self._score(texts, own.answers, whole.answers),
            "mean_ms": round(1000 * float(mine.mean()), 4),
            **_numbers("mean_over_whole", ratio_between(mine, theirs)),
        }

    def _later_seconds(self, passed: Passed) -> np.ndarray:
        tokens = passed.tokens.copy()
        tokens[self.plan.steps[0].level] = 0
        return self.answers.outcome(Passed(passed.answers, tokens)).seconds


def level_way(name: str) -> str:
    return f"level {name}"


def _numbers(name: str, found: Difference, digits: int = 3) -> dict[str, float]:
    return {name: round(found.value, digits), f"{name}_error": round(found.error, digits)}


def across(examined: Sequence[Examined]) -> dict[str, Any]:
    """Returns what each way does on average over sets of texts, which count alike (see `pooled`)."""
    common = [way for way in examined[0].ways if all(way in one.ways for one in examined)]
    found: dict[str, Any] = {}
    for way in common:
        sets: dict[str, tuple[list[Difference], list[Difference]]] = {}
        for one in examined:
            points, ratios = sets.setdefault(one.texts, ([], []))
            own, strong = one.ways[way], one.ways[STRONG]
            points.append(points_between(own, strong))
            ratios.append(ratio_between(own.seconds, strong.seconds))
        (points, points_error), (ratio, ratio_error) = (
            pooled({texts: pair[which] for texts, pair in sets.items()}) for which in (0, 1)
        )
        found[way] = {
            "points": round(points, 3), "points_error": round(points_error, 3),
            "mean_over_strong": round(ratio, 3), "mean_over_strong_error": round(ratio_error, 3),
            "work": round(float(np.mean([one.ways[way].work.mean() for one in examined])), 4),
        }  # fmt: skip
    return found
