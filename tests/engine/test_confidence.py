"""The confidence of served answers: computed for requests that want it, from the logits of the whole text."""

from __future__ import annotations

import random

import pytest

from testing.reference import Reference
from tests.confidence import CALIBRATIONS, of_logits, of_passage
from tests.engine.asker import Asker
from tests.tasks import TENANTS, make_tasks, question

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    return make_tasks(tmp_path_factory.mktemp("tasks"), CALIBRATIONS)


@pytest.fixture
def asker(tasks):
    asker = Asker(tasks.folder)
    yield asker
    asker.close()


def test_every_task_in_mixed_batches_has_the_confidence_of_its_logits(tasks, asker):
    rng, reference, asked, several = random.Random(5), Reference.open(tasks.folder), [], set()
    for number in range(90):
        tenant = TENANTS[number % len(TENANTS)]
        text, pair = question(rng, tenant.task)
        asked.append((tenant.id, text, pair, asker.ask(tenant.id, [text], pair and [pair], confidence=True)))
    for tenant_id, text, pair, number in asked:
        (answer,) = asker.wait(number)
        expected = of_logits(tenant_id, answer.labels, answer.logits)
        if expected is None:
            windows = reference.windows(text, tenant_id, pair)
            expected = of_passage(windows)
            several.add((len(windows) > 1, answer.labels == [""]))
        assert answer.confidence == pytest.approx(expected, abs=1e-3 if tenant_id == "perhaps" else 1e-6), tenant_id
    assert {windows for windows, _ in several} == {none for _, none in several} == {True, False}


def test_the_best_labels_have_the_confidence_of_the_first(asker):
    texts = ["a b", "c d e"]
    alone, both = (asker.wait(asker.ask("pair", texts, top_k=top_k, confidence=True)) for top_k in (0, 2))
    assert [len(answer.labels) for answer in both] == [2, 2]
    assert [one.confidence for one in both] == pytest.approx([one.confidence for one in alone])


def test_requests_that_want_none_compute_none(asker, monkeypatch):
    wanted = asker.wait(asker.ask("pair", ["a b"], confidence=True))[0].confidence
    assert 0 < wanted < 1
    monkeypatch.setattr("hplm.tasks.confidences", None)
    monkeypatch.setattr("hplm.tasks.Task.confidence", None)
    for tenant_id, pair in (("pair", None), ("many", None), ("word", None), ("perhaps", ["b c"])):
        assert asker.wait(asker.ask(tenant_id, ["a b"], pair))[0].confidence == -1


def test_texts_of_a_batch_that_are_alike_share_one_call(asker, monkeypatch):
    calls = []

    def counted(calibrations, logits):
        calls.append(len(calibrations))
        return [0.5 if calibration else -1 for calibration in calibrations]

    monkeypatch.setattr("hplm.tasks.confidences", counted)
    answers = asker.wait(asker.ask("pair", ["a b"] * 20, confidence=True))
    assert {answer.confidence for answer in answers} == {0.5} and sum(calls) == 20 and len(calls) < 20
