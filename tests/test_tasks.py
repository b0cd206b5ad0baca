"""The rows that each task reads, and its answers to logits made by hand."""

from dataclasses import replace

import numpy as np
import pytest

from builder.tasks.tasks import training_task
from hplm.errors import Broken, InvalidInput
from hplm.lookup.lookup import Lookup
from hplm.tasks.tasks import TASKS, check_backbone, find_task
from testing.toy import CHAT, CONFIG, WORDS
from tests.support.message import refusing

WHOLE = np.array([[0, 0, 9]], dtype=np.int32)
PIECES = np.array([[0, 0, 0], [4, 0, 2], [5, 3, 6], [6, 7, 9], [7, 9, 13]], dtype=np.int32)  # of a passage, after the first row


def test_a_backbone_has_its_tasks_and_others_are_named():
    check_backbone("generate", CHAT)
    check_backbone("tag", CONFIG)
    for find, given in (
        (find_task, ("guess",)), (training_task, ("guess",)),
        (check_backbone, ("generate", CONFIG)), (check_backbone, ("tag", CHAT)),
    ):  # fmt: skip
        with refusing(InvalidInput, *(repr(getattr(one, "name", one)) for one in given)):
            find(*given)


def test_a_snapshot_of_a_later_version_fails_only_the_tenants_whose_task_is_unknown(reference):
    view = reference.backbone.view
    tenant, lookup = view.snapshot.find("acme"), Lookup(reference.backbone)
    with pytest.raises(Broken, match=r"'acme'.*'guess'"):
        lookup.resolve(view, replace(tenant, task="guess"), [WORDS[0]], None, False)
    assert len(lookup.resolve(view, tenant, [WORDS[0]], None, False).spans) == 1


def test_multilabel_returns_the_labels_that_hold_the_most_probable_first_and_does_not_overflow():
    rows = TASKS["multilabel"].answer(np.array([[0.0, -0.1, 3.0]], dtype=np.float32), WHOLE, ["a", "b", "c"])
    assert rows.labels == ["c", "a"]  # a probability of one half is enough
    assert rows.scores == pytest.approx([1 / (1 + np.exp(-3)), 0.5])
    assert rows.logits.shape == (1, 3) and rows.spans.tolist() == [[0, 9], [0, 9]]
    with np.errstate(over="raise"):
        far = TASKS["multilabel"].answer(np.array([[-300.0, 300.0]], dtype=np.float32), WHOLE, ["a", "b"])
    assert far.labels == ["b"] and far.scores.tolist() == [1.0]


def test_multilabel_returns_the_likeliest_labels_whatever_their_probability():
    logits = np.array([[-2.0, -0.1, 3.0]], dtype=np.float32)
    two, all_ = (TASKS["multilabel"].answer(logits, WHOLE, ["a", "b", "c"], top_k) for top_k in (2, 3))
    assert two.labels == ["c", "b"] and all_.labels == ["c", "b", "a"]
    assert all_.scores == pytest.approx(1 / (1 + np.exp([-3, 0.1, 2]))) and all_.spans.tolist() == [[0, 9]] * 3
    same = TASKS["multilabel"].same
    assert same(all_, TASKS["multilabel"].answer(logits, WHOLE, ["a", "b", "c"])) and same(all_, two)
    assert not same(all_, TASKS["multilabel"].answer(logits + 1, WHOLE, ["a", "b", "c"], 3))


def test_regress_returns_the_value_as_logits_and_as_label():
    rows = TASKS["regress"].answer(np.array([[2.5]], dtype=np.float32), WHOLE, ["value"])
    assert rows.labels == ["2.5"] and rows.logits.tolist() == [[2.5]] and rows.scores.tolist() == [0.0]


@pytest.mark.parametrize(("none", "label", "span"), [(9.5, "cde fghijk", [3, 13]), (10.5, "", [0, 0])])
def test_span_leaves_a_question_unanswered_if_that_scores_higher(none, label, span):
    logits = np.array([[99, 99, none], [0, 9, 50], [6, 0, 50], [0, 0, 50], [0, 4, 50]], dtype=np.float32)
    rows = TASKS["span"].answer(logits, PIECES, ["start", "end", "none"], passage="ab cde fghijk")
    assert (rows.labels, rows.spans.tolist(), rows.logits.tolist()) == ([label], [span], [[6, 4, none]])
    start, end = (np.exp([none / 2, *logits[1:, side]]) / np.exp([none / 2, *logits[1:, side]]).sum() for side in (0, 1))
    assert rows.scores[0] == pytest.approx(start[0] * end[0] if not label else start[2] * end[4])
