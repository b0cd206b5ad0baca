"""The threads that drive an encoder and the simulator agree, event for event, on a virtual clock."""

from collections import defaultdict
from contextlib import nullcontext

import numpy as np
import pytest

from hplm.engine.driver import Driver
from hplm.engine.encoder import Encoder
from hplm.engine.in_flight import InFlight
from hplm.scheduling.limits import Limits
from hplm.scheduling.policy import policy
from hplm.scheduling.scheduler import Scheduler
from hplm.scheduling.waiting import Capacity
from hplm.simulate.arrivals import Stream
from hplm.simulate.encoders import Machine, Request, computes_nothing, simulate_one
from tests.engine.asker import stages_of
from tests.support.wait import Hold, eventually


class Told(Scheduler):
    """Notes what it is told and answers, with the virtual time."""

    def __init__(self):
        super().__init__(policy("timely"), Limits(10**6, 10**9))
        self.events = []

    def _note(self, name, now, batch):
        if batch is not None:
            self.events.append((name, now, sorted(text.number for text in batch.texts)))
        return batch

    def choose(self, capacity, now):
        return self._note("choose", now, super().choose(capacity, now))

    def started(self, batch, now):
        super().started(self._note("started", now, batch), now)

    def finished(self, batch, now, *learned):
        super().finished(self._note("finished", now, batch), now, *learned)


class Engine:
    """Computes a batch in a stage until it is told to end."""

    def __init__(self, stages):
        self.stages, self.reached = stages, defaultdict(Hold)  # by batch and stage

    def enter(self, staged, stage):
        self.reached[staged.number, stage].pass_through()
        return []

    def run(self, staged):
        return self.enter(staged, len(self.stages) - 1)


class Served:
    def __init__(self, capacity, stages):
        self.now, self._started = 0, []
        self.scheduler, self.engine, own = Told(), Engine(stages), computes_nothing(len(stages))
        own.engine, own.instruments.started = self.engine, self._note
        batches = InFlight(capacity.in_flight, 0)
        self.encoder = Encoder(self.scheduler, capacity, [own], nullcontext, lambda: None, batches, lambda: self.now)
        self.driver = Driver(self.encoder, starts=[stage.pin for stage in stages], help_at_once=True)

    def state(self):
        return self.scheduler.events, set(self.engine.reached), sum(len(staged.computing_ns) for staged in self._started)

    def _note(self, staged):
        self._started.append(staged)
        staged.number = len(self._started)


@pytest.mark.parametrize("count, batch_tokens", [(1, 512), (2, 200), (2, 512), (3, 512), (4, 200)])
def test_the_threads_do_what_is_simulated(count, batch_tokens):
    """Neither has deadlines: `Driver` waits for these by a real clock."""
    arrivals = Stream(320.0, 0.15, allowed_ms=(0, 0)).draw(0)
    capacity = Capacity(batch_tokens, batch_tokens, batch_tokens, in_flight=count + 1)

    def stages_ns(numbers):
        """No two batches end at one time."""
        return [4_000_000 + 500_000 * len(numbers) + 997 * max(numbers) * (stage + 1) for stage in range(count)]

    machine, expected = Machine(lambda texts, places: stages_ns([one.number for one in texts]), capacity, stages=count), Told()
    outcome = simulate_one(expected, machine, arrivals)
    computed, clock = [], [0] * count  # batch, stage, start and end; when each stage is free
    for batch, (at, numbers) in enumerate([rest for name, *rest in expected.events if name == "started"], start=1):
        for stage, own in enumerate(stages_ns(numbers)):
            start = max(at, clock[stage])
            at = clock[stage] = start + own
            computed.append((batch, stage, start, at))

    served = Served(capacity, stages_of(*range(count)))
    happens = [(at, "arrive", (number,)) for number, at in enumerate(arrivals.at_ns.tolist())]
    happens += [(end, "end", (batch, stage)) for batch, stage, _, end in computed]
    assert len({at for at, *_ in happens}) == len(happens), "two events at one time have no order"
    for at, what, which in sorted(happens):
        served.now = at
        if what == "arrive":
            text = arrivals.text(*which)
            text.request = Request(text, lambda texts, fate: None)
            served.encoder.offer([text])
            served.driver.wake()
        else:
            served.engine.reached[which].open()
        told = [event for event in expected.events if event[1] <= at]
        reached = {(batch, stage) for batch, stage, start, _ in computed if start <= at}
        ended = sum(end <= at for *_, end in computed)
        eventually(lambda expected=(told, reached, ended): served.state() == expected)
    served.driver.close()
    served.driver.join()
    assert served.scheduler.events == expected.events and len(outcome.batches) > 5
    (learned,), (simulated,) = served.scheduler.costs, expected.costs
    assert (learned.terms == simulated.terms).all() and learned.shares == simulated.shares and len(learned.shares) == count
    in_flight = np.cumsum([{"choose": 1, "finished": -1}.get(name, 0) for name, *_ in expected.events])
    assert in_flight.max() == count + 1
