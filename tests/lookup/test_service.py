"""Lookup as a service: whatever requests, turns, failures and closing follow each other, each request gets one right answer.

The service has no thread here. A turn is a step of a test, and so is the time.
"""

from __future__ import annotations

import threading
from collections import Counter
from functools import partial
from types import SimpleNamespace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from hplm.errors import DeadlineMissed, Draining, Internal, InvalidInput, QueueFull, Quota, word_of
from hplm.lookup.lookup import A_TEXT, LookupRequest, head_of
from hplm.lookup.service import (
    AT_ONCE,
    AT_ONCE_SECONDS,
    MOST_AHEAD,
    PIECE,
    RETRY_S,
    STUCK_SECONDS,
    LookupService,
)
from hplm.metrics import names
from hplm.metrics.meter import Meter
from hplm.scheduling.limits import Limits
from hplm.tasks.tasks import find_task
from hplm.tenants.quotas import Quotas
from tests.support.message import mentions
from tests.support.wait import Clock, eventually

FOUND = bytearray(b"a form")
MS = 1_000_000
SHORT, LONG = AT_ONCE // 2 - A_TEXT, AT_ONCE + 1  # two short ones are read by who brings them, a long one is not
VIEW = SimpleNamespace(snapshot=SimpleNamespace(export_number=0, generation=0))
FAILURES = {"invalid": InvalidInput("too long"), "a bug": RuntimeError("a bug")}


class Asked(LookupRequest):
    """A request, and all that happens to it. `fails`: a failure of its own, or "gone": nobody reads its answer.

    `text`: how many characters each of its texts has.
    """

    def __init__(self, name="acme", characters=LONG, allowed_ms=0, fails="", waited_ms=0, now=0, text=PIECE):
        self.name, self.characters, self.fails = name, characters, fails
        times = {"arrival_ns": now - waited_ms * MS, "deadline_ns": allowed_ms and now + allowed_ms * MS}
        self.until_ns = allowed_ms and now + (allowed_ms - waited_ms) * MS // 2  # when half of its time is over
        rates = {"rate": 0, "burst": 0, "texts_rate": 0, "tokens_rate": 0.01 if name == "poor" else 0, "homes": 1}
        tenant = SimpleNamespace(
            id=name, uid=hash(name), version=1, domain="law", task_object=find_task("classify"), embedding=None, **rates
        )
        self.answers, self.is_deferred = [], False
        texts = ["a" * min(text, characters - start) for start in range(0, characters, text)]
        super().__init__(VIEW, tenant, texts, None, False, None, self._defer, head_of(VIEW, tenant)._replace(**times))
        self.tokens = 100

    def sent(self, respond):
        self.respond = respond
        return self

    def _defer(self):
        self.is_deferred = True


class Idle(BaseException):
    """A turn has found that nobody waits any more."""


