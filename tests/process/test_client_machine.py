"""The client of an engine's process: whatever that process does, each request gets one right answer, and nothing is held."""

import gc
import os
import signal
import threading
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from hplm.errors import Draining, Internal, OutOfCapacity
from hplm.metrics import names
from hplm.process.worker import PATIENCE_SECONDS
from tests.process.faked import World
from tests.support.wait import eventually

pytestmark = pytest.mark.usefixtures("nothing_is_logged")

LATE = 1e-9  # seconds that a request allows which is late at once
SENDS = [None, None, "gone", OutOfCapacity("no shared memory")]
SOON = {"never waits": 0.0, "waits": 1e6}


def outcome_of(one):
    """Returns as what an answered request counts."""
    if isinstance(one.sends, OutOfCapacity):
        return "capacity"
    return {0: "answered", LATE: "late"}.get(one.allowed_s, "on_time")


class Clients(RuleBasedStateMachine):
    def __init__(self, make):
        super().__init__()
        self.world = make()
        self.words: dict[str, str | None] = {}  # that answers must have, by the name of their request

    def lost(self, engine, words):
        """`words` of answers to requests that this engine has, by number, if not that it was ended."""
        lost = {name: words.get(number, "draining") for number, name in engine.has.items()}
        self.words |= lost
        for one in self.world.asked:
            if one.name in lost:
                assert one.word == lost[one.name], one.name
                assert one.events in (["deferred", "sent"], ["deferred", "returned"])
        eventually(lambda: self.world.engine is not engine)
        if self.world.starts:
            self.world.until_serving()

    is_up = precondition(lambda self: self.world.starts)

    @rule(tenant=st.sampled_from(["acme", "beta"]), allowed_s=st.sampled_from([0, 0, LATE, 300]), sends=st.sampled_from(SENDS))
    def ask(self, **given):
        one = self.world.ask(**given)
        if not self.world.starts:
            self.words[one.name] = "draining"
            assert one.word == "draining" and one.events == ["returned"]

    @is_up
    @rule(data=st.data(), together=st.booleans(), beat=st.booleans(), more=st.sampled_from([(), (0,), (10**6,)]))
    def answer(self, data, more, **how):
        """`more`: numbers that have their answers, or that nobody knows."""
        has, more = dict(self.world.engine.has), [number for number in more if number or self.world.asked]
        chosen = data.draw(st.lists(st.sampled_from([*has]), unique=True)) if has else []
        waited = [one.name for one in self.world.asked if not one.events and not one.allowed_s]
        self.world.engine.answer(*(number for number in more if number not in has), *chosen, **how)
        self.words |= {has[number]: None for number in chosen}
        for one in self.world.asked:
            if one.name in [has[number] for number in chosen]:
                assert one.word is None and one.events[-1] != "deferred"
                assert one.name not in waited or one.events == ["returned"], "it was not returned"

    @is_up
    @rule(shown=st.sampled_from(["none", "first", "damaged"]), comes_back=st.booleans())
    def die(self, shown, comes_back):
        engine, self.world.starts = self.world.engine, comes_back
        first = [*engine.has][:1]
        if shown == "first":
            engine.show(*first)
        elif shown == "damaged":
            engine.damage()
        engine.end()
        self.lost(engine, dict.fromkeys({"none": [], "first": first, "damaged": engine.has}[shown], "crashed"))

    @precondition(lambda self: not self.world.starts)
    @rule()
    def come_back(self):
        self.world.come_back()

    @is_up
    @rule(what=st.sampled_from(["unreadable", "silent", "hangs", "cannot be waited for"]))
    def fail(self, what):
        engine = self.world.engine
        if what == "unreadable":
            engine.channel.send_bytes([b"no replies"])
        elif what == "silent":
            self.world.fall_silent()
        elif what == "hangs":
            self.world.hang()
        else:
            self.world.wait_fails = ZeroDivisionError("a bug")
            engine.end()
        self.lost(engine, {})

    @is_up
    @rule(error=st.sampled_from([MemoryError, BrokenPipeError]), allowed_s=st.sampled_from([0, 300]))
    def ask_what_cannot_be_passed_on(self, error, allowed_s):
        engine, channel = self.world.engine, self.world.workers.current.channel
        self.world.send_fails(error)
        one = self.world.ask(allowed_s=allowed_s)
        self.words[one.name] = "capacity" if error is MemoryError else "draining"
        assert one.word == self.words[one.name], one.name
        if error is BrokenPipeError:
            self.lost(engine, {})
        else:
            del channel.send_bytes

    def teardown(self):
        world = self.world
        if world.starts:
            self.words |= dict.fromkeys(world.engine.has.values(), None)
            world.engine.answer(*[*world.engine.has][::2])  # the others are answered while it closes
        world.close()
        assert {one.name: one.word for one in world.asked} == self.words
        for one in world.asked:
            assert one.events in (["returned"], ["deferred", "sent"], ["deferred", "returned"]), (one.name, one.events)
        right = Counter(outcome_of(one) for one in world.asked if one.word is None)
        for metric in (names.REQUESTS, names.TENANT_REQUESTS):
            assert {outcome: count for (own, outcome), count in world.counts().items() if own is metric} == right, metric.name
        lost = {word: count for (metric, word), count in world.counts().items() if metric is names.LOST_REQUESTS}
        assert lost == Counter(one.word for one in world.asked if one.word)
        if any(one.kept() for one in world.asked):
            gc.collect()
        assert not [one.name for one in world.asked if one.kept()], "a request is held"


