"""A pipeline of several stages: batches overlap, failures are answered once, closing drains."""

import os
import random
import threading
from dataclasses import replace

import pytest
import torch

from hplm.engine.engine import Engine
from hplm.engine.in_flight import read
from hplm.errors import Draining, Internal
from testing.reference import Reference
from testing.toy import CONFIG, TENANTS, WORDS, make_toy, random_text
from tests.engine.asker import Asker, stages_of
from tests.support.answers import Comparison
from tests.support.wait import eventually

TWO, THREE = stages_of(1, 4), stages_of(0, 2, 4)


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    return make_toy(tmp_path_factory.mktemp("deep"), replace(CONFIG, upper_layers=5))


@pytest.fixture(scope="module")
def reference(deep):
    return Reference.open(deep.folder)


class Gates:
    """Holds each batch in each stage until its gate is opened, or makes it fail there. Batches are numbered as they start."""

    def __init__(self, monkeypatch, stages):
        self.last = len(stages) - 1
        self.reached = []  # batch and stage, in order
        self._open, self._failures, self._changed = set(), {}, threading.Condition()
        enter, run = Engine.enter, Engine.run
        monkeypatch.setattr(Engine, "enter", lambda own, batch, stage: (self._pass(batch, stage), enter(own, batch, stage)))
        monkeypatch.setattr(Engine, "run", lambda own, batch: (self._pass(batch, self.last), run(own, batch))[1])

    def open(self, batch, stage, failure=None):
        with self._changed:
            self._open.add((batch, stage))
            self._failures[batch, stage] = failure
            self._changed.notify_all()

    def _pass(self, batch, stage):
        here = batch.number, stage
        with self._changed:
            self.reached.append(here)
            assert self._changed.wait_for(lambda: here in self._open, 60)
            failure = self._failures[here]
        if failure is not None:
            raise failure

    def arrive(self, batch, stage):
        eventually(lambda: (batch, stage) in self.reached)


@pytest.fixture
def gates(monkeypatch):
    return Gates(monkeypatch, TWO)


def batches_of_one(deep, stages=TWO, shown=-1):
    """Every batch holds one text: texts of other tenants do not fit into its one slot."""
    return Asker(deep.folder, stages=stages, shown=shown, slots=str(len(stages) + 1), admission="false", policy="fcfs")


@pytest.mark.parametrize(
    "stages, changes",
    [
        (TWO, {}), (THREE, {}), (TWO, {"packing": "slotted", "policy": "slotted_das:rows=4"}), (THREE, {"packing": "turbo"}),
        (TWO, {"overlap": "no_retrieval"}), (THREE, {"overlap": "no_swapping", "commit_ms": "0.5"}),
    ],
)  # fmt: skip
def test_mixed_traffic_equals_the_reference(deep, reference, stages, changes):
    asker, rng, asked = Asker(deep.folder, stages=stages, slots="9", batch_tokens="96", **changes), random.Random(1), []
    for _ in range(60):
        tenant, texts = rng.choice(TENANTS).id, [random_text(rng, 20) for _ in range(rng.choice([1, 1, 3]))]
        asked.append((tenant, texts, asker.ask(tenant, texts)))
    comparison = Comparison()
    for tenant, texts, number in asked:
        for text, rows in zip(texts, asker.wait(number), strict=True):
            comparison.add(tenant, rows.logits, reference.forward(text, tenant).numpy())
    comparison.assert_equal("fp32")
    asker.close()


def test_a_batch_computes_in_the_first_stage_while_the_one_before_is_in_the_second(deep, monkeypatch, gates):
    asker, chosen = batches_of_one(deep), []
    scheduler = asker.service._pipeline._line._scheduler
    choose = scheduler.choose
    monkeypatch.setattr(scheduler, "choose", lambda *given: (chosen.append(choose(*given)), chosen[-1])[1])
    numbers = [asker.ask(tenant.id, [WORDS[0]]) for tenant in TENANTS[:5]]
    gates.open(1, 0)
    gates.arrive(1, 1)
    gates.arrive(2, 0)
    assert asker.service.computing_s > 0 and not any(asker.answers)
    gates.open(2, 0)
    gates.arrive(3, 0)  # three batches: one in each stage, and one that waits for the second stage
    eventually(lambda: sum(map(bool, chosen[:-1])) >= 3)  # another one was asked for
    assert len(asker.service._pipeline._line) == 2, "a fourth batch was chosen"
    for batch in range(1, 6):
        gates.open(batch, 0)
        gates.open(batch, 1)
    assert all(not isinstance(asker.wait(number), Exception) for number in numbers)
    asker.close()
    for stage in (0, 1):
        assert [batch for batch, at in gates.reached if at == stage] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("stage", [0, 1])
