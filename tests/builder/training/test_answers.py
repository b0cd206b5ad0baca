"""Scores against values computed by hand; the kept epoch; the windows, words and threshold of questions."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from builder.evaluation.evaluation import evaluate_tenant
from builder.tasks.examples import Example
from builder.tasks.lookup import Reader
from builder.tasks.losses import UNREAD
from builder.tasks.scores import by_label, confusion, is_bio, none_shift
from builder.tasks.tasks import training_task
from hplm.tasks.tasks import TASKS
from testing.toy import WORDS
from tests.builder.training.small_tenants import write
from tests.support.device import DEVICE

example = partial(Example, Path("file"))


def classified(labels):
    return [example(number, "text", labels=(label,)) for number, label in enumerate(labels)]


def test_scores_of_labels_equal_their_definitions():
    score = training_task("classify").score
    scores = score(list("abcde"), classified("aaaabbcc"), [[label] for label in [*"aaabb", "", "a", "c"]])
    f1 = [2 * 3 / (4 + 4), 2 * 1 / (2 + 2), 2 * 1 / (2 + 1)]  # d and e neither occur nor are answered
    assert (scores.rows, scores.metric, scores.main) == (8, "accuracy", pytest.approx(5 / 8))
    assert scores.values["macro_f1"] == pytest.approx(sum(f1) / 3) and scores.values["majority_share"] == pytest.approx(0.5)
    assert score(["a", "b"], classified("aa"), [["a"], ["b"]]).values["macro_f1"] == pytest.approx(1 / 3)
    pairs = confusion(classified("aaabb"), [["b"], [""], ["b"], ["b"], ["b"]])
    assert pairs == {"a": {"b": 2, "": 1}, "b": {"b": 2}} and [*pairs["a"]] == ["b", ""]  # "": no answer
    examples = [
        example(1, "t", labels=("a", "b")),
        example(2, "t", labels=()),
        example(3, "t", labels=("c",)),
    ]
    scores = training_task("multilabel").score(["a", "b", "c"], examples, [["a"], [], ["c", "a"]])
    assert scores.metric == "micro_f1" and scores.main == pytest.approx(2 * 2 / (3 + 3))
    assert scores.values["exact"] == pytest.approx(1 / 3)
    assert scores.values["macro_f1"] == pytest.approx((2 / 3 + 0 + 1) / 3)
    alone = training_task("multilabel").score(["a"], examples, [["a"], ["a"], []])  # the only label
    assert alone.values == {"micro_f1": pytest.approx(2 / 3), "macro_f1": pytest.approx(2 / 3), "exact": pytest.approx(2 / 3)}
    assert training_task("multilabel").score(["a"], examples[1:], [[], []]).values == {"micro_f1": 0, "macro_f1": 0, "exact": 1}
    rows = by_label(["a", "b", "c"], examples, [["a"], [], ["c", "a"]], in_rows=False)
    assert [tuple(row.values()) for row in rows] == [("a", 1, 2, 1, 0.6667), ("b", 1, 0, 0, 0.0), ("c", 1, 1, 1, 1.0)]
    (row,) = by_label(["a", "b"], classified("aa"), [["a"], [""]], in_rows=True)
    assert tuple(row.values()) == ("a", 2, 1, 1, 0.6667)
    swapped = by_label(["a", "b"], classified("ab"), [["b"], ["a"]], in_rows=True)  # none is right
    assert all(isinstance(row[name], int) for row in swapped for name in ("wanted", "answered", "right"))


def test_an_entity_is_correct_if_both_ends_and_its_kind_are():
    wanted = [example(1, "a b c d", labels=("B-X", "I-X", "O", "B-Y")), example(2, "a b", labels=("O", "B-X"))]
    labels = ["B-X", "B-Y", "I-X", "O"]
    answered = [["B-X", "I-X", "O", "B-X"], ["O", ""]]  # one of three entities is correct, two were answered
    scores = training_task("tag").score(labels, wanted, answered)
    assert scores.metric == "entity_f1" and scores.main == pytest.approx(2 * 1 / (3 + 2))
    assert training_task("tag").score(labels, wanted[1:], [["O", "O"]]).main == 0
    assert is_bio(labels) and not is_bio(["O", "PART"]) and not is_bio(["O", "I-X"])


def test_values_are_scored_by_correlation():
    examples = [example(number, "t", value=value) for number, value in enumerate([1.0, 2.0, 4.0])]
    scores = training_task("regress").score(["value"], examples, [["1"], ["4"], ["16"]])
    assert scores.values["spearman"] == pytest.approx(1) and 0.9 < scores.main < 1
    assert scores.values["rmse"] == pytest.approx((148 / 3) ** 0.5)
    assert training_task("regress").score(["value"], examples, [["3"]] * 3).main == 0


def test_spans_are_compared_as_squad_does():
    """Without articles and punctuation. A question without an answer is right if it is left unanswered."""
    score = training_task("span").score
    old = example(1, "who?", "It was the old man, of course.", answers=((7, 18), (11, 18)))
    known, unknown = (
        example(1, "who?", "It was the man.", answers=((7, 14),)),
        example(2, "when?", "It was the man."),
    )
    assert score([], [old], [["an Old man."]]).values == {"exact_match": 1.0, "f1": 1.0}
    assert score([], [old], [["man of course"]]).values == {"exact_match": 0.0, "f1": pytest.approx(2 * 1 / (2 + 3))}
    assert score([], [old], [["It"]]).main == score([], [known], [[""]]).main == 0
    both = score([], [known, unknown, unknown], [["the man"], [""], ["It"]])
    assert both.values == {
        "exact_match": pytest.approx(2 / 3), "f1": pytest.approx(2 / 3), "unanswerable_right": 0.5, "answerable_f1": 1.0
    }  # fmt: skip
    assert score([], [unknown], [["the"]]).values == {"exact_match": 1.0, "f1": 1.0, "unanswerable_right": 1.0}


def test_an_answer_is_learned_in_the_windows_that_have_all_of_it(store, tmp_path):
    """A passage of 120 words has windows of words 0 to 59, 30 to 89 and 60 to 119."""
    words = [WORDS[30 + i] for i in range(120)]
    passage = " ".join(words)

    def asks(first, last):
        answer = " ".join(words[first : last + 1])
        return {"text": WORDS[0], "text_pair": passage, "answers": {"text": [answer], "answer_start": [passage.index(answer)]}}

    path = write(tmp_path / "long.jsonl", [asks(1, 2), asks(40, 41), asks(59, 60), asks(29, 30), asks(119, 119)])
    task = training_task("span")
    for labels, no in ((["start", "end"], [UNREAD, UNREAD]), (["start", "end", "none"], [0, 0])):
        texts = Reader(store, "root", 1).read(task.read(path), task, labels)
        assert texts.cut == 0 and texts.lengths.tolist() == [64] * 15
        targets = [text.targets.tolist() for text in texts.texts]
        assert [targets[i : i + 3] for i in range(0, 15, 3)] == [
            [[2, 3], no, no],
            [[41, 42], [11, 12], no],
            [no, [30, 31], no],
            [[30, 31], no, no],
            [no, no, [60, 60]],
        ]


@pytest.mark.slow
def test_a_word_without_a_token_has_no_answer(tasks, tmp_path):
    """A zero-width space is a word to a client and nothing to the tokenizer. No answer is a wrong one, as above."""
    path = write(tmp_path / "odd.jsonl", [{"tokens": [WORDS[0], "\u200b", WORDS[60]], "tags": ["B-X", "O", "O"]}])
    task, labels, reader = training_task("tag"), tasks.store.tenant("word").labels, Reader(tasks.store, "bio", 1)
    texts = reader.read(task.read(path), task, labels)
    assert texts.texts[0].spans[:, 0].tolist() == [1, UNREAD, 2]
    assert reader.pack(texts, np.array([0]), DEVICE).targets.tolist() == [labels.index("B-X"), UNREAD, labels.index("O")]
    (answers,) = evaluate_tenant(tasks.store, "word", path, DEVICE).answers
    assert answers[1] == "" and {answers[0], answers[2]} <= set(labels)


LABELS = ["start", "end", "none"]
SPANS = np.array([[0, 0, 0], [3, 0, 3], [4, 4, 8], [5, 0, 0], [8, 4, 8]], dtype=np.int32)  # of two windows
KNOWN, UNKNOWN = example(1, "who?", "the duke", answers=((4, 8),)), example(2, "who?", "the duke")


@pytest.mark.parametrize("seed", range(8))
def test_no_other_threshold_for_no_answer_scores_better(seed):
    """Questions are answered with `duke`, whose two logits are together 6. Some seeds have questions of one kind alone.

    Of two windows, the one with the lower score of no answer counts.
    """
    rng = np.random.default_rng(seed)
    share = (0.0, 1.0, 0.5)[min(seed, 2)]
    examples = [KNOWN if rng.random() < share else UNKNOWN for _ in range(30)]
    own = [
        np.array([[9, 9, none], [0, 0, 9], [3, 3, 9], [9, 9, other], [0, 0, 9]], dtype=np.float32)
        for none, other in rng.normal(6, 1 + seed, (30, 2))
    ]

    def score(shift):
        answers = [TASKS["span"].answer(one + shift, SPANS, LABELS, passage="the duke").labels for one in own]
        return training_task("span").score(LABELS, examples, answers).main

    found = none_shift(LABELS, examples, [SPANS] * 30, own)
    shifts = np.linspace(-9, 9, 91) if share == 0.5 else [0.0]  # of one kind alone nothing can be learned
    assert found[2] == 0 or share == 0.5
    assert score(found) >= max(score(np.array([0, 0, shift], dtype=np.float32)) for shift in shifts)
    assert none_shift(LABELS[:2], examples, [SPANS] * 30, [one[:, :2] for one in own]).tolist() == [0, 0], "it always answers"
