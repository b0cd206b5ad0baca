"""Admits, chooses, stages, computes and answers texts, a step at a time. It has no threads, no socket and no clock of its own.

`hplm.process.driver` drives it with threads, tests without. `hplm.simulate` calls `begin` and `end` instead of `compute`. While
a batch computes, another thread may call `enqueue`, `expire` and `prepare`. An error in a step becomes the answer to the texts
that it held.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch

from hplm.engine.engine import Computed
from hplm.engine.request import Text
from hplm.engine.results import read_answers
from hplm.engine.served import Served
from hplm.engine.sheets import StagedBatch
from hplm.errors import DeadlineMissed, Draining, HplmError, OutOfCapacity, QueueFull
from hplm.metrics import names
from hplm.metrics.meter import Series
from hplm.model import faults
from hplm.process.in_flight import InFlight
from hplm.scheduling.columns import NEVER
from hplm.scheduling.cost import TERMS
from hplm.scheduling.scheduler import Scheduler
from hplm.scheduling.selection import Batch, Capacity

log = logging.getLogger(__name__)


class Encoder:
    def __init__(
        self,
        scheduler: Scheduler[Text],
        capacity: Capacity,
        served: Served,
        together: AbstractContextManager[object],
        device_failed: Callable[[], None],
        in_flight: InFlight,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`together` surrounds answers that may leave as one message. `device_failed` is called after a device's fault that
        stays.
        """
        self._scheduler, self._capacity = scheduler, capacity
        self._served = served
        self._together = together
        self._device_failed = device_failed
        self._in_flight = in_flight
        self._now_ns = now_ns
        self._lock = threading.RLock()  # around the scheduler
        self._stages = range(len(served.engine.stages))
        self._may_choose = True  # a batch is not chosen before the batch before it starts to compute
        self._computed: deque[Callable[[], None]] = deque()  # give back the slots that a batch held

    def rung(self, tenant: Hashable, tokens: int, costs: Sequence[float]) -> int:
        """Counts a request as load, and returns its rung. Call it once for each request, before it is offered."""
        with self._lock:
            return self._scheduler.governor.rung_for(tenant, tokens, costs, self._now_ns())

    def enqueue(self, texts: Sequence[Text]) -> None:
        """Adds all texts of one request, or raises and adds none. Answers texts that lose their places to them."""
        with self._lock:
            displaced = self._scheduler.offer(texts, self._now_ns())
        if displaced:
            self._refuse(displaced, _full)

    def separate(self, tenants: frozenset[int]) -> None:
        """Sets the tenants that run alone (`Scheduler.alone`)."""
        with self._lock:
            self._scheduler.alone = tenants

    def gauges(self) -> dict[Series, float]:
        """Returns the waiting texts, the governor's rung, and the cost model, at one moment."""
        with self._lock:
            (texts, size, oldest), rung = self._scheduler.waiting(), self._scheduler.governor.rung
            age_s = max(0, self._now_ns() - oldest) / 1e9
            terms = zip(TERMS, self._scheduler.cost.terms.tolist(), strict=True)
        cost = {(names.COST_SECONDS, (term,)): nanoseconds / 1e9 for term, nanoseconds in terms}
        waiting = {names.WAITING_TEXTS: texts, names.WAITING_BYTES: size, names.OLDEST_TEXT_SECONDS: age_s}
        return {**{(metric, ()): value for metric, value in waiting.items()}, (names.GOVERNOR_RUNG, ()): rung + 1, **cost}

    def wait_s(self) -> float:
        """Returns how many seconds nothing has to be done if nothing changes."""
        with self._lock:
            now = self._now_ns()
            due = self._scheduler.due(now)
        return max(0.0, (due - now) / 1e9) if due < NEVER else math.inf

    def expire(self) -> None:
        """Answers texts that can no longer be answered in time."""
        with self._lock:
            late = self._scheduler.expired(self._now_ns())
        if late:
            self._refuse(late, lambda text: DeadlineMissed.after(text.arrival_ns, text.deadline_ns))

    def prepare(self) -> StagedBatch | None:
        """Chooses and stages the next batch, or returns None if nothing should run now. Call `expire` before.

        Only one thread may be in here.
        """
        while self._may_choose:
            with self._lock:
                batch = self._scheduler.choose(self._capacity, self._now_ns())
                if batch is None:
                    return None
                self._may_choose = False
            staged = None
            try:
                staged = self._stage(batch)
            finally:
                if staged is None:
                    self._in_flight.leave(batch)
                    self._may_choose = True
            if staged is not None:
                return staged
            self.expire()  # time has passed
        return None

    def compute(self, staged: StagedBatch, stage: int = 0) -> bool:
        """Computes a batch in a stage. Returns whether it goes on to the next one. If not, its texts are answered.

        If the engine's batches overlap, those of several sheets only start here, and go on to whoever waits for them.
        """
        batch, engine = staged.batch, self._served.engine
        is_last, goes_on = stage >= self._stages[-1], False
        end, name = Computed([], []), "compute" if stage == 0 or engine.overlaps else f"compute_{stage + 1}"
        try:
            if stage == 0:
                if engine.overlaps:
                    engine.start(staged)
                self.begin(staged)
                if goes_on := staged.under_way is not None:
                    return goes_on
            start = self._now_ns() if staged.under_way is None else batch.started_ns or 0
            with torch.inference_mode():
                for computed in engine.run(staged, stage):
                    if computed.is_end:
                        end = computed
                    else:
                        self._leave(staged, computed)
            ended_ns = self._now_ns()
            staged.stages[name] = start, ended_ns
            took_ns = ended_ns - start
            if staged.under_way is not None:
                took_ns, batch.uneven_ns = staged.under_way.took_ns, staged.under_way.uneven_ns
            staged.computing_ns.append(max(1, took_ns))
            if is_last:
                self.end(staged, end, ended_ns)
            goes_on = not is_last
        except Exception as error:
            self._give_up(batch, staged.unanswered, error, staged)
        finally:
            if stage == 0 and not goes_on:
                self._may_choose = True
        return goes_on

    def begin(self, staged: StagedBatch) -> None:
        """Notes that a batch starts to compute. From now on the next one may be chosen and staged."""
        batch = staged.batch
        self._in_flight.compute(batch)
        with self._lock:
            self._scheduler.started(batch, self._now_ns())
        self._note(self._served.instruments.note_start, staged)
        self._may_choose = True

    def end(self, staged: StagedBatch, computed: Computed, ended_ns: int) -> None:
        """Answers the texts that have passed all layers, and lets the scheduler learn from the batch."""
        batch = staged.batch
        self._in_flight.leave(batch)  # if the engine ends now, its requests were not in a batch
        self._answer(staged, computed)  # first: clients wait for it, and for nothing of what follows
        self._hand_back(staged)  # before the scheduler hears of it, and lets a batch be staged in their place
        self._note(self._served.instruments.computed, staged)
        with self._lock:
            self._scheduler.finished(batch, ended_ns, staged.brought, staged.computing_ns)

    def close(self) -> None:
        """Refuses new requests. Waiting texts are still served."""
        with self._lock:
            self._scheduler.close()

    @property
    def is_drained(self) -> bool:
        """Whether it is closed, and each text has its answer."""
        with self._lock:
            return self._scheduler.draining and self._scheduler.is_empty

    def abandon(self) -> None:
        """Closes, and answers all texts that have no answer yet with an error."""
        with self._lock:
            self._scheduler.close()
            left = self._scheduler.abandon()
        self._refuse(left, lambda text: Draining("the server is shutting down: send the request again"))

    def _stage(self, batch: Batch[Text]) -> StagedBatch | None:
        """Returns the staged batch. None: its texts are answered, or its halves are next."""
        try:
            self._in_flight.enter(batch, [request.in_flight_entry for request in {text.request for text in batch.texts}])
            while self._computed:
                self._computed.popleft()()
            waiting = [number for number, text in enumerate(batch.texts) if not text.request.answered]
            texts, places = [batch.texts[number] for number in waiting], batch.places and batch.places.of(waiting)
            staged = self._served.stager.stage(texts, self._broken, places) if texts else None
        except Exception as error:
            self._give_up(batch, batch.texts, error)
            return None
        if staged is None:
            self._drop(batch)
        else:
            staged.batch = batch
        return staged

    def _leave(self, staged: StagedBatch, leaving: Computed) -> None:
        """Answers texts that leave before the last layer, while others of their batch compute."""
        texts = [staged.texts[index] for index in leaving.indexes]
        with self._lock:
            self._scheduler.answered(staged.batch, texts, self._now_ns())
        self._answer(staged, leaving)

    @staticmethod
    def _note(instrument: Callable[..., None], *args: object) -> None:
        """Counts something. A failure of that is logged, and changes no answer."""
        try:
            instrument(*args)
        except Exception:
            log.exception("cannot count a batch")

    def _hand_back(self, staged: StagedBatch) -> None:
        """Lets `prepare` have the slots of a computed batch again. May be called twice."""
        self._computed.append(partial(self._served.stager.release, staged.held))

    def _answer(self, staged: StagedBatch, computed: Computed) -> None:
        staged.gone.update(computed.indexes)
        texts = [staged.texts[index] for index in computed.indexes]
        self._note(self._served.instruments.reached, texts, computed.exit)
        try:
            with self._together:
                for own, found in read_answers(texts, computed.logits, computed.exit):
                    request = own[0].request
                    if isinstance(found, HplmError):
                        request.fail(found)
                        continue
                    request.done(own, found)
                    for number, text in enumerate(own if own[0].plan is not None else ()):
                        if text.guess is not None:
                            self._note(self._served.engine.exit_audit.audit, text, text.guess, found[number])
        except Exception as error:
            failed = faults.failure("answering a batch", error)
            self._refuse(texts, lambda text: failed)

    def _refuse(self, texts: Sequence[Text], error: Callable[[Text], HplmError]) -> None:
        """Answers texts that are not computed."""
        with self._together:
            for text in texts:
                text.request.fail(error(text))

    def _broken(self, text: Text, error: HplmError) -> None:
        log.error("tenant %s: %s", text.request.tenant.id, error)
        text.request.fail(type(error)(f"tenant {text.request.tenant.id!r}: {error}"))

    def _give_up(self, batch: Batch[Text], texts: list[Text], error: Exception, staged: StagedBatch | None = None) -> None:
        """Answers the texts of a batch that failed. If the device has no memory for it, its halves are tried first."""
        what = "staging" if staged is None else "computing"
        if faults.stays(error):
            log.critical("%s a batch failed, and the device with it", what, exc_info=error)
            self._device_failed()  # while the batch is still shown: its tenants are the suspects
        if staged is not None:
            self._in_flight.leave(batch)
            self._hand_back(staged)  # before a half may be staged in its place
        if faults.is_out_of_memory(error):
            with self._lock:
                is_halved = self._scheduler.halve(batch, texts, self._now_ns())
            if is_halved:
                log.warning("the device has no memory for a batch of %d texts: smaller ones are next", len(batch.texts))
                return
            error = OutOfCapacity(
                f"the device has no memory for a batch of {len(texts)} texts with {sum(text.tokens for text in texts)} tokens: "
                "give it fewer with the parameter batch_tokens, or fewer slots"
            )
        failed = faults.failure(f"{what} a batch", error)
        try:
            self._refuse(texts, lambda text: failed)
        finally:
            self._drop(batch)

    def _drop(self, batch: Batch[Text]) -> None:
        with self._lock:
            self._scheduler.dropped(batch)


def _full(text: Text) -> QueueFull:
    return QueueFull(
        f"the queue is full, and tenant {text.request.tenant.id!r} holds the largest part of it: retry after 0.1 s, or send "
        "fewer texts in a request"
    )
