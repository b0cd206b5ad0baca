"""The whole upper half without a server: every request gets exactly one answer, whatever it asks and whatever fails."""

import gc
import time
import weakref
from dataclasses import replace

import numpy as np
import pytest

from hplm.engine.engine import Engine
from hplm.engine.overlap import OVERLAPS
from hplm.engine.packing import Concat, Slotted
from hplm.engine.staging import Stager
from hplm.errors import Broken, DeadlineMissed, Internal, InvalidInput, OutOfCapacity
from hplm.plot import rows as rows_module
from hplm.plot.gathering import Gatherer
from hplm.plot.table import Table
from hplm.scheduling.queue import Queue
from testing.reference import Reference
from testing.toy import WORDS
from tests.engine.asker import Asker
from tests.support.message import mentioning, mentions

pytestmark = pytest.mark.slow


@pytest.fixture
def asker(toy):
    asker = Asker(toy.folder)
    yield asker
    asker.close()


@pytest.mark.parametrize(("policy", "packing"), [("das:rows=4", Concat), ("slotted_das:rows=4", Slotted)])
def test_the_rows_and_slots_of_a_policy_reach_the_packing(toy, monkeypatch, policy, packing):
    arrange, seen = packing.arrange, []
    monkeypatch.setattr(
        packing, "arrange", lambda own, lengths, places=None: seen.append(places) or arrange(own, lengths, places)
    )
    asker = Asker(toy.folder, policy=policy, packing=packing.__name__.lower())
    asker.wait(asker.ask("acme", [WORDS[0], WORDS[1]]))
    asker.close()
    assert seen and all(places is not None and (places.slot is not None) == (packing is Slotted) for places in seen)


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_late_failure_is_answered_and_the_next_batch_runs(toy, monkeypatch, overlap):
    asker = Asker(toy.folder, overlap=overlap)
    with monkeypatch.context() as broken:
        broken.setattr(Gatherer, "sums", lambda *_: (_ for _ in ()).throw(OSError("the disk is gone")))
        failed = asker.wait(asker.ask("acme", [WORDS[0]]))
        assert isinstance(failed, Internal) and "the disk is gone" not in str(failed)
    (rows,) = asker.wait(asker.ask("acme", [WORDS[0]]))
    assert rows.labels
    asker.close()


def test_the_service_does_not_start_if_its_hot_rows_cannot_be_locked(toy, monkeypatch):
    monkeypatch.setattr(rows_module, "_libc", type("Libc", (), {"mlock": staticmethod(lambda *_: -1)}))
    tables = [Table(path.parent) for path in (toy.folder / "plot").glob("*/*/meta.json")]
    needed = sum(3 * table.meta.row_bytes for table in tables)
    with pytest.raises(InvalidInput, match=mentioning(f"{needed:,}", "ulimit -l", "--ulimit memlock=-1", "plot_hot")):
        Asker(toy.folder, plot_hot="3")


def test_pairs_have_a_second_segment(asker, reference):
    rows = asker.wait(asker.ask("acme", [WORDS[0], WORDS[5]], [WORDS[1], WORDS[2] * 3]))
    for text, pair, got in zip([WORDS[0], WORDS[5]], [WORDS[1], WORDS[2] * 3], rows, strict=True):
        np.testing.assert_allclose(got.logits, reference.forward(text, "acme", pair), atol=1e-3)
    alone = asker.wait(asker.ask("acme", [f"{WORDS[0]} {WORDS[1]}"]))[0]
    assert np.abs(alone.logits - rows[0].logits).max() > 1e-3


def test_top_k_gives_the_best_labels_first(asker, reference):
    (rows,) = asker.wait(asker.ask("city", [WORDS[3]], top_k=3))
    logits = reference.forward(WORDS[3], "city")[0]
    assert rows.labels == [f"topic-{i}" for i in logits.argsort(descending=True)[:3]]
    assert rows.scores == pytest.approx(logits.softmax(0).sort(descending=True).values[:3].tolist(), abs=1e-4)
    np.testing.assert_allclose(rows.logits, logits[None], atol=1e-3)  # one row for all labels


def test_top_k_is_refused_for_tag(asker):
    with pytest.raises(InvalidInput, match=mentioning("top_k", "'beta'")):
        asker.ask("beta", [WORDS[0]], top_k=2)
    asker.answers.pop()  # the request was refused


def test_a_tag_row_a_word_with_its_span(asker, reference):
    text = f"{WORDS[0]} \x00  {WORDS[1]},{WORDS[2]}"
    (rows,) = asker.wait(asker.ask("beta", [text]))
    assert [text[start:stop] for start, stop in rows.spans] == [WORDS[0], "\x00", f"{WORDS[1]},{WORDS[2]}"]
    assert rows.labels[1] == "" and rows.scores[1] == 0 and (rows.logits[1] == 0).all()
    np.testing.assert_allclose(rows.logits, reference.forward(text, "beta"), atol=1e-3)


