"""The threads that drive an encoder and the simulator agree, event for event, on a virtual clock."""

from __future__ import annotations

from collections import defaultdict
from contextlib import nullcontext

import numpy as np
import pytest

from hplm.engine.encoder import Encoder
from hplm.engine.in_flight import InFlight
from hplm.engine.process import Process
from hplm.scheduling.limits import Limits
from hplm.scheduling.policy import policy
from hplm.scheduling.scheduler import Scheduler
from hplm.scheduling.waiting import Capacity
from hplm.simulate.arrivals import Stream
from hplm.simulate.encoders import Machine, Outcome, Request, Server, computes_nothing, run
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


class Noting(Server):
    """Notes when each stage starts and ends each batch."""

    def __init__(self, *given):
        super().__init__(*given)
        self.computed = []  # batch, stage, start, end

    def _begin_staged(self):
        free, number, at = list(self._clock), len(self.outcome.batches) + 1, self._now
        super()._begin_staged()
        if len(self.outcome.batches) == number:
            for stage, end in enumerate(self._clock):
                self.computed.append((number, stage, max(at, free[stage]), end))
                at = end


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
        self.process = Process(self.encoder, starts=[stage.pin for stage in stages], help_at_once=True)

    def state(self):
        return self.scheduler.events, set(self.engine.reached), sum(len(staged.computing_ns) for staged in self._started)

    def _note(self, staged):
        self._started.append(staged)
        staged.number = len(self._started)


@pytest.mark.parametrize("count, batch_tokens", [(1, 512), (2, 200), (2, 512), (3, 512), (4, 200)])
def test_the_threads_do_what_is_simulated(count, batch_tokens):
    """Neither has deadlines: `Process` waits for these by a real clock."""
    arrivals = Stream(320.0, 0.15, allowed_ms=(0, 0)).draw(0)
    capacity = Capacity(batch_tokens, batch_tokens, batch_tokens, in_flight=count + 1)
    # With noise no two batches end at one time.
    machine = Machine(lambda texts, places: [4e6 + 5e5 * len(texts)] * count, capacity, noise=0.1, stages=count)
    server = Noting(Told(), machine, Outcome.of(arrivals))
    run([server], arrivals, lambda text: 0)

    served = Served(capacity, stages_of(*range(count)))
    happens = [(at, "arrive", (number,)) for number, at in enumerate(arrivals.at_ns.tolist())]
    happens += [(end, "end", (batch, stage)) for batch, stage, _, end in server.computed]
    assert len({at for at, *_ in happens}) == len(happens), "two events at one time have no order"
    expected = server._scheduler
    for at, what, which in sorted(happens):
        served.now = at
        if what == "arrive":
            text = arrivals.text(*which)
            text.request = Request(text, lambda texts, fate: None)
            served.encoder.offer([text])
            served.process.wake()
        else:
            served.engine.reached[which].open()
        told = [event for event in expected.events if event[1] <= at]
        reached = {(batch, stage) for batch, stage, start, _ in server.computed if start <= at}
        ended = sum(end <= at for *_, end in server.computed)
        eventually(lambda expected=(told, reached, ended): served.state() == expected)
    served.process.close()
    served.process.join()
    assert served.scheduler.events == expected.events and len(server.outcome.batches) > 5
    (learned,), (simulated,) = served.scheduler.costs, expected.costs
    assert (learned.terms == simulated.terms).all() and learned.shares == simulated.shares and len(learned.shares) == count
    in_flight = np.cumsum([{"choose": 1, "finished": -1}.get(name, 0) for name, *_ in expected.events])
    assert in_flight.max() == count + 1
