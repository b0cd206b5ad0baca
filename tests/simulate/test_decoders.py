"""Decoders on a virtual clock: what is admitted under overload is in time, nobody waits for long, and tokens are shared."""

from contextlib import suppress
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from hplm.errors import DeadlineMissed
from hplm.generation.settings import Promise, Settings
from hplm.metrics.names import LATE_TOKENS
from hplm.simulate.decoders import Simulation, StepCost
from tests.generation.fake import Fake
from tests.generation.world import World, greedy

MS = 1_000_000
COUNT = 500  # requests
TENANTS, WAITING = 8, 6
SMALL = Settings(max_sequences=16, cache_tokens=4096)
LATE = Promise(8000 * MS, 1000 * MS)


def simulated(**settings):
    return Simulation(replace(SMALL, **settings), StepCost())


def lengths(chance, count):
    """Returns geometrically distributed numbers of tokens, from 8 to 128."""
    return np.minimum(8 + chance.geometric(1 / 32, count), 128).tolist()


@cache
def rate_of(**settings):
    """Returns how many requests a second are answered if all are there from the start."""
    simulation, chance = simulated(**{**settings, "admission": False}), np.random.default_rng(0)
    for wanted in lengths(chance, 200):
        simulation.ask(int(chance.integers(10, 60)), wanted, wanted)
    simulation.finish()
    return 200 * 1000 * MS / simulation.now_ns


