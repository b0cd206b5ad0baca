"""Servers on a virtual clock: the encoder that serves, simulated arrivals, and batches that only take time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import numpy as np

from hplm.arrays import Array
from hplm.engine.encoder import Encoder
from hplm.engine.engine import Computed
from hplm.engine.sheets import StagedBatch
from hplm.errors import DeadlineMissed, HplmError, QueueFull
from hplm.process.in_flight import InFlight
from hplm.scheduling.columns import NEVER
from hplm.scheduling.scheduler import Scheduler
from hplm.scheduling.selection import Capacity, Places
from hplm.simulate.arrivals import Arrivals, SimulatedText

WAITS, REFUSED, EXPIRED, ANSWERED = range(4)
# Returns the nanoseconds of a batch, from the lengths of its texts and the places that the policy has chosen for them.
BatchTime = Callable[[Array, Places | None], float]
# Returns the nanoseconds of texts that are computed at once, in each stage.
StageTimes = Callable[[Sequence[SimulatedText], Places | None], Sequence[float]]


def one_stage(batch_ns: BatchTime) -> StageTimes:
    """Returns the times of an engine that is no pipeline."""
    return lambda texts, places: [batch_ns(np.array([text.tokens for text in texts]), places)]


@dataclass(frozen=True)
class SimulatedEngine:
    """The simulated engine."""

    stages_ns: StageTimes
    capacity: Capacity
    staging_ns: int = 0
    answering_ns: int = 0  # from the end of computing until the client has the answer
    turn_ns: int = 0  # from the end of a batch until the next one may start
    stages: int = 1


@dataclass
class Outcome:
    """Says what became of each arrival. A time is NEVER if the event did not happen."""

    arrivals: Arrivals
    fate: Array
    started_ns: Array
    answered_ns: Array
    batches: list[int] = field(default_factory=list)  # the tokens of each batch
    busy_ns: int = 0

    @classmethod
    def of(cls, arrivals: Arrivals) -> Outcome:
        """Returns what has become of these arrivals before anything has run."""
        never = np.full(len(arrivals), NEVER)
        return cls(arrivals, np.full(len(arrivals), WAITS), never, never.copy())

    @property
    def deadline_ns(self) -> Array:
        return np.where(self.arrivals.allowed_ns > 0, self.arrivals.at_ns + self.arrivals.allowed_ns, NEVER - 1)

    @property
    def scheduled(self) -> Array:
        """Texts that were started by their deadline, as TCB counts them."""
        return self.started_ns <= self.deadline_ns

    @property
    def on_time(self) -> Array:
        """Texts that were answered by their deadline, as users count them."""
        return self.answered_ns <= self.deadline_ns

    @property
    def answered(self) -> Array:
        return self.fate == ANSWERED

    @property
    def end_ns(self) -> int:
        """The time of the last answer; 0: there was none."""
        return int(self.answered_ns[self.answered].max(initial=0))

    @property
    def utility(self) -> float:
        """The share of all utility that was scheduled. A text's utility is 1 / length."""
        value = 1 / self.arrivals.tokens
        return float(value[self.scheduled].sum() / value.sum())

    def p99_ms(self) -> float | None:
        if not self.answered.any():
            return None
        return float(np.percentile((self.answered_ns - self.arrivals.at_ns)[self.answered], 99)) / 1e6


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """A simulated text is a request of its own."""

    text: SimulatedText
    leave: Callable[[Sequence[SimulatedText], int], None]
    answered: bool = False  # or failed
    in_flight_entry: ClassVar = b""
    tenant: ClassVar = SimpleNamespace(id="simulated")

    def fail(self, error: HplmError) -> None:
        if not self.answered:
            self.answered = True
            self.leave([self.text], EXPIRED if isinstance(error, DeadlineMissed) else REFUSED)


