"""Forecasts, who starts next, and the memory of those that wait."""

import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest

from hplm.generation.forecast import Ahead, Load, forecast
from hplm.generation.request import Request, Sequence
from hplm.generation.running import Learned
from hplm.generation.sampling import Sampling
from hplm.scheduling.cost import Cost
from tests.generation.fake import Fake
from tests.generation.world import MS, World, greedy

COST = Cost(np.array([5 * MS, MS / 10, MS / 10, 0]))


def growing(left):
    """Returns a sequence that gets so many tokens more."""
    request = SimpleNamespace(sampling=SimpleNamespace(max_tokens=40))
    return SimpleNamespace(expected=lambda share: left, request=request, tenant=left, uncomputed=1)


RUNNING = SimpleNamespace(
    seats=4, cache=SimpleNamespace(tokens=1024), spare=256, uncomputed=0, sequences=list(map(growing, (10, 20, 30))),
    further=[], places=lambda sequence: 256, learned=Learned(),
)  # fmt: skip
LOAD = Load(RUNNING, COST)


@pytest.mark.parametrize(
    ("places", "seats", "steps"),
    [(256, 1, 0), (257, 1, 10), (768, 1, 20), (32, 3, 20), (1025, 1, 30 + 40), (32, 9, 30 + 2 * 40)],
)
def test_a_request_waits_for_the_memory_and_the_seats_of_others(places, seats, steps):
    assert LOAD.steps_until(places, seats) == steps


def test_each_that_waits_before_it_makes_it_later():
    times = [forecast(LOAD, Ahead(i, 50 * i, 64 * i), 50, 64)[0] for i in range(30)]
    assert times == sorted(times) and len(set(times)) == 30
    assert forecast(LOAD, Ahead(0, 0, 0), prompt=100, places=256)[0] == pytest.approx(10 * MS + 5.8 * MS)


def test_forecasts_learn_how_wrong_they_were():
    learned = Learned()
    for _ in range(100):
        learned.first_token(10.0, 20.0)
        learned.ended(25, 100)
    learned.first_token(0.0, 20.0)  # it had no forecast
    assert learned.factor == pytest.approx(2, abs=0.01) and learned.share == pytest.approx(0.25, abs=0.01)


@pytest.mark.parametrize(
    ("tokens", "more", "echo"),
    [
        (10_000, {}, 0),
        (10_000, {"echo": True}, 100_000),
        (1_000, {"stop": lambda: tuple("水" * 256 for _ in range(16))}, 0),
        (100, {"logit_bias": lambda: {1000 + i: i / 7 for i in range(1024)}}, 0),
        (100, {"stop_token_ids": lambda: tuple(1000 + i for i in range(1024))}, 0),
    ],
)
def test_the_memory_of_waiting_requests_is_counted(tokens, more, echo):
    """By what is counted, `queue_mb` bounds what is kept."""
    ids, source = np.arange(1000, 1000 + tokens), Fake().sources[0]
    tracemalloc.start()
    try:
        sampling = Sampling(**{name: value() if callable(value) else value for name, value in more.items()})
        given = {"arrival_ns": 1, "seed": 1, "echo": "水" * echo}
        sequence = Sequence(Request(source, ids.tolist(), ids.copy(), sampling, print, lambda ids: "", **given))
        kept = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert 0.7 * kept < sequence.bytes < 1.5 * kept


def test_forecasts_learn_nothing_from_the_time_in_the_front_door():
    """It is over when the forecast is made."""
    factors = []
    for waited_ns in (0, 2000 * MS):
        world = World(Fake(), seats=1, admission=True)
        world.ask(range(3, 9), greedy(100))
        world.step(10)
        for _ in range(5):
            world.ask([3], Sampling(max_tokens=3), waited_ns=waited_ns)
        world.run()
        factors.append(world.running.learned.factor)
    assert factors[0] == factors[1] != 1


@pytest.mark.parametrize(("order", "priority", "late_first"), [("fcfs", 0, False), ("sjf", 0, True), ("fcfs", 1, True)])
def test_policies_and_priorities_choose_who_starts(order, priority, late_first):
    """The later request is shorter."""
    world = World(Fake(), seats=1, order=order)
    world.ask([3], greedy(3))
    world.step()
    early, late = (world.ask([3] * size, greedy(3), priority=own) for size, own in ((30, 0), (5, priority)))
    world.run()
    assert (late.request.first_token_ns < early.request.first_token_ns) == late_first


def test_a_claimed_arrival_takes_no_room_from_those_before():
    """Both start, as if answers were short. The world sees whether the oldest is put back."""
    world = World(Fake(), tokens=64, seats=2, share=0.1)
    early, late = (world.ask([3] * 8, greedy(40), waited_ns=waited) for waited in (0, 10**12))
    while not early.ended:
        world.step()
    assert not late.ended
    world.run()
