import random
from contextlib import suppress
from copy import deepcopy
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hplm.errors import DeadlineMissed
from hplm.scheduling.columns import NEVER
from hplm.scheduling.fairness import beyond_share, fair_first
from hplm.scheduling.limits import Limits
from hplm.scheduling.policy import policy
from hplm.scheduling.scheduler import Scheduler
from hplm.scheduling.selection import Capacity
from hplm.simulate.arrivals import Arrivals, SimulatedText
from hplm.simulate.encoders import REFUSED, SimulatedEngine, one_stage, simulate_one

ROOM = Capacity(tokens=100, texts=100, tenants=100)
FULL = 10_000_000  # a batch of ten texts of ten tokens


def _text(deadline, tenant=0, tokens=10, now=0):
    return SimulatedText(tokens=tokens, arrival_ns=now, deadline_ns=deadline, tenant=tenant, slot_key=tenant)


def _scheduler(**options):
    return Scheduler(policy("timely"), Limits(1000, 10**6), admission=True, **options)


def _full_batch(scheduler, now, took=FULL):
    """Computes a batch, though one more text waits, so that it counts as full. Returns when it has ended."""
    scheduler.offer([_text(0, now=now) for _ in range(11)], now)
    batch = scheduler.choose(ROOM, now)
    scheduler.started(batch, now)
    scheduler.finished(batch, now + took)
    scheduler.abandon()
    return now + took


def _busy(waiting):
    """Returns a scheduler with a learned cost, a batch that has just started, and `waiting` full batches due in time."""
    scheduler, now = _scheduler(), 0
    for _ in range(30):
        now = _full_batch(scheduler, now)
    scheduler.offer([_text(0, now=now) for _ in range(11)], now)
    scheduler.started(scheduler.choose(ROOM, now), now)
    scheduler.abandon()
    for _ in range(10 * waiting):
        scheduler.offer([_text(now + 20 * FULL, now=now)], now)
    return scheduler, now


def _admitted(scheduler, deadline, now, tenant=0):
    """Returns how many texts of a tenant are admitted, one after the other."""
    for number in range(100):
        try:
            scheduler.offer([_text(deadline, tenant, now=now)], now)
        except DeadlineMissed:
            return number
    pytest.fail("all were admitted")


def test_what_an_engine_that_has_computed_nothing_would_need_is_not_guessed():
    scheduler = _scheduler()
    scheduler.offer([_text(0)], 0)
    scheduler.started(scheduler.choose(ROOM, 0), 0)
    scheduler.offer([_text(2, tokens=4000, now=1)], 1)  # it may be in time for all that is known


def test_a_refusal_says_how_long_the_request_would_take():
    scheduler, now = _busy(waiting=1)
    with pytest.raises(DeadlineMissed, match=r"(?=.*\b2\d ms)(?=.*\b15 ms)"):
        scheduler.offer([_text(now + 15_000_000, now=now)], now)
    scheduler.offer([_text(now + 5 * FULL, now=now)], now)


