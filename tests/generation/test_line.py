"""Starts, refusals on arrival, and forecasts."""

import tracemalloc

import numpy as np
import pytest

from hplm.errors import DeadlineMissed
from hplm.generation.forecast import Ahead, Learned, Load, forecast
from hplm.generation.promise import Promise
from hplm.generation.request import Request, Sequence
from hplm.generation.sampling import Sampling
from tests.generation.small import MS, Generating, Small
from tests.support.message import mentioning

LOAD = Load(
    believed=True,
    step_ns=5 * MS,
    token_ns=MS / 10,
    sequence_ns=MS / 10,
    seats=4,
    places=1024,
    free=256,
    ends=[(10, 256), (20, 256), (30, 256)],
    mean_tokens=40,
)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return Small(tmp_path_factory.mktemp("small"))


def test_a_request_that_fits_waits_for_no_other():
    assert LOAD.steps_until(places=256, seats=1) == 0
    assert forecast(LOAD, Ahead(0, 0, 0), prompt=100, places=256).first_token_ns == pytest.approx(10 * MS + 5.8 * MS)


def test_a_request_waits_for_the_memory_and_the_seats_of_others():
    assert LOAD.steps_until(places=257, seats=1) == 10
    assert LOAD.steps_until(places=768, seats=1) == 20
    assert LOAD.steps_until(places=32, seats=3) == 20
    assert LOAD.steps_until(places=1025, seats=1) == 30 + 40
    assert LOAD.steps_until(places=32, seats=9) == 30 + 2 * 40


def test_each_that_waits_before_it_makes_it_later():
    times = [forecast(LOAD, Ahead(i, 50 * i, 64 * i), 50, 64).first_token_ns for i in range(30)]
    assert times == sorted(times) and len(set(times)) == 30


def test_forecasts_learn_how_wrong_they_were():
    learned = Learned()
    for _ in range(100):
        learned.first_token(10.0, 20.0)
        learned.ended(25, 100)
    assert learned.factor == pytest.approx(2, abs=0.01) and learned.share == pytest.approx(0.25, abs=0.01)
    learned.first_token(0.0, 20.0)  # it had no forecast
    assert learned.factor == pytest.approx(2, abs=0.01)


@pytest.mark.parametrize(
    ("tokens", "sampling", "echo"),
    [
        (10_000, lambda: Sampling(), lambda: ""),
        (10_000, lambda: Sampling(echo=True), lambda: "水" * 100_000),
        (1_000, lambda: Sampling(stop=tuple("水" * 256 for _ in range(16))), lambda: ""),
        (100, lambda: Sampling(logit_bias={1000 + i: i / 7 for i in range(1024)}), lambda: ""),
        (100, lambda: Sampling(stop_token_ids=tuple(1000 + i for i in range(1024))), lambda: ""),
    ],
)
def test_the_memory_of_waiting_requests_is_counted(small, tokens, sampling, echo):
    """By what is counted, `queue_mb` bounds what is kept."""
    ids, source = np.arange(1000, 1000 + tokens), small.sources[0]
    tracemalloc.start()
    try:
        given = {"arrival_ns": 1, "seed": 1, "echo": echo()}
        sequence = Sequence(Request(source, ids.tolist(), ids.copy(), sampling(), print, lambda ids: "", **given))
        kept = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert 0.7 * kept < sequence.bytes < 1.5 * kept


def busy(small):
    """Returns a loop with one seat, taken for 100 steps of a millisecond, whose forecasts are believed."""
    generating = Generating(small, seats=1, admission=True)
    generating.ask(range(3, 9), Sampling(max_tokens=100, ignore_eos=True))
    for _ in range(10):
        generating.loop.step()
    return generating


def test_forecasts_learn_nothing_from_the_time_in_the_front_door(small):
    """It is over when the forecast is made."""
    factors = []
    for waited_ns in (0, 2000 * MS):
        generating = busy(small)
        for _ in range(5):
            generating.ask([3], Sampling(max_tokens=3), waited_ns=waited_ns)
        generating.run()
        factors.append(generating.line.learned.factor)
    assert factors[0] == factors[1] != 1


@pytest.mark.parametrize(
    ("promise", "what"), [(Promise(first_token_ns=20 * MS), "first"), (Promise(whole_ns=40 * MS), "answer")]
)
def test_what_cannot_be_in_time_is_refused_at_once(small, promise, what):
    generating = busy(small)
    with pytest.raises(DeadlineMissed, match=mentioning(what, f"{max(promise.whole_ns, promise.first_token_ns) // MS}")):
        generating.ask(range(3, 9), Sampling(max_tokens=10), promise=promise)
    assert not len(generating.line)
    taken = generating.ask(range(3, 9), Sampling(max_tokens=10), promise=Promise(whole_ns=10_000 * MS))
    generating.run()
    assert taken.error is None


def test_a_promise_for_tokens_that_no_step_can_keep_is_refused(small):
    generating = busy(small)
    with pytest.raises(DeadlineMissed, match=mentioning("token")):
        generating.ask(range(3, 9), Sampling(), promise=Promise(token_ns=1000))
    generating.run()


def test_without_admission_nothing_is_refused_before_its_time(small):
    generating = Generating(small, seats=1)
    generating.ask(range(3, 9), Sampling(max_tokens=100, ignore_eos=True))
    for _ in range(10):
        generating.loop.step()
    assert generating.ask(range(3, 9), Sampling(), promise=Promise(first_token_ns=MS)) is not None
    generating.run()


def test_policies_choose_who_starts(small):
    """With shortest job first, short prompts overtake long ones. In order of arrival they do not."""
    firsts = {}
    for order in ("fcfs", "sjf"):
        generating = Generating(small, seats=1, order=order)
        generating.ask([3], Sampling(max_tokens=3))
        generating.loop.step()
        long, short = (generating.ask([3] * size, Sampling(max_tokens=3)) for size in (30, 5))
        generating.run()
        firsts[order] = long.request.first_token_ns < short.request.first_token_ns
    assert firsts == {"fcfs": True, "sjf": False}


def test_a_higher_priority_starts_first(small):
    generating = Generating(small, seats=1)
    generating.ask([3], Sampling(max_tokens=3))
    generating.loop.step()
    usual, urgent = (generating.ask([3], Sampling(max_tokens=3), priority=priority) for priority in (0, 1))
    generating.run()
    assert urgent.request.first_token_ns < usual.request.first_token_ns


def test_a_policy_that_fails_or_chooses_nothing_stops_nobody(small):
    class Failing:
        def __init__(self, chosen):
            self.chosen = chosen

        def select(self, columns, start_ns, capacity, cost):
            return self.chosen

    for chosen in (None, np.empty(0, np.int64), np.array([7]), np.array([0, 0])):
        generating = Generating(small)
        generating.line._policy = Failing(chosen)
        asked = [generating.ask([3], Sampling(max_tokens=3)) for _ in range(3)]
        generating.run()
        assert all(said.error is None for said in asked)