class World(Clock):
    """The lookup, the time and the clients of a service. `waiting`: how many it keeps."""

    def __init__(self, waiting=1000):
        super().__init__(1000.0)
        self.asked: list[Asked] = []
        self.ahead, self.read_s, self.fault = 0, 0.001, None
        self.meanwhile = lambda: None  # while a turn reads, or waits for those ahead
        self.is_closed = self.has_been_full = self._offers = self._steps = False
        self.poor_is_charged, self.counted, self.wrong = False, Counter(), []
        self.meter, self.most, bounds = Meter(), waiting, Limits(waiting, 1 << 40)
        self.service = LookupService(
            self, self.meter, Quotas(self.monotonic), lambda: self.ahead, bounds, soon_s=0.0, clock=self
        )

    # The service calls these.

    def _check(self, holds, otherwise: str) -> None:
        """An exception would only be an answer."""
        self.wrong += [] if holds else [otherwise]

    def read(self, readings):
        self._check(not self._late(readings), "what is late was read")
        self._check(not any(one.answers for one in readings), "what is answered was read")
        self._check(not self.poor_is_charged or "poor" not in [one.name for one in readings], "a tenant in debt was read")
        self._check(self.is_closed or len(readings) <= MOST_AHEAD - self.ahead, "more were read than have room ahead")
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        meanwhile()
        self.seconds += self.read_s
        fault, self.fault = self.fault, None
        if fault is not None:
            raise fault
        return [self._piece(reading) for reading in readings]

    def _piece(self, reading):
        reading.ids += [b""] * len(reading.next_texts)
        return FAILURES.get(reading.fails) or (FOUND if len(reading.ids) == len(reading.texts) else None)

    def sleep(self, seconds):
        """Called while too many are ahead."""
        self._check(not self._late(self.unanswered()), "what is late waits while many are ahead")
        super().sleep(seconds)
        self.meanwhile()
        self.meanwhile = lambda: None
        if not self.waiting():
            raise Idle
        self.ahead -= 1

    def _respond(self, one: Asked, answer):
        self._check(one.is_deferred or self._offers == one, "it was answered by another thread, and not deferred")
        one.answers.append(answer)
        if isinstance(answer, QueueFull):
            self._check(self.has_been_full and self._offers, "it was refused though there was room, or not at once")
            self._check(mentions(answer, one.name, f"retry after {RETRY_S} s"), "the refusal does not say who may come when")
        elif isinstance(answer, DeadlineMissed):
            self._check(self._late([one]), "it was not late")
        elif isinstance(answer, Quota):
            self._check(one.name == "poor" and self.poor_is_charged, "a tenant that owes nothing was refused")
        elif isinstance(answer, Draining):
            self._check(self.is_closed, "it was refused before it closes")
        elif answer is FOUND:
            self._check(one.fails in ("", "gone"), f"{one.fails} was answered")
            self._check(one.name != "poor" or not self.poor_is_charged, "a tenant in debt was answered")
            self.poor_is_charged |= one.name == "poor"
        if one.fails == "gone":
            raise ConnectionError("the client is gone")

    def _late(self, asked):
        return [one for one in asked if 0 < one.until_ns <= self.monotonic_ns()]

    # Tests call these.

    def waiting(self) -> int:
        self.service.look()
        counts, gauges = self.meter.take()
        self.counted.update({labels[0]: count for (metric, labels), count in counts.items() if metric is names.LOOKUPS})
        return int(gauges[names.WAITING_LOOKUPS, ()])

    def unanswered(self):
        return [one for one in self.asked if not one.answers]

    def offer(self, *given, **more) -> Asked:
        one = Asked(*given, now=self.monotonic_ns(), **more)
        is_free = not (self.waiting() or self._steps or self._offers or self.is_closed) and self.ahead < MOST_AHEAD
        self.has_been_full |= self.waiting() + len(one.divide(PIECE)) > self.most
        self.asked.append(one)
        outer, self._offers = self._offers, one
        self.service.submit([one.sent(partial(self._respond, one))])
        self._offers = outer
        assert one.is_deferred != (is_free and one.characters + A_TEXT <= AT_ONCE), "not the right thread has read it"
        return one

    def step(self):
        """Does a turn, if anybody waits."""
        if not self.waiting():
            return
        late, self._steps = self._late(self.unanswered()), True
        try:
            self.service.take_turn()
        except Idle:
            pass
        finally:
            self._steps = False
        assert all(one.answers for one in late), "what is late was not told so"

    def close(self):
        self.is_closed = self._steps = True
        self.service.close()
        while self.service.take_turn():
            pass
        self._steps = False

    def end(self):
        """Closes it, and checks that each request has got its one answer and was counted."""
        if not self.is_closed:
            self.close()
        assert not self.waiting() and not self.wrong, self.wrong[:1]
        assert [len(one.answers) for one in self.asked] == [1] * len(self.asked)
        words = Counter(names.PASSED_ON if one.answers[0] is FOUND else word_of(one.answers[0]) for one in self.asked)
        assert self.counted == words, "not each answer is counted once"


