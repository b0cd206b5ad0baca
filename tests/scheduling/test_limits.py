"""A full queue: the tenant that holds the largest share loses, whoever comes next."""

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hplm.errors import DeadlineMissed, QueueFull
from hplm.scheduling.limits import Limits
from hplm.scheduling.policy import policy
from hplm.scheduling.scheduler import Scheduler
from hplm.scheduling.simulation.arrivals import Arrivals, SimulatedText, Stream
from hplm.scheduling.simulation.engines import EngineCost, one_stage
from hplm.scheduling.simulation.server import REFUSED, Machine, Simulation
from hplm.scheduling.waiting import Capacity

ROOM = Capacity(tokens=40, texts=4, tenants=4)
LIMITS = Limits(texts=24, bytes=2400)
MODEST = 3  # tenants that stay within their share, beside one that does not


def _texts(tenant, count=1, size=1, deadline=0):
    return [SimulatedText(tokens=10, bytes=size, arrival_ns=0, deadline_ns=deadline, tenant=tenant) for _ in range(count)]


def _scheduler(limits=LIMITS, admission=False):
    return Scheduler(policy("timely"), limits, admission)


def test_the_tenant_with_the_largest_share_loses_its_newest_requests():
    scheduler = _scheduler()
    noisy = [_texts("noisy", 3) for _ in range(8)]
    for request in noisy:
        assert scheduler.offer(request, 0) == []
    with pytest.raises(QueueFull):
        scheduler.offer(_texts("noisy"), 0)
    assert scheduler.offer(_texts("quiet"), 0) == noisy[-1], "a whole request leaves"
    assert scheduler.offer(_texts("quiet"), 0) == []
    assert scheduler.offer(_texts("calm", 4), 0) == noisy[-2]
    assert len(scheduler) == 24


def test_bytes_count_as_texts_do():
    scheduler = _scheduler()
    large, larger = _texts("noisy", size=1000), _texts("noisy", size=1400)
    scheduler.offer(large, 0)
    scheduler.offer(larger, 0)
    assert scheduler.offer(_texts("quiet", size=100), 0) == larger
    assert scheduler.columns.bytes == 1100


def test_a_request_that_is_refused_displaces_nobody():
    scheduler = _scheduler()
    for tenant in ("one", "other"):
        for _ in range(12):
            scheduler.offer(_texts(tenant), 0)
    for refused in (_texts("new", 13), _texts("new", 1, 2401), _texts("new", 25)):
        with pytest.raises(QueueFull):
            scheduler.offer(refused, 0)
        assert len(scheduler) == 24
    assert len(scheduler.offer(_texts("new", 8), 0)) == 8


def test_a_request_that_admission_refuses_displaces_nobody():
    scheduler, now = _scheduler(admission=True), 0
    for _ in range(20):
        scheduler.offer(_texts("noisy", 4), now)
        batch = scheduler.choose(ROOM, now)
        scheduler.started(batch, now)
        now += 10**9
        scheduler.finished(batch, now)
    for _ in range(24):
        scheduler.offer(_texts("noisy"), now)
    with pytest.raises(DeadlineMissed):
        scheduler.offer(_texts("quiet", deadline=now + 1), now)
    assert len(scheduler) == 24
    assert len(scheduler.offer(_texts("quiet", deadline=now + 10**12), now)) == 1


@dataclass
class Sent:
    tenant: int
    texts: int
    size: int


REQUESTS = st.builds(Sent, st.integers(0, MODEST), st.integers(1, 8), st.integers(1, 300))
STEPS = st.lists(st.one_of(REQUESTS, st.just("batch")), max_size=80)


@given(STEPS, st.booleans())
def test_a_tenant_within_its_share_never_loses_and_every_text_leaves_once(steps, admission):
    """Modest tenants send only while they hold at most their equal share, in texts and in bytes."""
    scheduler = _scheduler(admission=admission)
    waiting: dict[int, Counter] = {tenant: Counter() for tenant in range(MODEST + 1)}
    left = Counter()

    def leave(texts):
        left.update(map(id, texts))
        for text in texts:
            waiting[text.tenant].subtract(texts=1, bytes=text.bytes)

    offered = []
    for step in [*steps, *["batch"] * 100]:
        if step == "batch":
            batch = scheduler.choose(ROOM, 0)
            if batch:
                scheduler.started(batch, 0)
                scheduler.finished(batch, 10**6)
                leave(batch.texts)
            continue
        texts = _texts(step.tenant, step.texts, step.size)
        after = waiting[step.tenant] + Counter(texts=step.texts, bytes=step.texts * step.size)
        share = max(after["texts"] / LIMITS.texts, after["bytes"] / LIMITS.bytes)
        if step.tenant < MODEST and share > 1 / (MODEST + 1):
            continue
        offered.append(texts)
        before = len(scheduler)
        try:
            displaced = scheduler.offer(texts, 0)
        except QueueFull:
            assert step.tenant == MODEST and len(scheduler) == before
            left.update(map(id, texts))
            continue
        waiting[step.tenant].update(texts=step.texts, bytes=step.texts * step.size)
        assert all(text.tenant == MODEST for text in displaced)
        gone = set(map(id, displaced))
        for request in (list(map(id, texts)) for texts in offered):
            assert gone.isdisjoint(request) or gone.issuperset(request)  # whole requests leave
        leave(displaced)
        assert len(scheduler) <= LIMITS.texts and scheduler.columns.bytes <= LIMITS.bytes
        for tenant, counted in waiting.items():
            number = scheduler.columns.number_of(tenant)
            held = (0, 0) if number is None else (scheduler.columns.counts[number], scheduler.columns.sizes[number])
            assert held == (counted["texts"], counted["bytes"])
    assert not len(scheduler) and not scheduler.columns.bytes
    assert left == {id(text): 1 for request in offered for text in request}


def test_a_simulated_flood_takes_no_place_from_others():
    """Twice the engine's capacity without deadlines, and a tenant with a tenth of it beside. The queue holds half a second."""
    cost = EngineCost()
    a_second = 1280 / 20 / cost.packed(Stream(1000, 1).draw(0).tokens[:64]) * 1e9
    flood = Stream(2 * a_second, 3, allowed_ms=(0, 0), tenants=(0,)).draw(1)
    quiet = Stream(0.1 * a_second, 3, allowed_ms=(0, 0), tenants=(1,)).draw(2)
    load = Arrivals.together([flood, quiet])
    scheduler = Scheduler(policy("timely"), Limits(int(a_second / 2), 10**9))
    outcome = Simulation(scheduler, Machine(one_stage(cost.packed), Capacity(1280, 1280, 100)), load).run()
    assert (outcome.fate[load.tenant == 0] == REFUSED).mean() > 0.2
    assert not (outcome.fate[load.tenant == 1] == REFUSED).any()
