import numpy as np
import pytest

from builder.training.scores import score


def test_scores_are_those_of_the_definitions():
    targets = np.array([0, 0, 0, 0, 1, 1, 2, 2])
    answers = np.array([0, 0, 0, 1, 1, -1, 0, 2])
    scores = score(targets, answers, labels=5)
    f1 = [2 * 3 / (4 + 4), 2 * 1 / (2 + 2), 2 * 1 / (2 + 1)]  # labels 3 and 4 neither occur nor are answered
    assert scores.rows == 8
    assert scores.accuracy == pytest.approx(5 / 8)
    assert scores.macro_f1 == pytest.approx(np.mean(f1))
    assert scores.majority_share == pytest.approx(0.5)


def test_an_answer_that_never_occurs_costs_macro_f1():
    assert score(np.array([0, 0]), np.array([0, 1]), labels=2).macro_f1 == pytest.approx(np.mean([2 / 3, 0]))