class Lookups(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.world = World(waiting=4)

    @rule(
        name=st.sampled_from(["noisy", "noisy", "quiet", "poor"]), characters=st.sampled_from([1, SHORT, LONG, 3 * PIECE]),
        allowed_ms=st.sampled_from([0, 0, 1, 40]), waited_ms=st.sampled_from([0, 20, 60]),
        fails=st.sampled_from(["", "", "", "gone", *FAILURES]), meanwhile=st.booleans(),
    )  # fmt: skip
    def offer(self, meanwhile, **given):
        if meanwhile:
            self.world.meanwhile = partial(self.world.offer, **given)
        else:
            self.world.offer(**given)

    @rule()
    def step(self):
        self.world.step()

    @rule(ms=st.sampled_from([1, 20, 300]))
    def wait(self, ms):
        self.world.seconds += ms / 1000

    @rule(ahead=st.sampled_from([0, 0, MOST_AHEAD - 2, MOST_AHEAD, MOST_AHEAD + 2]))
    def crowd(self, ahead):
        self.world.ahead = ahead

    @rule(error=st.sampled_from([RuntimeError("a bug"), MemoryError()]))
    def fail(self, error):
        self.world.fault = error

    @precondition(lambda self: not self.world.is_closed)
    @rule()
    def close(self):
        self.world.meanwhile = lambda: None
        self.world.close()

    @invariant()
    def nothing_is_wrong_and_few_wait(self):
        assert not self.world.wrong, self.world.wrong[0]
        assert self.world.waiting() <= 4, "more wait than there is room for"

    def teardown(self):
        self.world.meanwhile = lambda: None
        self.world.end()


@pytest.mark.usefixtures("nothing_is_logged")
def test_each_request_gets_one_right_answer_whatever_happens():
    run_state_machine_as_test(Lookups, settings=settings(max_examples=150, stateful_step_count=40))


@pytest.fixture
def world():
    """With room for three that wait."""
    world = World(waiting=3)
    yield world
    world.end()


@pytest.mark.parametrize("room", [2, 3])
def test_as_much_is_read_together_as_has_room_and_a_debt_counts_for_the_next_request(world, room):
    world.ahead = MOST_AHEAD
    first, quiet, second = (world.offer(name, 1) for name in ("poor", "quiet", "poor"))
    world.ahead = MOST_AHEAD - room
    world.step()
    assert sum(len(one.answers) for one in (first, quiet, second)) == room
    world.ahead = 0
    world.step()
    assert first.answers == quiet.answers == [FOUND] and isinstance(second.answers[0], Quota)


def test_a_text_that_is_read_whole_is_charged_whole(world):
    """As those of `span` are. Others have as much read before the next request of its tenant."""
    whole, later, quiet = world.offer("noisy", 5 * PIECE, text=5 * PIECE), world.offer("noisy"), world.offer("quiet")
    world.step()
    assert whole.answers == [FOUND]
    for _ in range(5):
        before, quiet = quiet, world.offer("quiet")
        world.step()
        assert before.answers == [FOUND] and not later.answers


def test_who_brings_many_short_requests_reads_some_of_them(world):
    """Two at a time, until its time is over."""
    world.read_s = 0.6 * AT_ONCE_SECONDS
    asked = [Asked(characters=SHORT) for _ in range(5)]
    world.asked += asked
    world.service.submit([one.sent(one.answers.append) for one in asked])
    assert [one.is_deferred for one in asked] == [False, False, False, False, True]
    world.step()


def test_a_turn_that_does_not_end_is_an_error_and_a_pause_of_all_processes_is_none(world):
    world.offer()

    def look():
        world.seconds += 1000
        for _ in range(STUCK_SECONDS + 1):
            world.service.look()
            world.service.check()
        world.service.look()
        with pytest.raises(Internal):
            world.service.check()

    world.meanwhile = look
    world.step()
    world.service.check()


def test_each_request_of_many_threads_gets_one_answer_while_it_closes():
    """The thread that looks up is there. Who brings a request may answer it, and nobody else before it is deferred."""
    reads = SimpleNamespace(read=lambda readings: [FOUND for _ in readings])
    service, asked = (
        LookupService(reads, Meter(), Quotas()).start(),
        [Asked(characters=(1, LONG)[number % 2]) for number in range(600)],
    )

    def answered(one, brought_by, answer):
        assert threading.get_ident() == brought_by or one.is_deferred
        one.answers.append(answer)

    def bring(thread):
        for one in asked[thread::3]:
            service.submit([one.sent(partial(answered, one, threading.get_ident()))])

    threads = [threading.Thread(target=bring, args=(thread,)) for thread in range(3)]
    for thread in threads:
        thread.start()
    eventually(lambda: sum(len(one.answers) for one in asked) > 100)
    service.close()
    for thread in threads:
        thread.join()
    assert Counter(type(answer) for one in asked for answer in one.answers).keys() <= {bytearray, Draining}
    assert all(len(one.answers) == 1 for one in asked)
