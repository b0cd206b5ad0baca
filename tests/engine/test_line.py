"""Waiting and running requests: limits, deadlines, failures, closing. Each request gets exactly one answer."""

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hplm.adapters.record import Record
from hplm.engine.engine import Engine
from hplm.engine.request import WHOLE, Text
from hplm.errors import DeadlineMissed, Draining, Internal, OutOfCapacity, QueueFull
from hplm.tenants.snapshot import Tenant
from testing.toy import WORDS
from tests.engine.asker import Asker
from tests.support.answers import Comparison
from tests.support.message import mentions
from tests.support.wait import eventually


class Gate:
    """Holds the engine's next batch until the gate is opened, or makes it fail."""

    def __init__(self, monkeypatch, failure=None):
        self.opened, self.reached = threading.Event(), threading.Event()
        run = Engine.run

        def gated(engine, batch):
            self.reached.set()
            assert self.opened.wait(60)
            if failure is not None:
                raise failure
            return run(engine, batch)

        monkeypatch.setattr(Engine, "run", gated)


def test_a_request_that_expires_while_it_waits_is_answered_and_the_rest_is_served(toy, monkeypatch):
    gate, asker = Gate(monkeypatch), Asker(toy.folder)
    computing = asker.ask("acme", [WORDS[0]])
    assert gate.reached.wait(60)
    staged = asker.ask("acme", [WORDS[1]])  # chosen while the first one computes
    eventually(lambda: not len(asker.service._pipeline._line))
    expiring = asker.ask("acme", [WORDS[2]], deadline_ns=time.monotonic_ns() + 1)
    waiting = asker.ask("acme", [WORDS[3]])
    gate.opened.set()
    assert isinstance(asker.wait(expiring), DeadlineMissed)
    for number in (computing, staged, waiting):
        assert not isinstance(asker.wait(number), Exception)
    asker.close()


def test_a_full_queue_refuses_new_requests_and_keeps_waiting_ones(toy, monkeypatch):
    gate, asker = Gate(monkeypatch), Asker(toy.folder, queue_texts="3")
    first = asker.ask("acme", [WORDS[0]])
    assert gate.reached.wait(60)
    second = asker.ask("acme", [WORDS[0]])
    eventually(lambda: not len(asker.service._pipeline._line))
    third = asker.ask("acme", [WORDS[0]] * 2)
    with pytest.raises(QueueFull):
        asker.ask("acme", [WORDS[0]] * 2)
    asker.answers.pop()  # the request was refused
    gate.opened.set()
    for number in (first, second, third):
        assert not isinstance(asker.wait(number), Exception)
    asker.close()


def test_a_full_queue_takes_a_place_from_the_tenant_that_holds_most(toy, monkeypatch):
    gate, asker = Gate(monkeypatch), Asker(toy.folder, queue_texts="4")
    first = asker.ask("acme", [WORDS[0]])
    assert gate.reached.wait(60)
    second = asker.ask("acme", [WORDS[0]])
    eventually(lambda: not len(asker.service._pipeline._line))
    third, fourth = asker.ask("acme", [WORDS[0]] * 2), asker.ask("acme", [WORDS[0]] * 2)
    other = asker.ask("city", [WORDS[0]])
    assert isinstance(asker.wait(fourth), QueueFull)
    gate.opened.set()
    for number in (first, second, third, other):
        assert not isinstance(asker.wait(number), Exception)
    asker.close()
    assert all(len(answers) == 1 for answers in asker.answers)


def test_an_engine_that_fails_answers_all_requests_and_continues(toy, monkeypatch):
    with monkeypatch.context() as patched:
        gate = Gate(patched, failure=RuntimeError("device lost"))
        asker = Asker(toy.folder)
        numbers = [asker.ask("acme", [WORDS[i]] * 3) for i in range(5)]
        gate.opened.set()
        for number in numbers:
            answer = asker.wait(number)
            assert isinstance(answer, Internal) and "device lost" not in str(answer)
    assert not isinstance(asker.wait(asker.ask("acme", [WORDS[0]])), Exception)
    asker.close()


def test_closing_serves_accepted_requests_and_refuses_later_ones(toy):
    asker = Asker(toy.folder)
    numbers = [asker.ask("acme", [WORDS[i]]) for i in range(50)]
    asker.service.close()
    assert all(not isinstance(asker.wait(number), Exception) for number in numbers)
    with pytest.raises(Draining):
        asker.ask("acme", [WORDS[0]])


