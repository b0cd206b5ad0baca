"""Scores against values computed by hand. Scores of libraries are tested only where we prepare their input."""

import pytest

from builder.training.course import Course
from builder.training.labelled import Example
from builder.training.scores import Scores, confusion, is_bio
from builder.training.tasks import training_task


def classified(labels):
    return [Example(number, "text", labels=(label,)) for number, label in enumerate(labels)]


def test_scores_of_labels_equal_their_definitions():
    scores = training_task("classify").score(
        list("abcde"), classified("aaaabbcc"), [[label] for label in [*"aaabb", "", "a", "c"]]
    )
    f1 = [2 * 3 / (4 + 4), 2 * 1 / (2 + 2), 2 * 1 / (2 + 1)]  # d and e neither occur nor are answered
    assert scores.rows == 8 and scores.metric == "accuracy"
    assert scores.main == pytest.approx(5 / 8)
    assert scores.values["macro_f1"] == pytest.approx(sum(f1) / 3)
    assert scores.values["majority_share"] == pytest.approx(0.5)


def test_an_answered_label_that_never_occurs_lowers_macro_f1():
    assert training_task("classify").score(["a", "b"], classified("aa"), [["a"], ["b"]]).values["macro_f1"] == pytest.approx(
        1 / 3
    )


def test_confusion_counts_words_without_an_answer_separately():
    assert confusion(["a", "b"], ["a", "a", "b"], ["b", "", "b"]).tolist() == [[0, 1, 1], [0, 1, 0]]


def test_an_entity_is_correct_if_both_ends_and_its_kind_are():
    pytest.importorskip("seqeval", reason="comes with the extra 'build'")
    wanted = [Example(1, "a b c d", labels=("B-X", "I-X", "O", "B-Y")), Example(2, "a b", labels=("O", "B-X"))]
    labels = ["B-X", "B-Y", "I-X", "O"]
    answered = [["B-X", "I-X", "O", "B-X"], ["O", ""]]  # one of three entities is correct, two were answered
    scores = training_task("tag").score(labels, wanted, answered)
    assert scores.metric == "entity_f1" and scores.main == pytest.approx(2 * 1 / (3 + 2))
    assert training_task("tag").score(labels, wanted[1:], [["O", "O"]]).main == 0
    assert is_bio(labels) and not is_bio(["O", "PART"]) and not is_bio(["O", "I-X"])


def test_multilabel_scores_count_each_label():
    examples = [Example(1, "t", labels=("a", "b")), Example(2, "t", labels=()), Example(3, "t", labels=("c",))]
    scores = training_task("multilabel").score(["a", "b", "c"], examples, [["a"], [], ["c", "a"]])
    assert scores.metric == "micro_f1" and scores.main == pytest.approx(2 * 2 / (3 + 3))
    assert scores.values["exact"] == pytest.approx(1 / 3)
    assert scores.values["macro_f1"] == pytest.approx((2 / 3 + 0 + 1) / 3)


def test_values_are_scored_by_correlation():
    pytest.importorskip("scipy", reason="comes with the extra 'build'")
    examples = [Example(number, "t", value=value) for number, value in enumerate([1.0, 2.0, 4.0])]
    scores = training_task("regress").score(["value"], examples, [["1"], ["4"], ["16"]])
    assert scores.values["spearman"] == pytest.approx(1) and 0.9 < scores.main < 1
    assert scores.values["rmse"] == pytest.approx((148 / 3) ** 0.5)
    assert training_task("regress").score(["value"], examples, [["3"]] * 3).main == 0


def test_spans_are_compared_without_articles_and_punctuation():
    example = Example(1, "who?", "It was the old man, of course.", answers=((7, 18), (11, 18)))
    exact = training_task("span").score([], [example], [["an Old man."]])
    assert exact.metric == "f1" and exact.values == {"exact_match": 1.0, "f1": 1.0}
    partly = training_task("span").score([], [example], [["man of course"]])
    assert partly.values == {"exact_match": 0.0, "f1": pytest.approx(2 * 1 / (2 + 3))}
    assert training_task("span").score([], [example], [["It"]]).main == 0


def test_unanswerable_questions_are_right_if_they_are_left_unanswered():
    known, unknown = Example(1, "who?", "It was the man.", answers=((7, 14),)), Example(2, "when?", "It was the man.")
    score = training_task("span").score
    both = score([], [known, unknown, unknown], [["the man"], [""], ["It"]])
    assert both.values == {
        "exact_match": pytest.approx(2 / 3), "f1": pytest.approx(2 / 3), "unanswerable_right": 0.5, "answerable_f1": 1.0
    }  # fmt: skip
    assert score([], [known], [[""]]).main == 0
    assert score([], [unknown], [["the"]]).values == {"exact_match": 1.0, "f1": 1.0, "unanswerable_right": 1.0}  # as SQuAD 2


@pytest.mark.parametrize(
    "doubt, scores, best, kept",
    [
        (0.0, (0.80, 0.77, 0.75), 1, 1),
        (0.0, (0.70, 0.80, 0.79), 2, 2),
        (1.0, (0.80, 0.77, 0.75), 1, 2),  # with 100 texts, 0.80 and 0.77 count as equal, but 0.80 and 0.75 do not
        (1.0, (0.80, 0.75, 0.74), 1, 1),
        (1.0, (0.70, 0.80, 0.79), 2, 3),
    ],
)
def test_of_epochs_that_do_not_differ_surely_the_last_is_kept(doubt, scores, best, kept):
    course = Course()
    taken = [course.takes(epoch, Scores(100, "f1", {"f1": score}), 1.0, doubt) for epoch, score in enumerate(scores, start=1)]
    assert (course.best_epoch, course.kept_epoch) == (best, kept) and taken[kept - 1] and not any(taken[kept:])
