from dataclasses import replace

import numpy as np
import pytest

from hplm.scheduling.cost import FIRST
from hplm.scheduling.limits import Limits
from hplm.scheduling.policy import policy
from hplm.scheduling.queue import LEAST_TOKENS
from hplm.scheduling.scheduler import Scheduler
from hplm.scheduling.selection import Capacity
from hplm.simulate.arrivals import Arrivals, Lengths, Stream
from hplm.simulate.encoders import SimulatedEngine, one_stage, simulate_one

pytestmark = pytest.mark.slow

CAPACITY = Capacity(320, 320, 320)
FULL_BATCH = 1e6 + 320 * 20e3
TEXTS_A_SECOND = 320 / 20 / FULL_BATCH * 1e9


def batch_ns(lengths, places):
    return 1e6 + 20e3 * lengths.sum()


def _run(given_policy, load, admission=False):
    scheduler = Scheduler(policy(given_policy), Limits(10**6, 10**9), admission, 0)
    return simulate_one(scheduler, SimulatedEngine(one_stage(batch_ns), CAPACITY), load)


def _load(rate, seconds=0.5, **options):
    return Stream(rate * TEXTS_A_SECOND, seconds, allowed_ms=(12.0, 75.0), **options).draw(3)


@pytest.mark.parametrize("rate", [1.0, 1.5, 3.0])
@pytest.mark.parametrize("variance", [20, 100])
def test_the_default_has_the_utility_of_shortest_first_and_answers_more_in_time(rate, variance):
    load = _load(rate, 1.0, lengths=Lengths(20, variance))
    default, shortest, skipping = (_run(name, load) for name in ("timely", "sjf", "sjf:in_time=1"))
    assert default.utility >= 0.99 * shortest.utility
    assert default.on_time.mean() > shortest.on_time.mean() and default.on_time.mean() >= skipping.on_time.mean() - 0.002


@pytest.mark.parametrize("lengths", [Lengths(20, 20), Lengths(8, 4)])
def test_a_flood_of_one_tenant_does_not_delay_another(lengths):
    modest = _load(0.2, 1.0)
    flood = Stream(3 * TEXTS_A_SECOND, 1.0, lengths, (12.0, 75.0), tenants=(1,)).draw(4)
    alone, beside = (_run("timely", load) for load in (modest, Arrivals.together([modest, flood])))
    mine = beside.arrivals.tenant == 0
    assert beside.on_time[mine].mean() > 0.97 * alone.on_time.mean()
    took = (beside.answered_ns - beside.arrivals.at_ns)[mine & beside.answered]
    assert np.percentile(took, 99) < 2 * 1.1 * FULL_BATCH  # the running batch, and its own batch


def test_admission_refuses_no_request_that_would_be_in_time():
    outcome = _run("timely", _load(0.5), admission=True)
    assert outcome.on_time.all()


