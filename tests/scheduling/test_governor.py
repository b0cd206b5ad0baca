"""The governor in a loop with an engine that is a number: what it computes in a batch."""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import pytest

from hplm.scheduling.columns import Columns
from hplm.scheduling.cost import CostModel
from hplm.scheduling.fairness import fair_share
from hplm.scheduling.governor import CALM, HORIZON_NS, LOOKS, Governor
from hplm.simulate.arrivals import SimulatedText

FULL = 1000  # tokens of a batch
BATCH_NS = 30_000_000
SECOND = 10**9
LADDER = (1.0, 0.55, 0.35, 0.25)
NONE = (1.0,)


@dataclass
class Tenant:
    share: float  # of the engine that its texts would take at the dearest rung
    costs: tuple = LADDER
    every: int = 1  # sends in one of so many batches
    truth: tuple = ()  # the costs that its rungs really have


class Engine:
    """What cannot be computed waits. Tenants within their fair share of a batch are served first."""

    def __init__(self, batch_ns=BATCH_NS, noise=0.0):
        cost = CostModel()
        cost.terms = np.array([0, batch_ns / FULL, 0, 0])
        self.governor = Governor(cost)
        self.now = 0
        self.waits = defaultdict(int)
        self._batch_ns = batch_ns
        self._noise = noise
        self._rng = np.random.default_rng(0)
        self._batches = 0

    def serve(self, tenants, seconds):
        """Returns the rungs that the tenants' requests got, and those of the governor after each batch."""
        got, rungs = defaultdict(list), []
        for _ in range(max(1, int(seconds * SECOND / self._batch_ns))):
            self._batches += 1
            for name, tenant in tenants.items():
                if self._batches % tenant.every:
                    continue
                tokens = int(FULL * tenant.share * tenant.every * max(0, 1 + self._noise * self._rng.normal()))
                rung = self.governor.rung_for(name, tokens, tenant.costs, self.now)
                got[name].append(rung)
                self.waits[name] += int(tokens * (tenant.truth or tenant.costs)[rung])
            self._compute()
            self.now += self._batch_ns
            rungs.append(self.governor.rung)
        return got, rungs

    def _compute(self):
        waited = sum(self.waits.values())
        share = fair_share(np.array(list(self.waits.values())), FULL)
        for name in self.waits:
            self.waits[name] = int(max(0, self.waits[name] - share))
        left = [SimulatedText(tokens=tokens, arrival_ns=0, tenant=name) for name, tokens in self.waits.items() if tokens]
        if waited:
            self.governor.chosen((min(waited, FULL), 10, 0), Columns(left), waited > FULL, self.now)


def _changes(rungs):
    return np.count_nonzero(np.diff(rungs))