def test_admission_admits_as_many_texts_as_fit_before_the_deadline_and_others_of_a_tenant_within_its_share():
    scheduler, now = _busy(waiting=0)
    assert 20 <= _admitted(scheduler, now + 4 * FULL + FULL // 2, now) <= 30  # the running batch, then three
    scheduler, now = _busy(waiting=0)
    assert _admitted(scheduler, now + 4 * FULL, now, tenant=1)
    scheduler.offer([_text(now + 4 * FULL, tenant=2, now=now)], now)


@pytest.mark.parametrize("tenants", [1, 16])
def test_at_three_times_the_capacity_admitted_texts_are_in_time_and_the_engine_is_never_idle(tenants):
    """Equal texts, eight a batch, with a fair share of half a text a batch: no tenant's first text may displace others."""
    batch, count, rng = 450_000_000, 1500, np.random.default_rng(0)
    load = Arrivals(
        at_ns=np.cumsum(rng.exponential(batch / 24, count)).astype(np.int64),
        tokens=np.full(count, 128),
        allowed_ns=rng.uniform(2 * batch, 12 * batch, count).astype(np.int64),
        tenant=np.arange(count) % tenants,
        priority=np.zeros(count, dtype=np.int64),
    )
    stages = one_stage(lambda lengths, places: (50e6 + 50e6 * len(lengths)) * rng.normal(1, 0.05))
    machine = SimulatedEngine(stages, Capacity(1024, 1024, 1024))
    scheduler = Scheduler(policy("timely"), Limits(count, 10**9), admission=True)
    for _ in range(20):
        scheduler.cost.observe(1024, 8, 0, batch)
    outcome = simulate_one(scheduler, machine, load)
    let_in = outcome.fate != REFUSED
    assert outcome.on_time.sum() / let_in.sum() > 0.95
    assert outcome.on_time.sum() * batch / 8 > 0.95 * load.at_ns[-1]


@pytest.mark.parametrize("slow", ["staging", "batches"])
def test_a_slow_batch_does_not_refuse_requests_for_ever(slow):
    """Predictions refuse nothing when no batch has run for a second, because only a running batch can correct them."""
    scheduler, now = _scheduler(), 0

    def serve(now, staging=1_000_000, computing=100_000_000):
        scheduler.offer([_text(now + 200_000_000, now=now)], now)
        scheduler.expired(now)
        batch = scheduler.choose(ROOM, now)
        if batch is None:
            return False
        scheduler.started(batch, now + staging)
        scheduler.finished(batch, now + staging + computing)
        return True

    for _ in range(50):
        assert serve(now)
        now += 10**9
    for _ in range(1 if slow == "staging" else 400):
        serve(now, **({"staging": 3 * 10**9} if slow == "staging" else {"computing": 300_000_000}))
        now += 4 * 10**9
    served = []
    for _ in range(60):
        served.append(serve(now))
        scheduler.expired(now)
        now += 2 * 10**9
    assert all(served)


def test_after_an_overload_of_uneven_batches_an_idle_engine_refuses_nothing():
    """How far batches were from their predictions says something of the running batch. Now there is none."""
    scheduler, now = _scheduler(), 0
    for number in range(60):
        now = _full_batch(scheduler, now, FULL * (1 + 30 * (number % 3 == 0)))  # a busy machine
    needed, deviation = scheduler.cost.predict(10, 1), scheduler.cost.deviation * scheduler.cost.predict(100, 10)
    assert deviation > FULL / 2 and not len(scheduler)
    scheduler.offer([_text(now + int(needed + deviation), now=now)], now)


def test_a_batch_that_takes_long_counts_as_running():
    scheduler, now = _busy(waiting=0)
    for _ in range(60):  # batches take seconds by now
        scheduler.cost.observe(100, 10, 0, 4 * 10**9)
    for _ in range(10):
        scheduler.offer([_text(0, now=now)], now)
    batch = scheduler.choose(ROOM, now)
    scheduler.started(batch, now)
    with pytest.raises(DeadlineMissed):
        scheduler.offer([_text(now + 1_500_000_000 + 10**7, now=now + 1_500_000_000)], now + 1_500_000_000)


def test_all_texts_of_a_request_expire_with_the_longest():
    scheduler, now = _busy(waiting=0)
    other, short, long = (_text(now + 4 * FULL, tokens=tokens, now=now) for tokens in (10, 10, 90))
    scheduler.offer([other], now)
    scheduler.offer([short, long], now)
    assert not scheduler.expired(now + 2 * FULL)
    assert scheduler.expired(now + 4 * FULL - FULL // 2) == [short, long]
    assert len(scheduler) == 1


def test_at_the_next_expiry_a_text_expires_and_none_before():
    """When that is, is kept between requests. Texts come and leave, and predictions begin, change and end."""
    rng, scheduler, now, running, early = random.Random(0), _scheduler(answering_ns=1000), 0, [], []
    for _ in range(3000):
        now += rng.choice([1, FULL // 10, FULL, 2 * 10**9])
        if rng.random() < 0.6:
            text = _text(rng.choice([0, now + rng.randrange(1, 200) * FULL]), tokens=rng.randrange(1, 30), now=now)
            with suppress(DeadlineMissed):
                scheduler.offer([text], now)
        elif rng.random() < 0.3:
            scheduler.expired(now)
        elif running:
            scheduler.finished(running.pop(), now, adapters=rng.randrange(3))
        elif batch := scheduler.choose(ROOM, now):
            scheduler.started(batch, now)
            running.append(batch)
        expiry = scheduler.next_expiry(now)
        if running and now < expiry < NEVER:
            later = deepcopy(scheduler)
            assert not later.expired(expiry - 1)
            gone = later.expired(expiry)
            assert gone
            early.append(all(text.deadline_ns > expiry for text in gone))
    assert len(early) > 100 and sum(early) > 10, "none is dropped before its deadline, though it cannot be in time"


@pytest.mark.parametrize("answering_ns", [0, 700])
def test_less_is_promised_the_more_of_the_admitted_texts_are_late(answering_ns):
    """Whether they are in time is known when their batch has ended, and counts the time of the answer."""
    admitted = []
    for late in (0, 1, 10):  # texts of each batch
        scheduler, now = _scheduler(answering_ns=answering_ns), 0
        for _ in range(30):
            now = _full_batch(scheduler, now)
        for _ in range(20):
            told = now + 3 * FULL + answering_ns  # when clients have their answers
            scheduler.offer([_text(told - (number < late), now=now) for number in range(10)], now)
            batch = scheduler.choose(ROOM, now)
            scheduler.started(batch, now)
            now += 3 * FULL
            scheduler.finished(batch, now, stages_ns=[FULL])
        admitted.append(_admitted(scheduler, now + answering_ns + 4 * FULL + FULL // 2, now))
    assert admitted[0] > admitted[1] + 10 and admitted[1] > admitted[2] + 2, admitted


texts = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5), st.integers(1, 50)), max_size=60)  # tenant, batch, tokens


@given(texts=texts, first=st.integers(0, 60), grows=st.lists(st.integers(0, 30), min_size=5, max_size=5))
def test_what_tenants_have_beyond_their_share(texts, first, grows):
    allowed = np.cumsum([first, *grows]).astype(float)
    beyond = beyond_share(*np.array(texts, np.int64).reshape(-1, 3).T, allowed)
    for batch, most in enumerate(allowed):
        due = [sum(tokens for owner, at, tokens in texts if owner == tenant and at <= batch) for tenant in range(5)]
        assert beyond[batch] == sum(max(0, has - most) for has in due)


def test_more_tenants_than_16_bits_count_have_shares_of_their_own():
    last = 1 << 16  # in 16 bits it would be tenant 0
    tenant = np.array([*range(last + 1), *[0, last] * 10])
    columns = SimpleNamespace(
        tenant=tenant,
        tenants=last + 1,
        tokens=np.ones(len(tenant), np.int64),
        demand=np.bincount(tenant),
        had=np.zeros(last + 1, np.int64),
    )
    ordered = np.arange(len(tenant))[::-1]
    found = fair_first(columns, ordered, 100)
    assert np.bincount(tenant[found[: last + 1]]).max() == 1
