"""The ways of answering that a plan is compared with (Tabi, section 7.1)."""

from __future__ import annotations

from collections.abc import Sequence

from builder.cascade.report.answers import Answers, pair_of
from builder.cascade.report.outcomes import Outcome
from hplm.levels.plan import Plan

STRONG, CASCADE, INFAAS, VOTE = "strong", "cascade", "INFaaS-like", "Cocktail-like vote"
RANDOM, ORACLE = "random, same share", "oracle"


def ways_of(answers: Answers, plan: Plan, scores: Sequence[float], drop: float) -> dict[str, Outcome]:
    """Returns what each way does to the texts. `scores`: of the levels alone on other texts, which choose and weigh levels.

    INFaaS takes the cheapest level that scores at most `drop` points below the last one. Cocktail asks all levels.
    """
    within = [level for level, score in enumerate(scores) if score >= scores[-1] - drop / 100]
    outcome = answers.outcome
    return {
        STRONG: outcome(answers.alone(answers.last)),
        INFAAS: outcome(answers.alone(within[0])),
        VOTE: outcome(answers.by_vote(scores)),
        CASCADE: outcome(answers.through(plan)),
        RANDOM: answers.by_chance(plan),
        ORACLE: outcome(answers.by_oracle(*pair_of(plan, answers.last))),
    }