def test_a_bound_on_the_length_of_batches_keeps_a_quiet_tenant_from_waiting_behind_a_flood():
    """An engine that takes two seconds for a whole batch, and a flood of twice what it can do."""
    slow, unhurried = one_stage(lambda lengths, places: 5e6 + 500e3 * lengths.sum()), (0.0, 0.0)
    flood = Stream(200.0, 10.0, allowed_ms=unhurried, tenants=[0]).draw(3)
    quiet = Stream(5.0, 10.0, allowed_ms=unhurried, tenants=[1]).draw(4)
    load = Arrivals.together([flood, quiet])
    waits, longest = {}, {}
    for batch_ns in (0, 50_000_000):
        scheduler = Scheduler(policy("timely"), Limits(10**6, 10**9), batch_ns=batch_ns)
        outcome = simulate_one(scheduler, SimulatedEngine(slow, Capacity(4096, 4096, 4096)), load)
        assert outcome.answered.all()
        waits[batch_ns] = np.median((outcome.answered_ns - load.at_ns)[load.tenant == 1])
        longest[batch_ns] = max(outcome.batches[len(outcome.batches) // 2 :])  # the first predictions are poor
    assert longest[0] > 4000 and LEAST_TOKENS / 2 < longest[50_000_000] <= LEAST_TOKENS
    assert waits[50_000_000] < waits[0] / 3


def _bounded(deadline_ms, rate=300.0, batch_ns=25_000_000):
    """Twenty tenants offer twice what an engine can do that takes 40 ms for a batch, and 5 ms for each of its texts."""
    slow = one_stage(lambda lengths, places: 40e6 + 5e6 * len(lengths))
    load = Stream(rate, 4.0, Lengths(40, 0), allowed_ms=deadline_ms, tenants=range(20)).draw(5)
    scheduler = Scheduler(policy("timely"), Limits(10**6, 10**9), True, batch_ns=batch_ns)
    return simulate_one(scheduler, SimulatedEngine(slow, Capacity(4096, 4096, 4096)), load)


def test_batches_become_longer_where_a_long_line_of_several_tenants_waits():
    outcome, usual = _bounded((0.0, 0.0)), 25 / 5 * 40
    assert outcome.answered.all()
    assert 2 * usual < np.median(outcome.batches[2 * FIRST :]) <= max(outcome.batches[2 * FIRST :]) <= 4.4 * usual


def test_batches_are_as_long_as_the_line_before_it_is_long():
    """Half of what it can do comes. Batches of five texts, as long as the bound, would answer 77 texts a second."""
    bounded, endless = (_bounded((0.0, 0.0), rate=100.0, batch_ns=bound) for bound in (25_000_000, 0))
    median, least = (np.median(one.answered_ns - one.arrivals.at_ns) for one in (bounded, endless))
    assert median < 1.2 * least


def test_no_text_misses_its_deadline_by_a_batch_that_became_longer():
    outcome, usual = _bounded((100.0, 1000.0)), 25 / 5 * 40
    assert max(outcome.batches[2 * FIRST :]) > 2 * usual
    settled = np.arange(len(outcome.answered)) > len(outcome.answered) / 4  # the first batches have no bound
    assert (outcome.answered & ~outcome.on_time)[settled].mean() < 0.01


def test_requests_that_are_refused_or_expire_are_a_crowd_too():
    """With deadlines of about a batch, no more than a batch ever waits."""
    load, rungs, rng = Stream(3 * TEXTS_A_SECOND, 3.0, allowed_ms=(6.0, 9.0)).draw(1), [], np.random.default_rng(0)

    class Asking(Scheduler):
        """Asks for the rung of each text, as the server does. The rungs change nothing here."""

        def offer(self, texts, now_ns):
            rungs.append(self.governor.rung_for(texts[0].tenant, texts[0].tokens, (1.0, 0.55, 0.35, 0.25), now_ns))
            return super().offer(texts, now_ns)

    scheduler = Asking(policy("timely"), Limits(10**6, 10**9), True, 0)
    noisy = one_stage(lambda lengths, places: batch_ns(lengths, places) * rng.normal(1, 0.05))
    simulate_one(scheduler, SimulatedEngine(noisy, CAPACITY), load)
    assert min(rungs[len(load) // 2 :]) >= 2


def test_a_text_is_staged_computed_and_on_its_way_to_the_client_one_after_the_other():
    load = Stream(1.0, 1.0, allowed_ms=(6.5, 6.5)).draw(0)
    machine = SimulatedEngine(one_stage(lambda lengths, places: 4e6), CAPACITY, staging_ns=2_000_000, answering_ns=1_000_000)
    outcome = simulate_one(Scheduler(policy("timely"), Limits(10**6, 10**9)), machine, load)
    assert (outcome.started_ns - load.at_ns).tolist() == [2_000_000]
    assert (outcome.answered_ns - load.at_ns).tolist() == [7_000_000] and not outcome.on_time.any()


def test_the_engine_takes_its_time_from_one_batch_to_the_next():
    zeros = np.zeros(3, np.int64)
    machine = SimulatedEngine(one_stage(lambda lengths, places: 4e6), CAPACITY, turn_ns=1_000_000)
    load = Arrivals(zeros, zeros + CAPACITY.tokens, zeros, zeros, zeros)
    outcome = simulate_one(Scheduler(policy("fcfs"), Limits(10**6, 10**9)), machine, load)
    assert outcome.started_ns.tolist() == [0, 5_000_000, 10_000_000]
    assert outcome.answered_ns.tolist() == [4_000_000, 9_000_000, 14_000_000]


def test_a_batch_waits_for_each_stage_that_is_busy_and_the_scheduler_hears_of_it():
    zeros, capacity = np.zeros(20, np.int64), replace(CAPACITY, in_flight=3)
    machine = SimulatedEngine(lambda texts, places: [1e6, 3e6], capacity, stages=2)
    scheduler, ends = Scheduler(policy("fcfs"), Limits(10**6, 10**9)), []
    finished = scheduler.finished
    scheduler.finished = lambda batch, now, *learned: ends.append(now) or finished(batch, now, *learned)
    outcome = simulate_one(scheduler, machine, Arrivals(zeros, zeros + capacity.tokens, zeros, zeros, zeros))
    assert ends == outcome.answered_ns.tolist() == [10**6 + 3 * 10**6 * batch for batch in range(1, 21)]
    assert outcome.started_ns.tolist() == [0, 10**6, 2 * 10**6, *ends[:-3]]
    assert scheduler.cost.shares == pytest.approx([0.25, 0.75])
