"""Texts that go on from level to level: served answers equal the reference's, and every request gets exactly one answer."""

from __future__ import annotations

import random
import shutil
import time
from pathlib import Path

import pytest

from hplm.engine.engine import Engine
from hplm.errors import Broken, InvalidInput
from hplm.scheduling.queue import Queue
from hplm.tenants.level import FULL
from testing.reference import Reference
from testing.toy import WORDS
from tests.climb import Climb
from tests.engine.asker import Asker, stages_of
from tests.ladders import LADDER, STACK, make_ladders
from tests.support.answers import Comparison
from tests.support.message import mentioning
from tests.support.wait import eventually
from tests.tasks import TENANTS, question


@pytest.fixture(scope="module")
def ladders(tmp_path_factory):
    return make_ladders(tmp_path_factory.mktemp("ladders"))


@pytest.fixture(scope="module")
def reference(ladders):
    return Reference.open(ladders.folder)


@pytest.fixture
def asker(ladders):
    asker = Asker(ladders.folder)
    yield asker
    asker.close()


@pytest.mark.parametrize("stages", [(), stages_of(0, 1)], ids=["one stage", "two stages"])
def test_every_task_in_mixed_batches_climbs_as_the_reference_does(ladders, reference, stages):
    asker = Asker(ladders.folder, stages=stages, slots="6")
    rng, asked = random.Random(5), []
    for number in range(180):
        tenant, rung = TENANTS[number % len(TENANTS)], number // len(TENANTS) % len(LADDER)
        text, pair = question(rng, tenant.task)
        if tenant.task == "span" and pair is not None:
            pair = " ".join(pair.split()[:30])  # in one window
        asked.append((tenant, text, pair, rung, asker.ask(tenant.id, [text], pair and [pair], confidence=True, rung=rung + 1)))
    close, levels, comparison, pruned = 0, set(), Comparison(), 0
    for tenant, text, pair, rung, number in asked:
        (answer,) = asker.wait(number)
        climb = Climb(reference, tenant.id, text, pair, LADDER[rung], asker.lookup)
        if climb.is_close:
            close += 1
            continue
        assert answer.level == climb.level, (tenant.id, rung)
        assert tenant.task == "regress" or answer.labels == climb.answer.labels, (tenant.id, rung)
        comparison.add(tenant.id, answer.logits, climb.answer.logits)
        levels.add((rung, answer.level))
        pruned += climb.pruned
    assert close < 0.1 * len(asked) and pruned > 20
    assert levels == {(0, 2), (1, 1), (1, 2), (2, 2), (3, 1)}
    comparison.assert_equal("fp32")
    asker.close()


def test_a_passage_in_windows_is_answered_by_the_last_level_alone(asker, reference):
    passage = " ".join(random.Random(1).choices(WORDS, k=200))
    (answer,) = asker.wait(asker.ask("find", ["a b"], [passage], rung=2))
    assert answer.level == 2 and answer.labels == reference.answer("a b", "find", passage).labels


@pytest.mark.parametrize("rung", [5, 2**16 - 1])
def test_an_unknown_rung_is_refused(asker, rung):
    with pytest.raises(InvalidInput, match=mentioning("hplm_rung", rung, "'pair'", "1 to 4")):
        asker.ask("pair", ["a b"], rung=rung)
    asker.answers.pop()  # the request was refused


def test_a_text_whose_next_level_finds_no_slot_goes_on_through_the_line(ladders, monkeypatch):
    came_back, again = [], Queue.again
    monkeypatch.setattr(Queue, "again", lambda line, texts: came_back.extend(texts) or again(line, texts))
    asker = Asker(ladders.folder, slots="2")  # of these a batch has one, for the head of the first level
    assert asker.wait(asker.ask("pair", ["a b"], rung=3))[0].level == 2
    asker.close()
    assert len(came_back) == 1


def test_a_text_whose_time_is_over_is_answered_by_the_level_that_it_has_reached(asker, monkeypatch):
    going_on = Queue.going_on

    def too_late(line, batch, texts):
        eventually(lambda: all(time.monotonic_ns() > text.deadline_ns for text in texts))
        return going_on(line, batch, texts)

    monkeypatch.setattr(Queue, "going_on", too_late)
    number = asker.ask("pair", ["a b"], deadline_ns=time.monotonic_ns() + 3_000_000_000, rung=3)
    assert asker.wait(number)[0].level == 1


def test_a_sheet_has_no_more_tokens_than_a_batch_may_have(ladders, monkeypatch):
    """The line counts the work of texts, which is a part of their length on a shallow stack."""
    sheets, compute = [], Engine._compute

    def watched(engine, sheet, stage):
        sheets.append((sheet.stack, int(sheet.lengths.sum())))
        return compute(engine, sheet, stage)

    monkeypatch.setattr(Engine, "_compute", watched)
    asker = Asker(ladders.folder, batch_tokens="128")
    texts = [" ".join(WORDS[number : number + 14]) for number in range(40)]
    early, whole = (asker.wait(asker.ask("pair", texts, rung=rung)) for rung in (4, 1))
    asker.close()
    assert {answer.level for answer in early} == {1} and {answer.level for answer in whole} == {2}
    assert max(tokens for stack, tokens in sheets if stack != FULL) <= 128
    assert len(sheets) > 6


def test_a_stack_that_cannot_be_read_fails_only_requests_that_need_it(ladders, tmp_path):
    folder = Path(shutil.copytree(ladders.repository, tmp_path / "repository")) / "toy" / "1"
    stored = folder / "stacks" / f"{STACK}.safetensors"
    stored.unlink()  # a hard link of the store's
    stored.write_bytes(b"broken")
    asker = Asker(folder)
    with pytest.raises(Broken, match=mentioning("'pair'", f"'{STACK}'", "export")):
        asker.ask("pair", ["a b"])
    asker.answers.pop()  # the request was refused
    asker.close()
