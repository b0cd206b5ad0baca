"""A server on a virtual clock: the real scheduler, simulated arrivals and a simulated engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np

from hplm.arrays import Array
from hplm.errors import DeadlineMissed, InvalidInput, QueueFull
from hplm.scheduling.batch import Batch
from hplm.scheduling.columns import NEVER
from hplm.scheduling.scheduler import Scheduler
from hplm.scheduling.simulation.arrivals import Arrivals, SimulatedText
from hplm.scheduling.simulation.cascades import Cascades, Ladders
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
    noise: float = 0.0  # relative standard deviation of the time of a sheet: what is computed at once, by the same layers
    within: bool = True  # texts that go on do so within their batch; False: all join the line again
    stages: int = 1


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


@dataclass
class Computing:
    """A batch that computes, sheet by sheet."""

    batch: Batch[SimulatedText]
    sheets: dict[float, list[SimulatedText]]  # that come later, by the share of the layers
    sheet: list[SimulatedText] = field(default_factory=list)  # the one that computes
    stages_ns: list[int] = field(default_factory=list)  # how long each of several stages takes for all its sheets
    released_ns: int = NEVER  # when this leaves the first stage
    done_ns: int = NEVER


class Load:
    """All arrivals, and what became of them. Several servers may share it, each with some of the arrivals."""

    def __init__(self, arrivals: Arrivals, seed: int = 0, ladders: Ladders = MappingProxyType({})) -> None:
        """Tenants without a ladder have all texts computed once, by all layers."""
        self.has_ladders = bool(ladders)
        count = len(arrivals)
        never = np.full(count, NEVER)
        nothing = np.zeros(count, np.int64)
        self.arrivals = arrivals
        self.outcome = Outcome(arrivals, np.full(count, WAITS), never, never.copy(), nothing, nothing.astype(bool))
        self.cascades = Cascades(ladders, count, seed)


class Server:
    """Goes from event to event: a sheet ends, the next one starts or is chosen, texts expire, a text arrives.

    Who drives it asks for the `next` event, calls `advance` at its time, then `arrive` for the texts that arrive by then, then
    `choose`.
    """

    def __init__(self, scheduler: Scheduler[SimulatedText], machine: Machine, load: Load, seed: int = 0) -> None:
        if machine.stages > 1 and load.has_ladders:
            raise InvalidInput(
                f"ladders on an engine of {machine.stages} stages: short stacks and second passes are simulated with one stage "
                "only: give no ladders, or one stage"
            )
        self._scheduler = scheduler
        self._machine = machine
        self._load = load
        self._cascades = load.cascades
        self._rng = np.random.default_rng(seed)
        self._outcome = replace(load.outcome, batches=[], rungs=[])  # its columns are shared
        self._computing: deque[Computing] = deque()
        self._clock = [0] * machine.stages  # when each stage is free
        self._staged: tuple[Batch[SimulatedText], int] | None = None  # a batch, and when it will be ready
        self._choose_at = NEVER

    @property
    def outcome(self) -> Outcome:
        return self._outcome

    def next(self, now: int) -> int:
        """Returns when the next event is, or NEVER."""
        events = [self._scheduler.next_expiry(now), self._choose_at]
        if self._computing:
            events.append(self._computing[0].done_ns)
            if len(self._clock) > 1 and self._clock[0] > now:
                events.append(self._clock[0])
        if self._staged:
            events.append(max(self._staged[1], self._clock[0]))
        return min(events)

    def advance(self, now: int) -> None:
        """Lets sheets end, the next batch start, and texts expire."""
        while self._computing and self._computing[0].done_ns <= now:
            self._finish(self._computing.popleft(), now)
        for one in self._computing:
            if one.released_ns <= now and one.batch.released_ns is None:
                self._scheduler.released(one.batch, now)
        if self._staged and self._clock[0] <= now and self._staged[1] <= now:
            self._start(self._staged[0], now)
        if self._scheduler.next_expiry(now) <= now:
            self._give_up(self._scheduler.expired(now), EXPIRED, now)

    def arrive(self, text: SimulatedText, now: int) -> None:
        i = text.number
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

    def choose(self, now: int) -> None:
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
            if self._clock[0] <= now and not self._machine.staging_ns:
                self._start(batch, now)
                self.choose(now)

    def _start(self, batch: Batch[SimulatedText], now: int) -> None:
        self._staged = None
        self._scheduler.started(batch, now)
        numbers = [text.number for text in batch.texts]
        self._outcome.started_ns[numbers] = np.minimum(self._outcome.started_ns[numbers], now)
        self._outcome.batches.append(0)
        one = Computing(batch, {})
        self._lay(one, batch.texts)
        self._compute(one, now)

    def _lay(self, one: Computing, texts: Sequence[SimulatedText]) -> None:
        for text in texts:
            one.sheets.setdefault(self._cascades.layers(text.number), []).append(text)

    def _compute(self, one: Computing, now: int) -> None:
        """Starts the sheet with the fewest layers. It passes all stages."""
        one.sheet = one.sheets.pop(min(one.sheets))
        took = self._machine.stages_ns(one.sheet, one.batch.places if one.sheet == one.batch.texts else None)
        if self._machine.noise:
            slower = max(0.2, self._rng.normal(1, self._machine.noise))
            took = [own * slower for own in took]
        self._outcome.batches[-1] += sum(text.tokens for text in one.sheet)
        self._outcome.busy_ns += int(sum(took) / len(took))
        at, stages_ns = now, [max(1, int(own)) for own in took]
        for stage, own in enumerate(stages_ns):
            at = self._clock[stage] = max(at, self._clock[stage]) + own
        if len(stages_ns) > 1:
            one.stages_ns = [sum(both) for both in zip(one.stages_ns or [0] * len(stages_ns), stages_ns, strict=True)]
        one.released_ns, one.done_ns = self._clock[0], at
        self._computing.append(one)

    def _finish(self, one: Computing, now: int) -> None:
        """Ends a sheet: its texts are answered, or go on."""
        self._scheduler.computed(one.batch, one.sheet, now)
        unsure: list[SimulatedText] = []
        for text in one.sheet:
            next_pass = self._cascades.goes_on(text, int(self._load.arrivals.tokens[text.number]))
            if next_pass is None:
                self._answer(text, now)
            else:
                unsure.append(next_pass)
        going_on = set(self._scheduler.going_on(one.batch, unsure if self._machine.within else [], now))
        self._lay(one, [text for text in unsure if text in going_on])
        if one.sheets:
            self._compute(one, now)
        else:
            self._scheduler.finished(one.batch, now, stages_ns=one.stages_ns)
        self._give_up(self._scheduler.again([text for text in unsure if text not in going_on], now), REFUSED, now)


class Simulation(Server):
    """One server that all texts go to."""

    def __init__(
        self,
        scheduler: Scheduler[SimulatedText],
        machine: Machine,
        arrivals: Arrivals,
        seed: int = 0,
        ladders: Ladders = MappingProxyType({}),
    ) -> None:
        super().__init__(scheduler, machine, Load(arrivals, seed, ladders), seed)

    def run(self) -> Outcome:
        arrivals = self._load.arrivals
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
