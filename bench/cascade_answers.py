"""Right answers and work of plans and of simpler ways, from logits of single levels. Nothing here is timed.

Work is counted in tokens times layers, as a share of what the full upper stack takes for the same text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.cascade_material import Cascaded, Material
from builder.cascade.kept import Kept
from builder.cascade.report.answers import Answers, pair_of, with_alpha
from builder.cascade.report.outcomes import Outcome, points_between, points_lost
from builder.cascade.report.ways import CASCADE, RANDOM, STRONG, ways_of
from builder.cascade.workload import Workload
from builder.store.resumable import digest_of
from builder.training.examples import Reader
from builder.training.tasks import training_task

ALPHAS = (0.5, 0.7, 0.9, 1.1)  # of Eq. 5; the paper's best ones are 0.7 and 0.9
UNPRUNED = "cascade, no word pruned"


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
        Kept(kept, shared), cascaded.times,
    )  # fmt: skip
    return Answers(work.measured(), cascaded.seed)


@dataclass(frozen=True)
class Examined:
    """The answers of a tenant, and of its twin with an early exit, to the test texts and to those that choose."""

    of: Cascaded
    test: Answers
    profile: Answers
    exit_test: Answers
    exit_profile: Answers

    def ways(self, drop: float) -> dict[str, Outcome]:
        """Returns what each way does to the test texts. Whatever a way chooses, it chooses on the other ones."""
        test, plan = self.test, self.of.ladder[0]
        exits = hard_cut(self.exit_test, self.exit_profile, (0, self.exit_test.last), drop)
        return {
            **ways_of(test, plan, self.profile.measured.scores, drop),
            UNPRUNED: test.outcome(test.through(with_alpha(plan, 0.0))),
            "softmax, hard cut": hard_cut(test, self.profile, pair_of(plan, test.last), drop),
            # Texts that go on take the other layers only, as if their vectors were still there.
            "early exit": replace(exits, work=np.minimum(exits.work, 1.0)),
            "small": test.outcome(test.alone(0)),
        }


def hard_cut(test: Answers, profile: Answers, pair: tuple[int, int], drop: float) -> Outcome:
    """A hard cut of two levels by plain softmax. `profile`: answers of the same levels, which choose the cutoff."""
    cutoff = profile.cheapest_hard_cut(*pair, drop)
    return test.outcome(test.by_hard_cut(*pair, cutoff) if cutoff is not None else test.alone(test.last))


def figures_of(found: Sequence[Examined], drop: float) -> dict[str, Any]:
    outcomes: dict[str, dict[str, list[Outcome]]] = {}
    for one in found:
        for way, outcome in one.ways(drop).items():
            outcomes.setdefault(way, {}).setdefault(one.of.question.name, []).append(outcome)
    strong, cascade = outcomes[STRONG], outcomes[CASCADE]
    before, after, *squares = np.concatenate([one.test.errors() for one in found]).mean(axis=0)
    debiased = np.sqrt(np.maximum(squares, 0.0))
    points, error = points_lost(strong, cascade)
    words = sum(one.words for own in cascade.values() for one in own)
    return {
        "points_lost": round(points, 3),
        "points_lost_error": round(error, 3),
        "random_points_lost": round(points_lost(strong, outcomes[RANDOM])[0], 3),
        "pruned_share": round(sum(one.unread for own in cascade.values() for one in own) / max(1, words), 4),
        "pruning_points": round(points_lost(outcomes[UNPRUNED], cascade)[0], 3),
        "ece_before": round(float(before), 4),
        "ece_after": round(float(after), 4),
        "ece_ratio": round(float(after / before), 3),
        "debiased_before": round(float(debiased[0]), 4),
        "debiased_after": round(float(debiased[1]), 4),
        "ways": {way: _described(strong, own) for way, own in outcomes.items()},
        "pruning": {f"{alpha:g}": _swept(found, alpha) for alpha in ALPHAS},
        "tenants": {one.of.tenant.id: _of_tenant(one) for one in found},
    }


def _described(strong: Mapping[str, Sequence[Outcome]], own: Mapping[str, Sequence[Outcome]]) -> dict[str, float]:
    points, error = points_lost(strong, own)
    every = [one for outcomes in own.values() for one in outcomes]
    return {
        "accuracy": round(float(np.mean([one.score for one in every])), 4),
        "points_lost": round(points, 3),
        "error": round(error, 3),
        "work": round(float(np.mean([one.work.mean() for one in every])), 3),
        "went_on": round(float(np.mean([one.went_on[0] if one.went_on else 0.0 for one in every])), 3),
    }


def _swept(found: Sequence[Examined], alpha: float) -> dict[str, float]:
    """Returns what so much pruning does to the dearest plans with several steps."""
    words = unread = 0
    points: list[float] = []
    for test, plan in ((one.test, one.of.ladder[0]) for one in found):
        if len(plan.steps) == 1:
            continue
        own, whole = (test.outcome(test.through(with_alpha(plan, used))) for used in (alpha, 0.0))
        words, unread = words + own.words, unread + own.unread
        points.append(points_between(whole, own).value)
    return {"share": round(unread / max(1, words), 4), "points": round(float(np.mean(points or [0.0])), 3)}


def _of_tenant(found: Examined) -> dict[str, Any]:
    test, ladder = found.test, found.of.ladder
    return {
        "texts": len(test.every),
        "accuracy": [round(score, 4) for score in test.measured.scores],
        "plan": [[step.level, step.cutoff, step.slope, step.alpha, step.weight] for step in ladder[0].steps],
        "cascade": round(test.outcome(test.through(ladder[0])).score, 4),
        "rungs": len(ladder),
        "ece": test.errors()[:, :2].round(4).tolist(),
    }