@pytest.mark.parametrize("soon", SOON)
def test_each_request_gets_one_right_answer_whatever_the_engine_does(tmp_path, soon):
    few = settings(max_examples=25, stateful_step_count=25, phases=[Phase.reuse, Phase.generate])
    run_state_machine_as_test(lambda: Clients(partial(World, tmp_path, SOON[soon])), settings=few)


@pytest.fixture
def world(tmp_path):
    """One that waits for ever for an answer, as if it came soon."""
    world = World(tmp_path, SOON["waits"])
    yield world
    world.close()
    assert all(one.answers and one.kept() is None for one in world.asked)


def test_nobody_waits_for_an_engine_that_has_lately_been_slow(world):
    world.ask(allowed_s=LATE).submitted()
    world.clock.sleep(1e8)
    world.engine.answer(*world.engine.has)
    assert world.asked[0].word is None
    one = world.ask()
    one.submitted()
    assert one.events == ["deferred"]
    world.engine.answer(*world.engine.has)


def test_a_failure_of_what_is_done_each_second_does_not_end_the_watch(world):
    """Nobody would see a silent engine again."""
    looked = []
    world.workers._each_second = lambda: looked.append(0) or 1 / 0
    eventually(lambda: len(looked) > 1)


def test_an_error_while_counting_ends_no_engine(world):
    """Neither while a beat is counted, nor an answer."""
    for fail in (world.engine.miscount, partial(setattr, world.meter, "count", None)):
        asked = world.ask()
        fail()
        world.engine.answer(*world.engine.has)
        assert asked.word is None and world.engine.returncode is None


def test_neither_a_long_batch_nor_a_pause_of_all_processes_nor_a_set_clock_ends_an_engine(world):
    """After a pause the clock is ahead, and the watching thread may be the first one that runs."""
    asked = world.ask()
    world.engine.answer(*world.engine.has, beat=True)
    assert asked.word is None
    world.clock.sleep(1000)
    for world.clock.set_by in (0, -90_000, 90_000):
        world.workers.look()
        world.workers.check()
    assert len(world.engines) == 1 and world.engine.returncode is None


@pytest.mark.parametrize("computes", [True, False])
@pytest.mark.parametrize("how", ["fall_silent", "end"])
def test_only_an_engine_that_stands_still_before_it_computes_makes_nobody_a_suspect(world, how, computes):
    """A disk that hangs is no tenant's fault. A table that was cut may end the process while it is read."""
    asked = world.ask()
    world.engine.show(*world.engine.has, computes=computes)
    world.fall_silent() if how == "fall_silent" else world.engine.end()
    is_suspect = computes or how == "end"
    assert asked.word == ("crashed" if is_suspect else "draining")
    assert bool(world.client._separation.apart.alone) == is_suspect


def test_nobody_waits_for_an_engine_that_cannot_be_killed(world):
    """A process that waits for a driver or a disk keeps its end of the socket open, and outlives SIGKILL."""
    stubborn, asked, world.is_stubborn = world.engine, world.ask(), True
    world.fall_silent()
    assert asked.word == "draining" and world.counts()[names.LOST_REQUESTS, "draining"] == 1
    eventually(lambda: len(world.engines) == 2)
    world.until_serving()
    assert stubborn.returncode is None and world.counts()[names.ENGINE_RESTARTS, ""] == 1
    asked = world.ask()
    world.client.close(drain_s=0.01)
    assert asked.word == "draining" and world.engine.returncode is None
    world.is_stubborn = False
    stubborn.end()
    world.engine.end()


def test_an_engine_that_cannot_be_started_leaves_nothing_open_and_is_tried_again(world):
    def opened():
        links = [os.path.realpath(path) for path in Path("/proc/self/fd").iterdir()]
        return Counter(name for link in links for name in ("socket:", "memfd:hplm-batches") if name in link)

    world.popen_fails = RuntimeError("no more threads")
    before, first = opened(), world.engine
    first.end()
    eventually(lambda: len(world.engines) == 2)
    world.until_serving()
    eventually(lambda: opened() == before)


def test_an_engine_that_never_comes_back_is_told_from_one_that_is_starting_and_closing_does_not_wait(world):
    world.workers.check()
    world.starts = False
    world.engine.end()
    eventually(lambda: world.workers.current is None and len(world.engines) == 2)
    with pytest.raises(Draining):
        world.workers.check()
    world.clock.sleep(PATIENCE_SECONDS + 1)
    with pytest.raises(Internal):
        world.workers.check()
    closing = threading.Thread(target=world.client.close)
    closing.start()
    eventually(lambda: not closing.is_alive())
    assert world.engine.returncode == -signal.SIGKILL