@pytest.mark.parametrize("batch_ns", [BATCH_NS // 10, BATCH_NS, SECOND])
def test_a_crowd_steps_down_within_some_batches_until_it_can_be_served(batch_ns):
    engine = Engine(batch_ns)
    _, rungs = engine.serve({"one": Tenant(3.0)}, 20 * batch_ns / SECOND)
    assert rungs.index(1) == LOOKS - 1
    assert rungs.index(3) <= 3 * LOOKS and rungs[-1] == 3


def test_calm_steps_up_one_rung_at_a_time():
    engine = Engine()
    engine.serve({"one": Tenant(3.0)}, 1)
    _, rungs = engine.serve({"one": Tenant(0.4)}, 60)
    assert rungs[-1] == 0
    assert set(np.diff(rungs[rungs.index(3) :])) <= {0, -1}
    steps = np.flatnonzero(np.diff(rungs) == -1)
    assert np.diff(steps).min() * BATCH_NS >= CALM * HORIZON_NS - BATCH_NS


def test_no_step_up_would_use_more_than_the_bound():
    for load, rung in {0.65: 0, 0.75: 1, 1.2: 1, 1.35: 2, 1.9: 2, 2.1: 3}.items():
        engine = Engine()
        engine.serve({"one": Tenant(4.0)}, 0.5)
        _, rungs = engine.serve({"one": Tenant(load)}, 30)
        assert rungs[-1] == rung, load


@pytest.mark.parametrize("load", [0.6, 0.68, 0.72, 0.9, 0.98, 1.02, 1.2, 1.3, 1.8, 2.0, 3.9, 4.1])
def test_a_steady_load_lets_the_rung_settle(load):
    engine = Engine(noise=0.2)
    _, rungs = engine.serve({"one": Tenant(load)}, 60)
    assert _changes(rungs) <= 6
    assert _changes(rungs[len(rungs) // 2 :]) <= 2


def test_steps_up_that_do_not_last_become_rare():
    """A rung costs more than its ladder says: after each step up the engine has too much to do."""
    tenants = {"one": Tenant(1.3, costs=(1.0, 0.4, 0.25), truth=(1.0, 0.9, 0.25))}
    _, rungs = Engine().serve(tenants, 240)
    quarter = len(rungs) // 4
    assert _changes(rungs[:quarter]) > 2 and _changes(rungs[-quarter:]) <= 4


@pytest.mark.parametrize("noisy", [LADDER, NONE, (1.0, 0.9)])
@pytest.mark.parametrize("count", [1, 30])
def test_noisy_tenants_cost_a_quiet_one_no_rung(noisy, count):
    """Also while the noisy ones have no cheaper rung. The quiet one sends steadily, or now and then."""
    for every in (1, 20):
        engine = Engine(noise=0.1)
        tenants = {name: Tenant(4.0 / count, noisy) for name in range(count)}
        got, _ = engine.serve(tenants | {"quiet": Tenant(0.5 / (count + 1), every=every)}, 13)
        assert not any(got["quiet"]) and len(got["quiet"]) > 20
        assert all(rung == len(noisy) - 1 for name in range(count) for rung in got[name][100:])


def test_a_tenant_that_becomes_quiet_and_an_idle_engine_have_the_dearest_rung_again():
    engine, noisy = Engine(), Tenant(3.0)
    engine.serve({"noisy": noisy, "other": Tenant(3.0)}, 5)
    got, _ = engine.serve({"noisy": noisy, "other": Tenant(0.1)}, 10)
    assert got["other"][0] == 3 and not any(got["other"][-100:]) and got["noisy"][-1] == 3
    assert engine.governor.rung
    engine.waits.clear()
    engine.now += 10 * SECOND
    assert engine.governor.rung_for("noisy", 10, LADDER, engine.now) == 0


@pytest.mark.parametrize("count", [10, 1000])
def test_many_tenants_of_equal_load_go_down_together(count):
    """With a thousand, each of which sends a text every ten seconds, no tenant is noisy by itself."""
    every = 1 if count == 10 else 333
    engine, got = Engine(), []
    for batch in range(300):
        sending = range(count) if every == 1 else [(batch * 9 + i) % count for i in range(9)]
        rungs, _ = engine.serve({name: Tenant(3.0 / len(sending)) for name in sending}, BATCH_NS / SECOND)
        got += [rung for of_tenant in rungs.values() for rung in of_tenant]
    assert engine.governor.rung == 3 and np.mean(got[len(got) // 2 :]) > 2.9


def test_a_tenant_that_fixed_its_way_counts_as_load():
    engine = Engine()
    got, rungs = engine.serve({"fixed": Tenant(2.0, costs=(0.5,)), "free": Tenant(1.0)}, 5)
    assert not any(got["fixed"]) and rungs[-1] == 3 and got["free"][-1] == 3


@pytest.mark.parametrize("idle", [0, 5, 400, 10**5])
def test_tenants_that_send_nothing_are_forgotten_however_long_the_server_was_idle(idle):
    """The load of an idle time is so small that it counts as 0: what is known of those tenants would stay for ever."""
    engine = Engine()
    for name in ("one", *range(1000)):
        engine.governor.rung_for(name, 20, LADDER, engine.now)
    engine.now += idle * SECOND
    assert engine.governor.rung_for("one", 20, NONE, engine.now) == 0
    engine.serve({"one": Tenant(0.1)}, 5)
    assert len(engine.governor) == 1


def test_the_backlog_of_a_noisy_tenant_costs_a_quiet_one_no_rung():
    engine = Engine()
    engine.serve({"noisy": Tenant(10.0, NONE)}, 3)
    got, _ = engine.serve({"quiet": Tenant(0.1)}, 10)
    assert engine.waits["noisy"] and not any(got["quiet"])