def test_logits_that_are_not_finite_are_broken_and_no_answer(asker, monkeypatch):
    run = Engine.run

    def without_numbers(self, batch):
        return (replace(computed, logits=[own * np.nan for own in computed.logits]) for computed in run(self, batch))

    monkeypatch.setattr(Engine, "run", without_numbers)
    failure = asker.wait(asker.ask("acme", [WORDS[0]]))
    assert isinstance(failure, Broken) and mentions(failure, "'acme'")
    monkeypatch.undo()
    assert not isinstance(asker.wait(asker.ask("acme", [WORDS[0]])), Exception)


def test_words_without_a_token_cost_the_engine_nothing(asker, reference, monkeypatch):
    """The answer has rows for them, but only rows with a token go through the last layer and the head."""
    read, run = [], Engine.run

    def watched(self, batch):
        read.extend(sum(sheet.rows_of) for sheet in batch.sheets)
        return run(self, batch)

    monkeypatch.setattr(Engine, "run", watched)
    text = " ".join([WORDS[0], *["\u200b"] * 500, WORDS[1]])
    rows, nothing = asker.wait(asker.ask("beta", [text, "\u200b \u200b"], [WORDS[2], WORDS[3]]))
    assert read == [3]  # two words, and the first token of a text without any
    assert len(rows.labels) == 502 and rows.labels[0] and rows.labels[501] and not any(rows.labels[1:501])
    np.testing.assert_allclose(rows.logits, reference.forward(text, "beta", WORDS[2]), atol=1e-3)
    assert nothing.labels == ["", ""] and (nothing.logits == 0).all()


def test_an_answer_with_too_much_text_is_refused_before_it_is_computed(asker):
    with pytest.raises(InvalidInput, match=mentioning(100, "20,000")):
        asker.ask("beta", ["a " * 20_000, *[WORDS[0]] * 99], truncate=True)
    with pytest.raises(InvalidInput, match=mentioning("4,018,000", "4,000,000")):
        asker.ask("acme", ["a " * 49_000] * 41, truncate=True)


def test_an_answer_of_too_many_numbers_is_refused_before_it_is_computed(asker, monkeypatch):
    monkeypatch.setattr("hplm.engine.service.MOST_NUMBERS", 100)
    with pytest.raises(InvalidInput, match=mentioning(2, 60, 100)):
        asker.ask("beta", [WORDS[0], "a " * 60], truncate=True)
    asker.answers.pop()  # the request was refused
    assert asker.wait(asker.ask("beta", [f"{WORDS[0]} a"]))[0].labels


def test_an_idle_engine_keeps_no_request(asker, monkeypatch):
    """A request keeps its tenant's files open, so deleted ones would stay on the disk until the next request."""
    requests, offer = [], Queue.offer

    def watched(self, texts):
        requests.append(weakref.ref(texts[0].request))
        return offer(self, texts)

    monkeypatch.setattr(Queue, "offer", watched)
    for number in [asker.ask(tenant, [WORDS[0]] * 3) for tenant in ("acme", "beta", "city")]:
        asker.wait(number)
    assert isinstance(asker.wait(asker.ask("acme", [WORDS[0]], deadline_ns=time.monotonic_ns() + 1)), DeadlineMissed)
    deadline = time.monotonic() + 30
    while any(request() is not None for request in requests) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert [request() for request in requests] == [None] * 4


def test_requests_are_answered_even_if_the_policy_fails(asker, reference, monkeypatch):
    def fails(*_):
        raise ZeroDivisionError("not that simple")

    monkeypatch.setattr(asker.service._line._scheduler, "_policies", [type("Broken", (), {"select": fails})()])
    for number in [asker.ask("acme", [WORDS[i]]) for i in range(3)]:
        assert asker.wait(number)[0].labels


def test_no_memory_for_a_tenants_adapter_fails_only_that_tenant(asker, monkeypatch):
    hold = Stager._hold
    own = asker.backbone.view.snapshot.find("acme").adapter

    def full(self, view, record, held):
        if record == own:
            raise MemoryError("the device is full")
        return hold(self, view, record, held)

    monkeypatch.setattr(Stager, "_hold", full)
    answers = [asker.wait(number) for number in [asker.ask(tenant, [WORDS[0]]) for tenant in ("acme", "city", "acme", "beta")]]
    assert [isinstance(answer, OutOfCapacity) for answer in answers] == [True, False, True, False]
    assert mentions(answers[0], "'acme'")


def test_the_reference_is_deterministic(toy, reference):
    assert (reference.forward(WORDS[4], "acme") == Reference.open(toy.folder).forward(WORDS[4], "acme")).all()