def test_closing_with_a_stuck_engine_answers_every_request(toy, monkeypatch, tmp_path):
    monkeypatch.setattr("hplm.engine.service.DRAIN_SECONDS", 0.2)
    gate, asker = Gate(monkeypatch), Asker(toy.folder, batch_tokens="64", journal=str(tmp_path / "journal.jsonl"))
    numbers = [asker.ask("acme", [WORDS[i]] * 20) for i in range(8)]
    assert gate.reached.wait(60)
    asker.service.close()
    assert all(isinstance(asker.wait(number), Draining) for number in numbers)  # also those that the engine holds
    gate.opened.set()
    for thread in asker.service._pipeline._threads:
        thread.join(60)
        assert not thread.is_alive()
    assert all(len(answers) == 1 for answers in asker.answers)


def test_a_passage_counts_for_the_memory_limit():
    numbers = np.zeros((1, 3), dtype=np.int32)
    tenant = Tenant("acme", 1, 1, "root", 1, "span", ("start", "end"), Record("head-16.bank", 0, 1, 1), None)
    of = {"tenant": tenant, "tenant_number": 1, "backbone": 0, "plan": tenant.plans[0]}
    request = SimpleNamespace(arrival_ns=0, deadline_ns=0, priority=0, shares=WHOLE, **of)
    short, long = (Text(request, 0, numbers, numbers, numbers, "水" * length).bytes for length in (1, 100_000))
    assert long - short >= 199_000


def test_a_failure_of_the_instruments_changes_no_answer(toy, monkeypatch):
    asker = Asker(toy.folder)
    first = asker.ask("acme", [WORDS[0]])
    asker.wait(first)

    def fail(*_):
        raise RuntimeError("the instruments are broken")

    for name in ("started", "computed"):
        monkeypatch.setattr(asker.service.served[0].instruments, name, fail)
    second, third = asker.ask("acme", [WORDS[0]]), asker.ask("acme", [WORDS[1]])
    assert [answer.labels for answer in asker.wait(second)] == [answer.labels for answer in asker.wait(first)]
    assert not isinstance(asker.wait(third), Exception)
    asker.close()


@pytest.mark.parametrize("step", ["hplm.engine.pipeline.read_answers", "hplm.engine.request.Request.joined"])
def test_an_answer_for_which_there_is_no_memory_says_so(toy, monkeypatch, step):
    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    asker = Asker(toy.folder)
    with monkeypatch.context() as patched:
        patched.setattr(step, fail)
        assert isinstance(asker.wait(asker.ask("acme", [WORDS[0]], top_k=1)), OutOfCapacity)
    assert not isinstance(asker.wait(asker.ask("acme", [WORDS[0]])), Exception)
    asker.close()


@pytest.mark.parametrize("step", ["started", "finished", "take"])
def test_a_failure_of_the_scheduler_ends_no_thread(toy, monkeypatch, step):
    asker, failures = Asker(toy.folder), iter([RuntimeError("a bug")])
    asker.wait(asker.ask("acme", [WORDS[0]]))
    whole = getattr(asker.service._pipeline._line, step)

    def fail_once(*args):
        result = whole(*args) if step == "finished" else None
        for failure in failures:
            raise failure
        return result if step == "finished" else whole(*args)

    monkeypatch.setattr(asker.service._pipeline._line, step, fail_once)
    for number in (asker.ask("acme", [WORDS[1]]), asker.ask("acme", [WORDS[2]]), asker.ask("acme", [WORDS[3]])):
        answer = asker.wait(number)
        assert not isinstance(answer, Exception) or isinstance(answer, Internal)
    assert not isinstance(asker.wait(asker.ask("acme", [WORDS[4]])), Exception)
    asker.close()


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("can't allocate memory")])
def test_a_batch_for_which_there_is_no_memory_is_computed_in_halves(toy, reference, monkeypatch, error):
    asker, run, refused = Asker(toy.folder), Engine.run, []

    def short(self, batch):
        if not refused and len(batch.texts) > 1:
            refused.append(len(batch.texts))
            raise error
        return run(self, batch)

    monkeypatch.setattr(Engine, "run", short)
    number = asker.ask("acme", WORDS[:5])
    comparison = Comparison()
    for text, rows in zip(WORDS[:5], asker.wait(number), strict=True):
        comparison.add("acme", rows.logits, reference.forward(text, "acme").numpy())
    comparison.assert_equal("fp32")
    assert refused
    asker.close()


def test_without_memory_for_halves_the_texts_are_refused_and_the_engine_continues(toy, monkeypatch):
    asker, run, sizes = Asker(toy.folder), Engine.run, []

    def short(self, batch):
        sizes.append(len(batch.texts))
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Engine, "run", short)
    failed = asker.wait(asker.ask("acme", WORDS[:4]))
    assert isinstance(failed, OutOfCapacity) and mentions(str(failed), "batch_tokens")
    assert sizes[0] == 4 and set(sizes[1:]) <= {2}
    monkeypatch.setattr(Engine, "run", run)
    assert len(asker.wait(asker.ask("acme", WORDS[:4]))) == 4
    asker.close()