def test_a_failure_in_a_stage_is_answered_once_and_the_next_batch_is_served(deep, gates, stage):
    asker = batches_of_one(deep)
    numbers = [asker.ask(tenant.id, [WORDS[0]]) for tenant in TENANTS[:3]]
    for batch in (1, 2, 3):
        for at in (0, 1):
            gates.open(batch, at, RuntimeError("the stage is broken") if (batch, at) == (2, stage) else None)
    answers = [asker.wait(number) for number in numbers]
    assert [isinstance(answer, Internal) for answer in answers] == [False, True, False]
    asker.close()  # asserts that each is answered once
    asker.service._pipeline._release_computed()
    assert not any(sum(slots._pins) for slots in asker.service.served[0].stager.slots().values())


@pytest.mark.parametrize("stage", [0, 1])
def test_a_batch_whose_device_fails_is_shown_when_the_process_ends(deep, monkeypatch, gates, stage):
    memory, seen = os.memfd_create("batches"), []
    asker = batches_of_one(deep, shown=memory)
    pipeline = asker.service._pipeline
    monkeypatch.setattr(pipeline, "_device_failed", lambda: seen.append({mark.tenant_id for mark in read(memory)}))
    for at in (0, 1):
        gates.open(1, at, RuntimeError("CUDA error: unspecified launch failure") if at == stage else None)
    assert isinstance(asker.wait(asker.ask("acme", [WORDS[0]])), Internal)
    assert seen == [{"acme"}]
    asker.close()
    assert not list(read(memory))
    os.close(memory)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_batch_for_which_a_stage_has_no_memory_is_computed_in_halves(deep, reference, gates, stage):
    asker = Asker(deep.folder, stages=TWO, slots="9")
    number = asker.ask("acme", WORDS[:4])
    for batch in (1, 2, 3):
        for at in (0, 1):
            gates.open(batch, at, torch.OutOfMemoryError("CUDA out of memory") if (batch, at) == (1, stage) else None)
    comparison = Comparison()
    for text, rows in zip(WORDS[:4], asker.wait(number), strict=True):
        comparison.add("acme", rows.logits, reference.forward(text, "acme").numpy())
    comparison.assert_equal("fp32")
    assert (3, 1) in gates.reached
    asker.close()


def test_closing_serves_what_was_accepted(deep):
    asker = Asker(deep.folder, stages=THREE, slots="9", batch_tokens="64")
    numbers = [asker.ask("acme", [WORDS[i]]) for i in range(30)]
    asker.close()
    assert all(not isinstance(asker.wait(number), Exception) for number in numbers)


@pytest.mark.parametrize("stage", [0, 1])
def test_closing_with_a_stuck_stage_answers_every_request(deep, monkeypatch, gates, stage):
    monkeypatch.setattr("hplm.engine.service.DRAIN_SECONDS", 0.2)
    asker = batches_of_one(deep)
    numbers = [asker.ask(tenant.id, [WORDS[0]]) for tenant in TENANTS[:5]]
    for batch in range(1, 6):
        for at in range(stage):
            gates.open(batch, at)
    gates.arrive(1, stage)
    asker.service.close()
    assert all(isinstance(asker.wait(number), Draining) for number in numbers)
    assert asker.service.computing_s > 0
    for batch in range(1, 6):
        for at in (0, 1):
            gates.open(batch, at)
    for thread in asker.service._pipeline._threads:
        thread.join(60)
        assert not thread.is_alive()
    assert all(len(answers) == 1 for answers in asker.answers)
