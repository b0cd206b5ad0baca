"""A server on a virtual clock: the real scheduler, simulated arrivals and a simulated engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hplm.arrays import Array
from hplm.errors import DeadlineMissed, QueueFull
from hplm.scheduling.batch import Batch
from hplm.scheduling.columns import NEVER
from hplm.scheduling.scheduler import Scheduler
from hplm.scheduling.simulation.arrivals import Arrivals, SimulatedText
from hplm.scheduling.simulation.engines import StageTimes
from hplm.scheduling.waiting import Capacity

WAITS, REFUSED, EXPIRED, ANSWERED = range(4)


@dataclass(frozen=True)
class Machine:
    """The simulated engine."""

    stages_ns: StageTimes
    capacity: Capacity
    staging_ns: int = 0
    answering_ns: int = 0  # from the end of computing until the client has the answer
    noise: float = 0.0  # relative standard deviation of the time of a batch
    stages: int = 1


@dataclass
class Outcome:
    """What became of each arrival. A time is NEVER if the event did not happen."""

    arrivals: Arrivals
    fate: Array
    started_ns: Array
    answered_ns: Array
    batches: list[int] = field(default_factory=list)  # the tokens of each batch
    busy_ns: int = 0
    end_ns: int = 0

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
    def utility(self) -> float:
        """The share of all utility that was scheduled. A text's utility is 1 / length."""
        value = 1 / self.arrivals.tokens
        return float(value[self.scheduled].sum() / value.sum())

    def p99_ms(self) -> float | None:
        if not self.answered.any():
            return None
        return float(np.percentile((self.answered_ns - self.arrivals.at_ns)[self.answered], 99)) / 1e6


@dataclass
class Computing:
    """A batch that computes."""

    batch: Batch[SimulatedText]
    stages_ns: list[int]  # how long each stage takes
    done_ns: int


class Server:
    """Goes from event to event: a batch ends, the next one starts or is chosen, texts expire, a text arrives.

    Who drives it asks for the `next` event, calls `advance` at its time, then `arrive` for the texts that arrive by then, then
    `choose`.
    """

    def __init__(self, scheduler: Scheduler[SimulatedText], machine: Machine, outcome: Outcome, seed: int = 0) -> None:
        """`outcome`: of all arrivals. Several servers may share it, each with some of the arrivals."""
        self._scheduler = scheduler
        self._machine = machine
        self._rng = np.random.default_rng(seed)
        self._outcome = replace(outcome, batches=[])  # its columns are shared
        self._computing: deque[Computing] = deque()
        self._clock = [0] * machine.stages  # when each stage is free
        self._staged: tuple[Batch[SimulatedText], int] | None = None  # a batch, and when it will be ready

    @property
    def outcome(self) -> Outcome:
        return self._outcome

    def next(self, now: int) -> int:
        """Returns when the next event is, or NEVER."""
        events = [self._scheduler.due(now)]
        if self._computing:
            events.append(self._computing[0].done_ns)
        if self._staged:
            events.append(max(self._staged[1], self._clock[0]))
        return min(events)

    def advance(self, now: int) -> None:
        """Lets batches end, the next one start, and texts expire."""
        while self._computing and self._computing[0].done_ns <= now:
            self._finish(self._computing.popleft(), now)
        if self._staged and self._clock[0] <= now and self._staged[1] <= now:
            self._start(self._staged[0], now)
        if self._scheduler.next_expiry(now) <= now:
            self._give_up(self._scheduler.expired(now), EXPIRED)

    def arrive(self, text: SimulatedText, now: int) -> None:
        try:
            refused = self._scheduler.offer([text], now)
        except (QueueFull, DeadlineMissed):
            refused = [text]
        self._give_up(refused, REFUSED)

    def _give_up(self, texts: Sequence[SimulatedText], fate: int) -> None:
        self._outcome.fate[[text.number for text in texts]] = fate

    def choose(self, now: int) -> None:
        """Chooses a batch, as the pipeline does: not before the last chosen batch has started."""
        batch = None if self._staged else self._scheduler.choose(self._machine.capacity, now)
        if batch:
            self._staged = (batch, now + self._machine.staging_ns)
            if self._clock[0] <= now and not self._machine.staging_ns:
                self._start(batch, now)
                self.choose(now)

    def _start(self, batch: Batch[SimulatedText], now: int) -> None:
        self._staged = None
        self._scheduler.started(batch, now)
        numbers = [text.number for text in batch.texts]
        self._outcome.started_ns[numbers] = now
        took = self._machine.stages_ns(batch.texts, batch.places)
        if self._machine.noise:
            slower = max(0.2, self._rng.normal(1, self._machine.noise))
            took = [own * slower for own in took]
        self._outcome.batches.append(batch.tokens)
        self._outcome.busy_ns += int(sum(took) / len(took))
        at, stages_ns = now, [max(1, int(own)) for own in took]
        for stage, own in enumerate(stages_ns):
            at = self._clock[stage] = max(at, self._clock[stage]) + own
        self._computing.append(Computing(batch, stages_ns, at))

    def _finish(self, one: Computing, now: int) -> None:
        """Ends a batch, whose texts are answered."""
        numbers = [text.number for text in one.batch.texts]
        self._outcome.fate[numbers] = ANSWERED
        self._outcome.answered_ns[numbers] = now + self._machine.answering_ns
        self._scheduler.finished(one.batch, now, stages_ns=one.stages_ns)


class Simulation(Server):
    """One server that all texts go to."""

    def __init__(self, scheduler: Scheduler[SimulatedText], machine: Machine, arrivals: Arrivals, seed: int = 0) -> None:
        super().__init__(scheduler, machine, Outcome.of(arrivals), seed)

    def run(self) -> Outcome:
        arrivals = self._outcome.arrivals
        arrival_ns = [*arrivals.at_ns.tolist(), NEVER]
        arriving = now = 0
        while True:
            now = max(now, min(arrival_ns[arriving], self.next(now)))
            if now == NEVER:
                self._outcome.end_ns = max((end for end in self._outcome.answered_ns.tolist() if end != NEVER), default=0)
                return self._outcome
            self.advance(now)
            while arrival_ns[arriving] <= now:
                self.arrive(arrivals.text(arriving), now)
                arriving += 1
            self.choose(now)
