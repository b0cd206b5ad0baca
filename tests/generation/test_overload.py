"""Serving on a virtual clock: what is admitted under overload is in time, and early cleaning is worth what TCB says."""

from dataclasses import replace

import numpy as np
import pytest

from hplm.errors import DeadlineMissed
from hplm.generation.cache import BATCH, EARLY
from hplm.generation.promise import Promise
from hplm.generation.service import Settings
from hplm.generation.simulation import Simulation, StepCost
from hplm.options import PAGED, SLOTTED

MS = 1_000_000
SMALL = Settings(seats=16, cache_tokens=4096, cache=SLOTTED)
LATE = Promise(8000 * MS, 1000 * MS)


def simulated(**settings):
    return Simulation(replace(SMALL, **settings), StepCost())


def lengths(chance, count):
    """Returns geometrically distributed numbers of tokens, from 8 to 128."""
    return np.minimum(8 + chance.geometric(1 / 32, count), 128).tolist()


def rate_of(**settings):
    """Returns how many requests a second are answered if all are there from the start."""
    simulation, chance = simulated(**{**settings, "admission": False}), np.random.default_rng(0)
    for wanted in lengths(chance, 200):
        simulation.ask(int(chance.integers(10, 60)), wanted, wanted)
    simulation.finish()
    return 200 * 1000 * MS / simulation.now_ns


def overloaded(times, promise, given=1.0, count=500, **settings):
    """Returns the shares of requests that were admitted, and of these that were answered in time.

    `given`: which part of `max_tokens` the answers have.
    """
    simulation, chance = simulated(**settings), np.random.default_rng(0)
    arrivals = np.cumsum(chance.exponential(1000 * MS / (times * rate_of(**settings)), count)).astype(np.int64)
    refused = 0
    for when, wanted in zip(arrivals.tolist(), lengths(chance, count), strict=True):
        simulation.until(when)
        try:
            simulation.ask(int(chance.integers(10, 60)), wanted, int(wanted / given), promise)
        except DeadlineMissed:
            refused += 1
    simulation.finish()
    admitted = simulation.answers[len(simulation.answers) // 5 :]  # what results teach comes first
    return 1 - refused / count, sum(answer.on_time for answer in admitted) / len(admitted)


@pytest.mark.parametrize(
    ("promise", "more", "least"),
    [
        (LATE, {}, 0.35),  # half of them could be answered
        (LATE, {"given": 0.5}, 0.35),
        (Promise(first_token_ns=500 * MS), {"given": 0.5}, 0.35),
        (Promise(whole_ns=6000 * MS), {}, 0.35),
        (LATE, {"cache_tokens": 1024}, 0.3),
        (LATE, {"cache_tokens": 1024, "cache": PAGED}, 0.3),
    ],
)
def test_what_is_admitted_under_overload_is_in_time(promise, more, least):
    admitted, in_time = overloaded(2.0, promise, **more)
    assert in_time >= 0.9 and admitted >= least


def test_only_admission_refuses_and_only_under_overload():
    admitted, in_time = overloaded(0.6, Promise(8000 * MS, 2000 * MS), count=1500)
    assert admitted >= 0.97 and in_time >= 0.97
    admitted, in_time = overloaded(2.0, LATE, count=1500, admission=False)
    assert admitted == 1 and in_time < 0.7


def test_a_simulated_answer_is_late_where_its_promise_was_not_kept():
    simulation = simulated(admission=False)
    promises = (Promise(), Promise(first_token_ns=1), Promise(whole_ns=60 * MS), Promise(whole_ns=3000 * MS))
    answers = [simulation.ask(10, 5, 8, promise) for promise in promises]
    simulation.finish()
    assert [answer.on_time for answer in answers] == [True, False, False, True]
    assert [answer.request.generated == 5 for answer in answers] == [True, True, False, True]


def test_early_cleaning_answers_more():
    early, batch = (rate_of(cleaning=cleaning, cache_tokens=2048) for cleaning in (EARLY, BATCH))
    assert early > 1.3 * batch


def test_a_token_comes_as_often_as_promised():
    """Long prompts of others do not hold up a sequence for longer than its promise."""

    def slowest(promise):
        simulation = simulated(seats=8, admission=False)
        for _ in range(20):  # the model of costs learns
            simulation.ask(30, 4, 4)
        simulation.finish()
        times, count = [], 0
        answer = simulation.ask(10, 60, 60, promise)
        for i in range(400):
            if i % 10 == 5 and i < 200:
                simulation.ask(200, 2, 2)
            simulation.step()
            if answer.request.generated > count:
                times.append(answer.last_ns)
                count = answer.request.generated
        return np.diff(times).max()

    assert slowest(Promise()) > 100 * MS
    assert slowest(Promise(token_ns=60 * MS)) <= 66 * MS
