"""The encoder that serves and the simulated one agree, event for event, on a virtual clock."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest

from hplm.engine.encoder import Encoder
from hplm.engine.process import Process
from hplm.placement.servers import GroupServer, Serving, Stages
from hplm.placement.simulation import run_together
from hplm.scheduling.simulation.arrivals import Arrivals, SimulatedText
from hplm.scheduling.simulation.server import Outcome
from hplm.scheduling.waiting import Capacity
from tests.engine.asker import stages_of
from tests.placement.problems import group_of, profile, trace_of
from tests.support.wait import eventually

LAYERS = 4
PROFILE = profile(8.0, layers=LAYERS)


class Told:
    """What a scheduler is told and answers, with the virtual time."""

    def __init__(self, scheduler):
        self.events = []
        for name in ("choose", "started", "finished"):
            setattr(scheduler, name, self._noting(name, getattr(scheduler, name)))

    def _noting(self, name, call):
        def noted(given, now, *args, **more):
            found = call(given, now, *args, **more)
            batch = found if name == "choose" else given
            if batch is not None:
                self.events.append((name, now, sorted(text.number for text in batch.texts)))
            return found

        return noted


class Simulated(GroupServer):
    """Also notes when each stage starts and ends each batch."""

    def __init__(self, *given):
        super().__init__(*given)
        self.told = Told(self._scheduler)
        self.computed = []  # batch, stage, start, end

    def _start(self, batch, now):
        free = list(self._clock)
        super()._start(batch, now)
        at, number = now, len(self._outcome.batches)
        for stage, end in enumerate(self._clock):
            self.computed.append((number, stage, max(at, free[stage]), end))
            at = end


class Asked(SimulatedText):
    request = SimpleNamespace(answered=False, mark=b"")


class Engine:
    """Computes a batch in a stage until it is told to end."""

    device = SimpleNamespace(type="cpu")

    def __init__(self, stages):
        self.stages = stages
        self.reached = set()  # batch and stage
        self._may_end, self._changed = set(), threading.Condition()

    def enter(self, staged, stage):
        here = staged.number, stage
        with self._changed:
            self.reached.add(here)
            assert self._changed.wait_for(lambda: here in self._may_end, 60)
        return []

    def run(self, staged):
        return self.enter(staged, len(self.stages) - 1)

    def end(self, batch, stage):
        with self._changed:
            self._may_end.add((batch, stage))
            self._changed.notify_all()


class Quiet(Encoder):
    """An encoder that answers nobody."""

    def _answer(self, batch, staged, computed):
        pass


class Served:
    def __init__(self, scheduler, capacity, stages):
        self.now = 0
        self.told = Told(scheduler)
        self.engine = Engine(stages)
        stager = SimpleNamespace(stage=self._stage, release=list.clear)
        instruments = SimpleNamespace(started=self._started, reached=lambda texts: None, computed=lambda batch, staged: None)
        self._batches, self._staged = 0, []
        own = SimpleNamespace(engine=self.engine, stager=stager, instruments=instruments)
        in_flight = SimpleNamespace(enter=lambda batch, marks: None, leave=lambda batch: None)
        self.encoder = Quiet(scheduler, capacity, [own], nullcontext, lambda: None, in_flight, lambda: self.now)
        self.process = Process(self.encoder, starts=[stage.pin for stage in self.engine.stages], help_at_once=True)

    def state(self):
        return self.told.events, self.engine.reached, sum(len(staged.computing_ns) for staged in self._staged)

    def _stage(self, texts, broken, places):
        self._staged.append(SimpleNamespace(texts=texts, left=texts, held=[], brought=0, stages={}, computing_ns=[]))
        return self._staged[-1]

    def _started(self, staged):
        self._batches += 1
        staged.number = self._batches


@pytest.mark.parametrize("count, batch_tokens", [(1, 512), (2, 200), (2, 512), (3, 512), (4, 200)])
def test_the_encoder_that_serves_does_what_is_simulated(count, batch_tokens):
    """Neither has deadlines: `Process` waits for these by a real clock."""
    trace = trace_of(PROFILE, 320.0, 0.15)
    group = group_of(PROFILE, "g", tuple(f"cpu:{i}" for i in range(count)), "b0")
    # With noise no two batches end at one time.
    serving = Serving(batch_tokens=batch_tokens, commit_ns=None, admission=False, noise=0.1)
    none = np.zeros(len(trace), np.int64)
    arrivals = Arrivals(trace.arrival_ns + 1009 * np.arange(len(trace)), trace.tokens, none, trace.unit, none)
    server = Simulated(group, PROFILE, trace, serving, Outcome.of(arrivals))
    run_together([server], arrivals, [[0]])

    scheduler = serving.scheduler(Stages(group, PROFILE, trace))
    capacity = Capacity(batch_tokens, serving.batch_texts, serving.batch_texts, in_flight=count + 1)
    served = Served(scheduler, capacity, stages_of(*(end for _, end in group.cuts["b0"])))
    happens = [(at, "arrive", (number,)) for number, at in enumerate(arrivals.at_ns.tolist())]
    happens += [(end, "end", (batch, stage)) for batch, stage, _, end in server.computed]
    assert len({at for at, *_ in happens}) == len(happens), "two events at one time have no order"
    for at, what, which in sorted(happens):
        served.now = at
        if what == "arrive":
            text = arrivals.text(*which)
            served.encoder.offer([Asked(**asdict(text))])
            served.process.wake()
        else:
            served.engine.end(*which)
        told = [event for event in server.told.events if event[1] <= at]
        reached = {(batch, stage) for batch, stage, start, _ in server.computed if start <= at}
        ended = sum(end <= at for *_, end in server.computed)
        eventually(lambda expected=(told, reached, ended): served.state() == expected)
    served.process.close()
    served.process.join()
    assert served.told.events == server.told.events and len(server.outcome.batches) > 5
    assert (scheduler.costs[0].terms == server._scheduler.costs[0].terms).all()
    assert scheduler.costs[0].shares == server._scheduler.costs[0].shares and len(scheduler.costs[0].shares) == count
    in_flight = np.cumsum([{"choose": 1, "finished": -1}.get(name, 0) for name, *_ in served.told.events])
    assert in_flight.max() == count + 1