def overloaded(times, promise, given=1.0, **settings):
    """Returns the shares of requests that were admitted, and of these that were answered in time.

    `given`: which part of `max_tokens` the answers have.
    """
    simulation, chance = simulated(**settings), np.random.default_rng(0)
    arrivals = np.cumsum(chance.exponential(1000 * MS / (times * rate_of(**settings)), COUNT)).astype(np.int64)
    refused = 0
    for when, wanted in zip(arrivals.tolist(), lengths(chance, COUNT), strict=True):
        simulation.until(when)
        try:
            simulation.ask(int(chance.integers(10, 60)), wanted, int(wanted / given), promise)
        except DeadlineMissed:
            refused += 1
    simulation.finish()
    admitted = simulation.answers[len(simulation.answers) // 5 :]  # what results teach comes first
    return 1 - refused / COUNT, sum(answer.on_time for answer in admitted) / len(admitted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("promise", "more", "least"),
    [
        (LATE, {}, 0.35),  # half of them could be answered
        (LATE, {"given": 0.5}, 0.35),
        (Promise(first_token_ns=500 * MS), {"given": 0.5}, 0.35),
        (Promise(whole_ns=6000 * MS), {}, 0.35),
        (LATE, {"cache_tokens": 1024}, 0.3),
    ],
)
def test_what_is_admitted_under_overload_is_in_time(promise, more, least):
    admitted, in_time = overloaded(2.0, promise, **more)
    assert in_time >= 0.9 and admitted >= least


@pytest.mark.slow
def test_only_admission_refuses_and_only_under_overload():
    admitted, in_time = overloaded(0.6, Promise(8000 * MS, 2000 * MS))
    assert admitted >= 0.97 and in_time >= 0.97
    admitted, in_time = overloaded(2.0, LATE, admission=False)
    assert admitted == 1 and in_time < 0.7


def test_a_simulated_answer_is_late_where_its_promise_was_not_kept():
    simulation = simulated(admission=False)
    promises = (Promise(), Promise(first_token_ns=1), Promise(whole_ns=60 * MS), Promise(whole_ns=3000 * MS))
    answers = [simulation.ask(10, 5, 8, promise) for promise in promises]
    simulation.finish()
    assert [answer.on_time for answer in answers] == [True, False, False, True]
    assert [answer.request.generated == 5 for answer in answers] == [True, True, False, True]


def test_who_waits_starts_when_another_one_has_ended_while_the_others_go_on():
    """Early cleaning (TCB 4.2.2): what it held is free before the next step."""
    simulation = simulated(max_sequences=2, admission=False)
    short, long, waits = (simulation.ask(10, wanted, wanted) for wanted in (5, 60, 50))
    while not short.request.ended:
        simulation.step()
    assert not waits.request.generated
    simulation.step()
    assert waits.request.generated and not long.request.ended
    simulation.finish()


@pytest.mark.parametrize(
    ("promise", "prompt", "most"),
    [
        (Promise(), 200, 3.3),
        (Promise(), 1500, 3.3),
        (Promise(token_ns=50 * MS), 1500, 2.6),  # a step without prompts takes 21 ms
        (Promise(token_ns=10 * MS), 1500, 2.2),  # the other tenant's fair share of the time
        (Promise(token_ns=200 * MS), 1500, 3.3),
    ],
)
def test_long_prompts_of_others_hold_up_no_token_for_long(promise, prompt, most):
    """Their pieces are as small as the learned costs of a step say. They lose little by it."""
    simulation = warm(max_sequences=8, admission=False)
    answer = simulation.ask(10, 200, 200, promise, tenant=1)
    simulation.step()
    start, times, count = simulation.now_ns, [], 0
    long = [simulation.ask(prompt, 2, 2, tenant=2) for _ in range(1500 // prompt)]
    while not all(one.request.ended for one in long):
        simulation.step()
        if answer.request.generated > count:
            times.append(answer.last_ns)
            count = answer.request.generated
    assert np.diff(times).max() < most * 21 * MS
    alone_ns = 1500 * MS / 2 + 1500 / 256 * 20 * MS
    assert simulation.now_ns - start < 2.1 * alone_ns, "prompts have at least half of the time"


@pytest.mark.parametrize(("admission", "taken"), [(True, 1), (False, 3)])
def test_targets_for_single_tokens_take_nobody_elses_time(admission, taken):
    """Each step of two sequences takes longer than the targets allow. Long answers with targets come first."""
    simulation, chance = warm(admission=admission), np.random.default_rng(0)
    hurried = []
    for tenant in range(3):
        with suppress(DeadlineMissed):
            hurried.append(simulation.ask(20, 600, 600, Promise(token_ns=21_900_000), tenant=1000 + tenant))
        simulation.step()
    assert len(hurried) == taken
    asked = []
    for _ in range(100):
        simulation.until(simulation.now_ns + int(chance.exponential(150 * MS)))
        wanted = int(chance.integers(20, 60))
        asked.append(simulation.ask(int(chance.integers(10, 60)), wanted, wanted, Promise(whole_ns=8000 * MS)))
    simulation.finish()
    assert all(answer.on_time for answer in asked) and all(answer.error is None for answer in hurried)
    counts, _ = simulation.meter.take()
    assert counts[LATE_TOKENS, ()] > 300, "targets that were missed are counted"


def warm(**settings):
    """Returns a simulation whose loop knows what a step costs."""
    simulation = simulated(**settings)
    for _ in range(20):
        simulation.ask(30, 4, 4)
    simulation.finish()
    return simulation


@pytest.mark.parametrize(("others", "allowed_ms", "taken"), [(0, 22, True), (2, 22, False), (2, 55, False), (2, 90, True)])
def test_a_target_for_tokens_is_taken_if_it_holds_while_others_have_their_share(others, allowed_ms, taken):
    """Some 23 ms if each of the three has a token of a step, and thrice as long while the two others read their prompts."""
    simulation = warm()
    for tenant in range(others):
        simulation.ask(300, 10, 10, tenant=tenant)
    with suppress(DeadlineMissed):
        simulation.ask(20, 10, 10, Promise(token_ns=allowed_ms * MS), tenant=9)
    assert (len(simulation.answers) == 20 + others + 1) == taken


@pytest.mark.parametrize("readers", [1, 3])
def test_prompts_have_their_share_of_the_steps_of_a_sequence_with_a_target(readers):
    """The target leaves them no time. They have as much as their tenants' share, and so has the sequence."""
    simulation = warm(admission=False)
    hurried = simulation.ask(1, 200, 200, Promise(token_ns=MS), tenant=1000)
    simulation.step()
    start, before = simulation.now_ns, hurried.request.generated
    prompts = [simulation.ask(1000, 1, 1, tenant=2000 + number) for number in range(readers)]
    while not all(answer.request.ended for answer in prompts):
        simulation.step()
    alone_ns, took_ns = readers * 1000 * MS / 2, simulation.now_ns - start
    assert alone_ns < took_ns < 1.3 * alone_ns * (readers + 1) / readers
    assert hurried.request.generated - before > 0.7 * took_ns / (readers + 1) / (21 * MS)
    assert simulation.meter.take()[0][LATE_TOKENS, ()] > hurried.request.generated / 2, "missed targets are not counted"


class Busy:
    """Tenants that ask again as soon as one of their answers has ended. The first one asks for more than the others."""

    def __init__(self, n=1, wanted=40, prompt=20, **settings):
        self.simulation = Simulation(Settings(max_sequences=16, admission=False, **settings), StepCost())
        self.first = {"n": n, "wanted": wanted, "prompt": prompt}
        self.asked = [[] for _ in range(TENANTS)]

    def run(self, seconds):
        ends = self.simulation.now_ns + seconds * 1000 * MS
        while self.simulation.now_ns < ends:
            for tenant, own in enumerate(self.asked):
                given = {"n": 1, "wanted": 40, "prompt": 20} if tenant else self.first
                while sum(not answer.request.ended for answer in own[-2 * WAITING :]) < WAITING:
                    own.append(self.simulation.ask(most=given["wanted"], tenant=tenant, **given))
            self.simulation.step()

    def shares(self):
        generated = [sum(answer.request.generated for answer in own) for own in self.asked]
        return [own / sum(generated) for own in generated]


@pytest.mark.parametrize("settings", [{}, {"cache_tokens": 2048}, {"policy": "fcfs"}])
@pytest.mark.parametrize("more", [{}, {"n": 16}, {"wanted": 400}, {"prompt": 400}])
def test_nobody_gets_more_by_several_choices_or_longer_texts(more, settings):
    busy = Busy(**more, **settings)
    busy.run(15)
    shares = busy.shares()
    assert shares[0] < 1.1 / TENANTS and min(shares[1:]) > 0.9 / TENANTS, shares


def test_a_lone_tenant_has_all():
    """Shares hold nobody back while nobody else waits."""
    simulation = Simulation(Settings(max_sequences=16, admission=False), StepCost())
    answer = simulation.ask(20, 40, 40, tenant=1, n=16)
    for _ in range(4):
        simulation.step()
    assert answer.request.generated > 16, "not all choices run at once"


def test_further_choices_wait_as_requests_of_their_tenant_do():
    """With two sequences at once, another tenant comes between the first choice and the others, which no policy sees."""
    world = World(Fake(), seats=2)
    many = world.ask([3], greedy(6, n=4))
    world.step()
    other = world.ask([4], greedy(3), tenant=1)
    late = world.ask([5], greedy(3), tenant=0)
    world.run()
    assert other.request.first_token_ns < late.request.first_token_ns
    ends = [many.pieces.index(next(one for one in many.pieces if one.choice == choice and one.finish)) for choice in range(4)]
    assert ends == sorted(ends)
    assert all(world.assert_right(said) for said in world.said)


@pytest.mark.parametrize("alone", [{1}, {1, 2}])
def test_who_runs_alone_shares_no_step_and_all_get_on(alone):
    """Such a tenant may have ended an engine. Others have steps between its own."""
    world = World(Fake(), seats=8)
    world.loop.alone = frozenset(alone)
    asked = [world.ask([3, 4, 5], greedy(10), tenant, seed=number) for number, tenant in enumerate((0, 1, 2, 3, 1))]
    steps, stage = [], world.stager.stage
    world.stager.stage = lambda planned, broken: (
        steps.append({one.sequence.tenant for one in planned}),
        stage(planned, broken),
    )[1]
    world.run()
    together = {0, 1, 2, 3} - alone
    assert all(step <= together or step in [{tenant} for tenant in alone] for step in steps)
    turns = len(alone) + 1
    assert [step in steps[:turns] for step in (together, *({tenant} for tenant in alone))] == [True] * turns
    assert all(world.assert_right(said) == 10 for said in asked)


def test_others_start_beside_a_long_prompt():
    world = World(Fake(), step_tokens=16)
    long = world.ask([3] * 300, greedy(3))
    world.step(2)
    short = world.ask([4] * 6, greedy(3), tenant=1)
    world.step(2)
    assert short.request.generated and not long.request.generated
    world.run()
    assert all(world.assert_right(said) for said in world.said)
