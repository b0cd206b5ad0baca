"""A server on a virtual clock: the real scheduler, simulated arrivals and a simulated engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from hplm.arrays import Array
from hplm.errors import DeadlineMissed, QueueFull
from hplm.scheduling.batch import Batch
from hplm.scheduling.columns import NEVER
from hplm.scheduling.scheduler import Scheduler
from hplm.scheduling.simulation.arrivals import Arrivals, SimulatedText
from hplm.scheduling.simulation.cascades import Cascades, Ladders, work_of
from hplm.scheduling.simulation.engines import BatchTime
from hplm.scheduling.waiting import Capacity

WAITS, REFUSED, EXPIRED, ANSWERED = range(4)


@dataclass(frozen=True)
class Machine:
    """The simulated engine."""

    batch_ns: BatchTime
    capacity: Capacity
    staging_ns: int = 0
    answering_ns: int = 0  # from the end of computing until the client has the answer
    noise: float = 0.0  # relative standard deviation of the time of a sheet: what is computed at once, by the same layers
    within: bool = True  # texts that go on do so within their batch; False: all join the line again


@dataclass
class Outcome:
    """What became of each arrival. A time is NEVER if the event did not happen."""

    arrivals: Arrivals
    fate: Array
    started_ns: Array
    answered_ns: Array
    rung: Array  # of its tenant's ladder
    right: Array  # whether the answer is right
    batches: list[int] = field(default_factory=list)  # the work of each batch, in tokens that all layers compute
    rungs: list[int] = field(default_factory=list)  # of the governor, after each batch was chosen
    busy_ns: int = 0
    end_ns: int = 0

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


class Simulation:
    """Goes from event to event: a sheet ends, the next batch starts or is chosen, texts expire, a text arrives."""

    def __init__(
        self,
        scheduler: Scheduler[SimulatedText],
        machine: Machine,
        arrivals: Arrivals,
        seed: int = 0,
        ladders: Ladders = MappingProxyType({}),
    ) -> None:
        """Tenants without a ladder have all texts computed once, by all layers."""
        self._scheduler = scheduler
        self._machine = machine
        self._arrivals = arrivals
        self._rng = np.random.default_rng(seed)
        self._computing: tuple[Batch[SimulatedText], int] | None = None  # a batch, and when its current sheet will be done
        self._sheet: list[SimulatedText] = []  # the current one
        self._sheets: dict[float, list[SimulatedText]] = {}  # the others of the batch, by the share of the layers
        self._staged: tuple[Batch[SimulatedText], int] | None = None  # a batch, and when it will be ready
        self._choose_at = NEVER
        count = len(arrivals)
        never = np.full(count, NEVER)
        nothing = np.zeros(count, np.int64)
        self._outcome = Outcome(arrivals, np.full(count, WAITS), never, never.copy(), nothing, nothing.astype(bool))
        self._cascades = Cascades(ladders, count, seed)

    def run(self) -> Outcome:
        arrival_ns = [*self._arrivals.at_ns.tolist(), NEVER]
        arriving = now = 0
        while True:
            now = max(now, min(arrival_ns[arriving], self._next(now)))
            if now == NEVER:
                self._outcome.end_ns = max(end for end in self._outcome.answered_ns.tolist() if end != NEVER)
                return self._outcome
            if self._computing and self._computing[1] <= now:
                self._finish(self._computing[0], now)
            if self._staged and not self._computing and self._staged[1] <= now:
                self._start(self._staged[0], now)
            if self._scheduler.next_expiry(now) <= now:
                self._give_up(self._scheduler.expired(now), EXPIRED, now)
            while arrival_ns[arriving] <= now:
                self._arrive(arriving, now)
                arriving += 1
            self._choose(now)

    def _next(self, now: int) -> int:
        events = [self._scheduler.next_expiry(now), self._choose_at]
        if self._computing:
            events.append(self._computing[1])
        elif self._staged:
            events.append(self._staged[1])
        return min(events)

    def _arrive(self, i: int, now: int) -> None:
        text = self._arrivals.text(i)
        rung = self._scheduler.rung(text.tenant, text.tokens, self._cascades.costs(text.tenant), now)
        self._outcome.rung[i] = rung
        text = self._cascades.enter(text, rung)
        try:
            refused = self._scheduler.offer([text], now)
        except (QueueFull, DeadlineMissed):
            refused = [text]
        self._give_up(refused, REFUSED, now)

    def _give_up(self, texts: Sequence[SimulatedText], fate: int, now: int) -> None:
        """Answers texts that have a first answer with that."""
        for text in texts:
            if self._cascades.has_answer(text.number):
                self._answer(text, now, in_hand=True)
            else:
                self._outcome.fate[text.number] = fate

    def _answer(self, text: SimulatedText, now: int, in_hand: bool = False) -> None:
        self._outcome.fate[text.number] = ANSWERED
        self._outcome.answered_ns[text.number] = now + self._machine.answering_ns
        self._outcome.right[text.number] = self._cascades.is_right(text.number, in_hand)

    def _choose(self, now: int) -> None:
        """Chooses a batch, as the pipeline does: not before the last chosen batch has started."""
        self._choose_at = NEVER
        if self._staged or not len(self._scheduler):
            return
        at = self._scheduler.choose_at(now)
        if at > now:
            self._choose_at = at
            return
        batch = self._scheduler.choose(self._machine.capacity, now)
        if batch:
            self._outcome.rungs.append(self._scheduler.governor.rung)
            self._staged = (batch, now + self._machine.staging_ns)
            if not self._computing and not self._machine.staging_ns:
                self._start(batch, now)
                self._choose(now)

    def _start(self, batch: Batch[SimulatedText], now: int) -> None:
        self._staged = None
        self._scheduler.started(batch, now)
        numbers = [text.number for text in batch.texts]
        self._outcome.started_ns[numbers] = np.minimum(self._outcome.started_ns[numbers], now)
        self._outcome.batches.append(0)
        self._lay(batch.texts)
        self._compute(batch, now)

    def _lay(self, texts: Sequence[SimulatedText]) -> None:
        for text in texts:
            self._sheets.setdefault(self._cascades.layers(text.number), []).append(text)

    def _compute(self, batch: Batch[SimulatedText], now: int) -> None:
        """Starts the sheet with the fewest layers."""
        self._sheet = self._sheets.pop(min(self._sheets))
        work = np.array([self._work(text) for text in self._sheet])
        took = self._machine.batch_ns(work, batch.places if self._sheet == batch.texts else None)
        if self._machine.noise:
            took *= max(0.2, self._rng.normal(1, self._machine.noise))
        self._outcome.batches[-1] += int(work.sum())
        self._outcome.busy_ns += int(took)
        self._computing = (batch, now + max(1, int(took)))

    def _work(self, text: SimulatedText) -> int:
        return work_of(int(self._arrivals.tokens[text.number]), self._cascades.layers(text.number))

    def _finish(self, batch: Batch[SimulatedText], now: int) -> None:
        """Ends a sheet: its texts are answered, or go on."""
        unsure: list[SimulatedText] = []
        for text in self._sheet:
            next_pass = self._cascades.goes_on(text, int(self._arrivals.tokens[text.number]))
            if next_pass is None:
                self._answer(text, now)
            else:
                unsure.append(next_pass)
        going_on = set(self._scheduler.going_on(batch, unsure if self._machine.within else [], now))
        self._lay([text for text in unsure if text in going_on])
        if self._sheets:
            self._compute(batch, now)
        else:
            self._computing = None
            self._scheduler.finished(batch, now)
        self._give_up(self._scheduler.again([text for text in unsure if text not in going_on], now), REFUSED, now)
