"""Lookup as a service: reading in pieces, tenants in turn, and exactly one answer to every request, whatever fails."""

import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hplm.engine import lookup_service
from hplm.engine.backbone import Backbone
from hplm.engine.lookup import Lookup, Reading
from hplm.engine.lookup_service import AT_ONCE, MOST_AHEAD, LookupRequest, LookupService
from hplm.errors import DeadlineMissed, InvalidInput, QueueFull, Quota
from hplm.metrics.meter import Meter
from hplm.request.form import Form, Head
from hplm.scheduling.limits import Limits
from hplm.tenants.quotas import Quotas
from hplm.tenants.snapshot import Tenant
from testing.toy import WORDS
from tests.support.wait import eventually


@pytest.fixture(scope="module")
def backbone(toy):
    return Backbone(toy.folder)


FOUND = bytearray(b"a form")


class Gated:
    """A lookup that waits for the test before it reads a text, and notes whose text it reads."""

    def __init__(self):
        self.may_read = threading.Semaphore(0)
        self.waits = threading.Event()
        self.read_of = []

    def read(self, readings, characters):
        return [self._read(reading, characters) for reading in readings]

    def _read(self, reading, characters):
        self.waits.set()
        self.may_read.acquire()
        self.read_of.append(reading.tenant.id)
        if reading.fails:
            return reading.fails
        reading.characters_left -= min(characters, reading.characters_left)
        return FOUND if not reading.characters_left else None


def tenant_of(name):
    return SimpleNamespace(id=name, uid=hash(name), rate=0, texts_rate=0, tokens_rate=0)


def reading_of(tenant, head, characters, fails=None):
    more = {"texts": ["a text"], "texts_left": 0, "tokens": 100}
    return SimpleNamespace(tenant=tenant, head=head, characters_left=characters, fails=fails, **more)


class Desk:
    """Submits requests to a service, and keeps all answers to each."""

    def __init__(self, lookup, quotas=None, ahead=lambda: 0):
        self.meter, self.answers = Meter(), {}
        self.service = LookupService(lookup, self.meter, Quotas() if quotas is None else quotas, ahead)

    def submit(self, tenant, characters=AT_ONCE + 1, deadline_ns=0, fails=None, respond=None, received_ns=0, **more):
        """Its thread reads only what has fewer characters. `received_ns`: 0 is now."""
        number = len(self.answers)
        self.answers[number] = []
        head = Head(0, 0, 0, 0, "law", "acme", arrival_ns=received_ns or time.monotonic_ns(), deadline_ns=deadline_ns)
        reading = reading_of(tenant if isinstance(tenant, Tenant) else tenant_of(tenant), head, characters, fails)
        respond = respond or self.answers[number].append
        self.service.submit([LookupRequest(reading, respond, **more)])
        return number

    def close(self):
        self.service.close()
        assert all(len(answers) == 1 for answers in self.answers.values()), self.answers
        return [answers[0] for answers in self.answers.values()]


@pytest.mark.parametrize("characters", [1, AT_ONCE + 1], ids=["by who brings it", "by the thread"])
def test_what_has_waited_for_half_of_its_time_is_not_read(characters):
    """The engine could not answer it in time, and others would wait for it."""
    lookup = Gated()
    lookup.may_read.release(9)
    desk, now, minute = Desk(lookup), time.monotonic_ns(), 60 * 10**9
    desk.submit("acme", characters, received_ns=now - 6 * minute, deadline_ns=now + 4 * minute)
    desk.submit("acme", characters, received_ns=now - 4 * minute, deadline_ns=now + 6 * minute)
    late, in_time = desk.close()
    assert isinstance(late, DeadlineMissed) and in_time is FOUND and len(lookup.read_of) == 1


def test_nothing_is_read_while_too_many_are_ahead_and_what_expires_is_answered():
    lookup, ahead = Gated(), [MOST_AHEAD]
    lookup.may_read.release(9)
    desk = Desk(lookup, ahead=lambda: ahead[0])
    answered = threading.Event()
    desk.submit(
        "acme", deadline_ns=time.monotonic_ns() + 1, respond=lambda answer: (desk.answers[0].append(answer), answered.set())
    )
    desk.submit("acme")
    assert answered.wait(30) and not lookup.read_of
    ahead[0] = MOST_AHEAD - 1
    assert lookup.waits.wait(30)
    late, found = desk.close()
    assert isinstance(late, DeadlineMissed) and found is FOUND


def test_short_requests_are_read_by_the_thread_that_brings_them_unless_others_wait():
    lookup, ahead = Gated(), [0]
    lookup.may_read.release(9)
    desk = Desk(lookup, ahead=lambda: ahead[0])
    threads, deferred = {}, []

    def bring(name, characters=1):
        return LookupRequest(
            reading_of(tenant_of(name), Head(0, 0, 0, 0, "law", "acme"), characters),
            lambda answer: threads.update({name: threading.current_thread()}),
            defer=lambda: deferred.append(name),
        )

    half = AT_ONCE // 2
    desk.service.submit([bring("one", half), bring("long", half + 1), bring("two", half)])
    own = threading.current_thread()
    assert threads["one"] is threads["two"] is own
    eventually(lambda: "long" in threads)
    assert threads["long"] is not own and deferred == ["long"]
    ahead[0] = MOST_AHEAD - 1
    desk.service.submit([bring("first"), bring("second")])
    assert threads["first"] is own and deferred == ["long", "second"]
    ahead[0] = MOST_AHEAD
    desk.service.submit([bring("third")])
    ahead[0] = 0
    desk.close()
    desk.service.submit([bring("late")])
    assert deferred == ["long", "second", "third", "late"]
    assert {name for name, thread in threads.items() if thread is not own} == {"long", "second", "third"}