class Server:
    """The encoder that serves, with batches that only take time. It answers their texts itself.

    Who drives it asks for the `next` event, calls `advance` at its time, then `arrive` for the texts that arrive by then, then
    `choose`.
    """

    def __init__(self, scheduler: Scheduler[SimulatedText], machine: SimulatedEngine, outcome: Outcome) -> None:
        """`outcome`: of all arrivals. Several servers may share it, each with some of the arrivals."""
        self._scheduler = scheduler
        self._machine = machine
        self.outcome = replace(outcome, batches=[])  # its columns are shared
        self._now = 0
        self._computing: deque[tuple[StagedBatch, int]] = deque()  # batches, and when they end
        self._clock = [0] * machine.stages  # when each stage is free
        self.beside: Sequence[Server] = ()  # those that compute on the same devices
        self._staged: tuple[StagedBatch, int] | None = None  # a batch, and when it will be ready
        served = computes_nothing(machine.stages)
        batches = InFlight(machine.capacity.in_flight, 0)
        taken: Any = scheduler  # its texts stand for those of the engine
        self._encoder = Encoder(taken, machine.capacity, served, nullcontext(), lambda: None, batches, now_ns=lambda: self._now)

    def next(self, now: int) -> int:
        """Returns when the next event is, or NEVER."""
        events = [self._scheduler.due(now)]
        if self._computing:
            events.append(self._computing[0][1])
        if self._staged:
            events.append(max(self._staged[1], self._clock[0]))
        return min(events)

    def advance(self, now: int) -> None:
        """Lets batches end, the next one start, and texts expire."""
        self._now = now
        while self._computing and self._computing[0][1] <= now:
            staged, _ = self._computing.popleft()
            texts: Any = staged.batch.texts
            self.leave(texts, ANSWERED)
            self._encoder.end(staged, Computed([], []), now)
        self._begin_staged()
        if self._scheduler.next_expiry(now) <= now:
            self._encoder.expire()

    def arrive(self, text: SimulatedText) -> None:
        text.request = SimulatedRequest(text, self.leave)
        try:
            self._encoder.enqueue(cast(Any, [text]))
        except (QueueFull, DeadlineMissed):
            self.leave([text], REFUSED)

    def leave(self, texts: Sequence[SimulatedText], fate: int) -> None:
        """Notes what has become of texts."""
        numbers = [text.number for text in texts]
        self.outcome.fate[numbers] = fate
        if fate == ANSWERED:
            self.outcome.answered_ns[numbers] = self._now + self._machine.answering_ns

    def choose(self) -> None:
        """Chooses and stages batches while the encoder does."""
        while self._staged is None and (staged := self._encoder.prepare()) is not None:
            self._staged = staged, self._now + self._machine.staging_ns
            self._begin_staged()

    def _begin_staged(self) -> None:
        if self._staged is None or max(self._staged[1], self._clock[0]) > self._now:
            return
        staged, self._staged = self._staged[0], None
        batch: Any = staged.batch
        self._encoder.begin(staged)
        self.outcome.started_ns[[text.number for text in batch.texts]] = self._now
        took = self._machine.stages_ns(batch.texts, batch.places)
        self.outcome.batches.append(batch.tokens)
        self.outcome.busy_ns += int(sum(took) / len(took))
        at = self._now
        for stage, own in enumerate(max(1, int(own)) for own in took):
            at = max(at, self._clock[stage])
            own += self._shared_ns(stage, at, own)
            at += own
            self._clock[stage] = at + self._machine.turn_ns
            staged.computing_ns.append(own)
        self._computing.append((staged, at))

    def _shared_ns(self, stage: int, at: int, own: int) -> int:
        """Returns how much longer a stage takes, and delays those beside it: while two compute, each has half of the time."""
        longer = 0
        for other in self.beside:
            both = min(other._clock[stage] - at, own)
            if both > 0:
                longer += both
                other._clock[stage:] = [clock + both for clock in other._clock[stage:]]
                staged, end = other._computing.pop()
                other._computing.append((staged, end + both))
        return longer


def computes_nothing(stages: int) -> Any:
    """Returns what stands for a served backbone (`hplm.engine.served`). It stages, computes and counts nothing."""

    def nothing(*given: object) -> None:
        pass

    def stage(texts: list[Any], broken: object, places: object) -> StagedBatch:
        return StagedBatch(texts, cast(Any, None), [], {}, [])

    return SimpleNamespace(
        engine=SimpleNamespace(stages=range(stages)),
        stager=SimpleNamespace(stage=stage, release=nothing),
        instruments=SimpleNamespace(note_start=nothing, reached=nothing, computed=nothing),
    )


def run(servers: Sequence[Server], arrivals: Arrivals, goes_to: Callable[[SimulatedText], int | None]) -> None:
    """Goes from event to event. A server is asked for its next event again after each of its own ones only.

    `goes_to` returns the number of the server that a text goes to, or None if there is none.
    """
    arrival_ns = [*arrivals.at_ns.tolist(), NEVER]
    events = [server.next(0) for server in servers]
    arriving = now = 0
    while True:
        earliest = min(events, default=NEVER)
        now = max(now, min(arrival_ns[arriving], earliest))
        if now == NEVER:
            return
        touched = [i for i, at in enumerate(events) if at <= now] if earliest <= now else []
        for i in touched:
            servers[i].advance(now)
        while arrival_ns[arriving] <= now:
            text = arrivals.text(arriving)
            arriving += 1
            if (chosen := goes_to(text)) is None:
                continue
            if chosen not in touched:
                servers[chosen].advance(now)
                touched.append(chosen)
            servers[chosen].arrive(text)
        for i in touched:
            servers[i].choose()
            events[i] = servers[i].next(now)


def simulate_one(scheduler: Scheduler[SimulatedText], machine: SimulatedEngine, arrivals: Arrivals) -> Outcome:
    """Returns what becomes of texts that all go to one server."""
    server = Server(scheduler, machine, Outcome.of(arrivals))
    run([server], arrivals, lambda text: 0)
    return server.outcome
