"""The upper half passes requests to the engine within its limits. `test_encoder_machine` tests random runs."""

import time

import numpy as np
import pytest
import torch

from hplm.adapters.slots import Slots
from hplm.engine.engine import Engine
from hplm.engine.service import TICKET_SECONDS
from hplm.errors import DeadlineMissed, Draining, InvalidInput, NoTenant, OutOfCapacity
from research.papers.packings import Concat, Slotted
from testing.toy import WORDS
from tests.engine.asker import Asker
from tests.support.message import mentioning, mentions
from tests.support.wait import eventually

pytestmark = pytest.mark.slow


@pytest.fixture
def asker(toy):
    asker = Asker(toy.folder)
    yield asker
    asker.close()


@pytest.mark.parametrize(("policy", "packing"), [("das:rows=4", Concat), ("slotted_das:rows=4", Slotted)])
def test_the_rows_and_slots_of_a_policy_reach_the_packing(toy, monkeypatch, policy, packing):
    lay, seen = packing.lay, []
    monkeypatch.setattr(packing, "lay", lambda own, lengths, places=None: seen.append(places) or lay(own, lengths, places))
    asker = Asker(toy.folder, policy=policy, packing=packing.__name__.lower())
    asker.wait(asker.ask("acme", [WORDS[0], WORDS[1]]))
    asker.close()
    assert seen and all(places is not None and (places.slot is not None) == (packing is Slotted) for places in seen)


def test_top_k_gives_the_best_labels_first(asker, reference):
    (rows,) = asker.wait(asker.ask("city", [WORDS[3]], top_k=3))
    logits = reference.forward(WORDS[3], "city")[0]
    assert rows.labels == [f"topic-{i}" for i in logits.argsort(descending=True)[:3]]
    assert rows.scores == pytest.approx(logits.softmax(0).sort(descending=True).values[:3].tolist(), abs=1e-4)
    np.testing.assert_allclose(rows.logits, logits[None], atol=1e-3)  # one row for all labels


def test_words_without_a_token_have_their_rows_and_cost_the_engine_nothing(asker, reference, monkeypatch):
    read, run = [], Engine.run

    def watched(self, batch):
        read.extend(sum(sheet.rows_of) for sheet in batch.sheets)
        return run(self, batch)

    monkeypatch.setattr(Engine, "run", watched)
    text = " ".join([WORDS[0], "\x00 ", *["\u200b"] * 500, f"{WORDS[1]},{WORDS[3]}"])
    rows, nothing = asker.wait(asker.ask("beta", [text, "\u200b \u200b"], [WORDS[2], WORDS[3]]))
    assert read == [3]  # two words, and the first token of a text without any
    assert [text[start:stop] for start, stop in rows.spans] == text.split()
    assert len(rows.labels) == 503 and rows.labels[0] and rows.labels[502] and not any(rows.labels[1:502])
    np.testing.assert_allclose(rows.logits, reference.forward(text, "beta", WORDS[2]), atol=1e-3)
    assert nothing.labels == ["", ""] and (nothing.logits == 0).all()


def test_an_answer_that_would_be_too_large_is_refused_before_it_is_computed(asker, monkeypatch):
    with pytest.raises(InvalidInput, match=mentioning("4,018,000", "4,000,000")):
        asker.ask("acme", ["a " * 49_000] * 41, truncate=True)
    monkeypatch.setattr("hplm.engine.service.MOST_NUMBERS", 100)
    with pytest.raises(InvalidInput, match=mentioning(2, 60, 100)):
        asker.ask("beta", [WORDS[0], "a " * 60], truncate=True)
    asker.answers.pop()  # the request was refused
    assert asker.wait(asker.ask("beta", [f"{WORDS[0]} a"]))[0].labels


@pytest.mark.parametrize("step", ["hplm.engine.encoder.read_answers", "hplm.engine.request.Request.joined"])
def test_an_answer_for_which_there_is_no_memory_says_so(asker, monkeypatch, step):
    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(step, fail)
        assert isinstance(asker.wait(asker.ask("acme", [WORDS[0]], top_k=1)), OutOfCapacity)
    assert asker.wait(asker.ask("acme", [WORDS[0]]))[0].labels


def test_no_memory_for_a_tenants_adapter_fails_only_that_tenant(asker, monkeypatch):
    hold = Slots.hold
    own = asker.backbone.view.snapshot.find("acme").adapter

    def full(self, record, records):
        if record == own:
            raise MemoryError("the device is full")
        return hold(self, record, records)

    monkeypatch.setattr(Slots, "hold", full)
    answers = [asker.wait(number) for number in [asker.ask(tenant, [WORDS[0]]) for tenant in ("acme", "city", "acme", "beta")]]
    assert [isinstance(answer, OutOfCapacity) for answer in answers] == [True, False, True, False]
    assert mentions(answers[0], "'acme'")


FORMS = {  # its age, what is changed in its head, and why it is refused
    "good": (TICKET_SECONDS - 5, lambda head: {}, None),
    "too old: it would be a key that nobody can revoke": (TICKET_SECONDS + 5, lambda head: {}, DeadlineMissed),
    "of an unknown tenant": (0, lambda head: {"uid": 999}, NoTenant),
    "of another export, which one model may still have": (0, lambda head: {"export": head.export ^ 1}, Draining),
}


@pytest.mark.parametrize(("seconds", "changes", "error"), FORMS.values(), ids=FORMS)
def test_only_a_form_that_may_be_answered_is_taken(asker, seconds, changes, error):
    view, waited_ns, answers = asker.backbone.view, 10**12, []  # at the front door
    arrival = {"arrival_ns": time.monotonic_ns() - seconds * 10**9 - waited_ns, "waited_ns": waited_ns}
    form = asker.lookup.resolve(view, view.snapshot.find("acme"), [WORDS[0]], **arrival)
    form.head = form.head._replace(**changes(form.head))
    if error is None:
        asker.service.submit(form, answers.append)
        asker.wait(asker.ask("acme", [WORDS[0]]))
        eventually(lambda: answers)
    else:
        with pytest.raises(error):
            asker.service.submit(form, answers.append)
        assert not answers
