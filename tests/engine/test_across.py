"""Answers of two backbones: read back from their outputs, and joined."""

from types import SimpleNamespace

import numpy as np
import pytest

from hplm.engine.across import NEEDED, answers_in, joined, onward_of
from hplm.engine.answer import CONFIDENCE, fill
from hplm.levels.calibration import UNKNOWN, Calibration
from hplm.tasks import TASKS, TextAnswer
from tests.confidence import softmax

WEIGHT = 0.6


def log_mixed(before, now):
    return np.log(WEIGHT * softmax(np.array(now)) + (1 - WEIGHT) * softmax(np.array(before)))


def tag(words, level=1, onward=""):
    """Returns the answer to a text of so many words; the last one has no token."""
    logits = np.arange(2.0 * words, dtype=np.float32).reshape(words, 2) + 1
    logits[-1] = 0
    spans = np.column_stack([np.arange(words) * 2, np.arange(words) * 2 + 1]).astype(np.int32)
    return TextAnswer([*["A"] * (words - 1), ""], np.full(words, 0.5, np.float32), logits, spans, 0.25, level, onward)


def test_answers_are_read_back_from_the_outputs_that_were_made_of_them():
    holding = TextAnswer([], np.zeros(0, np.float32), np.ones((1, 3), np.float32), np.zeros((0, 2), np.int32), 0.5, 2)
    both = TextAnswer(["b", "c"], np.ones(2, np.float32), np.ones((1, 3), np.float32), np.array([[0, 9]] * 2, np.int32))
    for task, answers in (("tag", [tag(3), tag(1, 2, "[]"), tag(2)]), ("multilabel", [holding, both])):
        outputs = fill(answers).outputs([*NEEDED, CONFIDENCE], [])
        for found, given in zip(answers_in(outputs, TASKS[task]), answers, strict=True):
            assert (found.labels, found.level, found.onward) == (given.labels, given.level, given.onward)
            assert found.confidence == pytest.approx(given.confidence)
            for name in ("scores", "logits", "spans"):
                np.testing.assert_array_equal(getattr(found, name), getattr(given, name))
        again = fill(answers_in(outputs, TASKS[task])).outputs([*NEEDED, CONFIDENCE], [])
        for name, values in outputs.items():
            np.testing.assert_array_equal(again[name], values)


def test_answers_are_read_back_without_confidences_if_nobody_wants_them():
    (found,) = answers_in(fill([tag(2)]).outputs(NEEDED, []), TASKS["tag"])
    assert found.confidence == UNKNOWN


def tenant(task, labels, levels=2):
    level = SimpleNamespace(calibration=Calibration(temperature=2.0))
    return SimpleNamespace(task_object=TASKS[task], labels=labels, all_levels=(level,) * levels)


def test_a_label_is_chosen_by_both_backbones():
    near, far = tenant("classify", ("x", "y")), tenant("classify", ("x", "y"))
    before = TextAnswer(["x"], np.ones(1, np.float32), np.array([[2.0, 1.0]], np.float32), np.array([[0, 5]], np.int32))
    now = np.array([[0.0, 3.0], [0.0, 0.0]], np.float32)  # with a row that only longer answers have
    found = joined(near, far, before, now, 1, WEIGHT, "a b c", 0)
    expected = log_mixed([[2.0, 1.0]], [[0.0, 3.0]])
    np.testing.assert_allclose(found.logits, expected, rtol=1e-6)
    assert (found.labels, found.level, found.spans.tolist()) == (["y"], 3, [[0, 5]])
    sure = np.exp(expected[0] / 2)
    assert found.confidence == pytest.approx((sure / sure.sum()).max(), rel=1e-6)
    best = joined(near, far, before, now, 2, WEIGHT, "a b c", 7)
    assert (best.labels, best.level, best.spans.tolist()) == (["y", "x"], 4, [[0, 5]] * 2)


def test_a_word_that_one_backbone_cannot_read_has_the_answer_of_the_other():
    near, far = tenant("tag", ("A", "B")), tenant("tag", ("A", "B"), 1)
    before = tag(4)
    now = np.array([[1.0, 0.0], [0.0, 0.0], [5.0, 1.0], [0.0, 0.0], [0.0, 0.0]], np.float32)
    found = joined(near, far, before, now, 1, WEIGHT, "a b c d", 0)
    np.testing.assert_allclose(found.logits[0], log_mixed(before.logits[0], now[0]), rtol=1e-6)
    np.testing.assert_allclose(found.logits[1], before.logits[1])
    np.testing.assert_allclose(found.logits[2], log_mixed(before.logits[2], now[2]), rtol=1e-6)
    assert found.labels[3] == "" and found.level == 3
    np.testing.assert_array_equal(found.spans, before.spans)


def test_a_target_without_a_calibration_makes_no_confidence():
    near, far = tenant("regress", ("value",)), tenant("regress", ("value",))
    far.all_levels = (SimpleNamespace(calibration=None),)
    before = TextAnswer(["1"], np.zeros(1, np.float32), np.array([[1.0]], np.float32), np.array([[0, 1]], np.int32), 0.9)
    found = joined(near, far, before, np.array([[2.0]], np.float32), 1, WEIGHT, "a", 0)
    assert found.labels == ["1.6"] and found.confidence == UNKNOWN


def test_a_text_goes_on_whole_or_in_runs_of_words():
    assert onward_of("[]", "a b c", None) == ("a b c", None)
    assert onward_of("[[0, 1], [4, 5], [7, 8]]", "a b c", "d e") == ("a c", "e")