def test_a_short_request_waits_while_another_is_read():
    lookup = Gated()
    desk = Desk(lookup)
    desk.submit("acme")
    assert lookup.waits.wait(30)
    asked = desk.submit("beta", characters=1)
    assert not desk.answers[asked]
    lookup.may_read.release(2)
    assert desk.close() == [FOUND, FOUND]


def test_what_waits_is_not_answered_once_its_tenant_is_in_debt(backbone):
    tenant = replace(backbone.view.snapshot.find("acme"), tokens_rate=0.01)
    quotas, lookup = Quotas(), Gated()
    desk = Desk(lookup, quotas)
    for _ in range(3):
        quotas.spend(tenant)  # nothing is charged yet, so all three may wait
        desk.submit(tenant)
    lookup.may_read.release(3)
    first, *others = desk.close()
    assert first is FOUND
    assert all(isinstance(other, Quota) for other in others)


def test_a_request_is_charged_before_another_one_that_is_read_with_it_is_answered(backbone):
    tenant = replace(backbone.view.snapshot.find("acme"), texts_rate=0.5, tokens_rate=0.01)
    lookup, answers = Gated(), []
    lookup.may_read.release(2)
    desk = Desk(lookup)
    head = Head(0, 0, 0, 0, "law", "acme")
    desk.service.submit([LookupRequest(reading_of(tenant, head, 1), answers.append) for _ in range(2)])
    desk.close()
    assert answers[0] is FOUND and isinstance(answers[1], Quota)
    assert lookup.read_of == ["acme", "acme"]


def test_a_failure_is_the_answer_and_ends_nothing(caplog):
    lookup = Gated()
    lookup.may_read.release(9)
    desk = Desk(lookup)
    desk.submit("acme", fails=InvalidInput("too long"))
    desk.submit("acme", fails=RuntimeError("a bug"))
    sent = []

    def break_down(answer):
        sent.append(answer)
        raise ConnectionError("the client has gone")

    desk.answers[desk.submit("acme", respond=break_down)].append("not sent")
    desk.submit("acme")
    bad, bug, _, good = desk.close()
    assert isinstance(bad, InvalidInput) and isinstance(bug, RuntimeError)
    assert good is FOUND and sent == [FOUND]
    counted = {labels[0]: count for (_, labels), count in desk.meter.take()[0].items() if labels}
    assert counted == {"invalid_input": 1, "internal": 1, "passed_on": 2}


@given(st.lists(st.lists(st.sampled_from(WORDS), min_size=1, max_size=9), min_size=1, max_size=6), st.integers(1, 60))
def test_pieces_give_what_the_whole_gives(backbone, texts, characters):
    lookup, view = Lookup(backbone), backbone.view
    texts = [" ".join(words) for words in texts]
    tenant = view.snapshot.find("acme")
    reading, pieces = Reading(view, tenant, texts), 0
    while (found := lookup.read([reading], characters)[0]) is None:
        pieces += 1
    whole = lookup.resolve(view, tenant, texts)
    for name in ("head", "lengths", "counts", "addresses", "segments", "spans"):
        np.testing.assert_array_equal(getattr(Form(found), name), getattr(whole, name))
    assert reading.characters_left == 0
    assert pieces <= max(0, len(texts) - 1)
    if characters == 1:
        assert pieces == len(texts) - 1


@pytest.mark.parametrize(("pace", "said"), [(0.0, "0.1 s"), (0.5, "1.5 s"), (60.0, "10.0 s")])
def test_a_refused_request_may_come_back_when_those_who_wait_are_looked_up(monkeypatch, pace, said):
    monkeypatch.setattr(lookup_service, "WAITING", Limits(items=3, work=1 << 20))
    lookup = Gated()
    desk = Desk(lookup)
    desk.submit("noisy")
    assert lookup.waits.wait(30)
    desk.service._pace = pace  # as if it had been measured
    for _ in range(4):  # three have a place
        desk.submit("noisy")
    lookup.may_read.release(5)
    refused = [answer for answer in desk.close() if isinstance(answer, QueueFull)]
    assert len(refused) == 1 and f"retry after {said}" in str(refused[0])


def test_a_turn_takes_no_more_than_have_room_ahead():
    lookup, ahead, turns = Gated(), [MOST_AHEAD], []
    lookup.may_read.release(9)
    read = lookup.read
    lookup.read = lambda readings, characters: (turns.append(len(readings)), read(readings, characters))[1]
    desk = Desk(lookup, ahead=lambda: ahead[0])
    for tenant in ("noisy", "noisy", "noisy", "noisy", "quiet"):
        desk.submit(tenant, characters=1)
    ahead[0] = MOST_AHEAD - 2
    eventually(lambda: len(lookup.read_of) == 5)
    assert turns == [2, 2, 1] and "quiet" in lookup.read_of[:2]
    desk.close()


def test_a_refusal_leaves_when_a_request_is_looked_up_and_a_forwarded_one_at_once(monkeypatch):
    """Otherwise clients that ask again at once would take the time of those who wait."""
    monkeypatch.setattr(lookup_service, "WAITING", Limits(items=1, work=1 << 20))
    lookup = Gated()
    desk = Desk(lookup)
    desk.submit("noisy")
    assert lookup.waits.wait(30)
    desk.service._pace = 1e9  # the last of the line would be looked up in years
    desk.submit("noisy")
    kept, told = desk.submit("noisy"), desk.submit("noisy", refuse_at_once=True)
    assert not desk.answers[kept] and isinstance(desk.answers[told][0], QueueFull)
    lookup.may_read.release()
    eventually(lambda: desk.answers[kept])
    assert isinstance(desk.answers[kept][0], QueueFull)
    lookup.may_read.release()
    desk.close()
