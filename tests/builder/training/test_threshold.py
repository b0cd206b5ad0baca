"""The threshold above which a question is left unanswered."""

import numpy as np
import pytest

from builder.training.labelled import Example
from builder.training.tasks import training_task
from builder.training.threshold import none_shift
from hplm.tasks import TASKS

LABELS = ["start", "end", "none"]
SPANS = np.array([[0, 0, 0], [3, 0, 3], [4, 4, 8]], dtype=np.int32)
KNOWN, UNKNOWN = Example(1, "who?", "the duke", answers=((4, 8),)), Example(2, "who?", "the duke")


def logits(none):
    """Answers with `duke`, whose two logits are together 6."""
    return np.array([[9, 9, none], [0, 0, 9], [3, 3, 9]], dtype=np.float32)


@pytest.mark.parametrize(
    ("examples", "nones", "shift"),
    [
        ((KNOWN, UNKNOWN), (8, 12), -4),  # both are left unanswered: leads of 2 and 6
        ((KNOWN, UNKNOWN), (1, 3), 4),  # none is: leads of -5 and -3
        ((KNOWN, UNKNOWN), (5, 7), 0),  # right as it is
        ((UNKNOWN, KNOWN, KNOWN), (7, 8, 9), -4),  # it is best to answer always, one above the greatest lead
        ((KNOWN, KNOWN), (8, 12), 0),
        ((UNKNOWN, UNKNOWN), (1, 3), 0),
    ],
)
def test_the_shift_makes_the_examples_score_best(examples, nones, shift):
    own, spans = [logits(none) for none in nones], [SPANS] * len(nones)
    found = none_shift(LABELS, examples, spans, own)
    assert found.tolist() == [0, 0, shift]
    answers = [TASKS["span"].answer(one + found, SPANS, LABELS, passage="the duke").labels for one in own]
    before = [TASKS["span"].answer(one, SPANS, LABELS, passage="the duke").labels for one in own]
    score = training_task("span").score
    assert score(LABELS, examples, answers).main >= score(LABELS, examples, before).main


def test_a_tenant_that_always_answers_has_no_threshold():
    assert none_shift(LABELS[:2], [KNOWN, UNKNOWN], [SPANS] * 2, [logits(0)[:, :2]] * 2).tolist() == [0, 0]


@pytest.mark.parametrize("seed", range(5))
def test_no_other_threshold_scores_better(seed):
    rng = np.random.default_rng(seed)
    examples = [KNOWN if rng.random() < 0.5 else UNKNOWN for _ in range(30)]
    own = [logits(6 + none) for none in rng.normal(size=30)]

    def score(shift):
        moved = [one + shift for one in own]
        answers = [TASKS["span"].answer(one, SPANS, LABELS, passage="the duke").labels for one in moved]
        return training_task("span").score(LABELS, examples, answers).main

    best = score(none_shift(LABELS, examples, [SPANS] * 30, own))
    assert best >= max(score(np.array([0, 0, shift], dtype=np.float32)) for shift in np.linspace(-4, 4, 81))
