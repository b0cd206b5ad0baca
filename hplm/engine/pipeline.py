"""Select, stage, compute and answer batches. Batch k+1 is staged while batch k computes.

There are four threads: one stages and owns the slots, one computes, one answers, one answers expired texts. An engine with
several stages has a computing thread for each, so that batch k+1 computes in the first stage while batch k does in the second.
An error in any thread becomes the answer to the texts that it held. Nothing ends a thread before the pipeline closes.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial

from hplm.engine.failures import drained, failure, full, no_memory
from hplm.engine.in_flight import InFlight
from hplm.engine.passage import Computed
from hplm.engine.request import Text
from hplm.engine.results import read_answers
from hplm.engine.served import Served
from hplm.engine.staged import StagedBatch
from hplm.engine.threads import Runner
from hplm.errors import DeadlineMissed, HplmError
from hplm.model import faults
from hplm.model.openmp import compute_with
from hplm.scheduling.batch import Batch
from hplm.scheduling.queue import Queue
from hplm.scheduling.waiting import Capacity

log = logging.getLogger(__name__)
Together = Callable[[], AbstractContextManager[None]]


class Pipeline:
    def __init__(
        self,
        line: Queue[Text],
        capacity: Capacity,
        served: Sequence[Served],
        together: Together,
        device_failed: Callable[[], None],
        threads: int,
        in_flight: InFlight,
        runner: Runner,
    ) -> None:
        """`served`: by the number of the backbone. All have the same devices, so a stage has one thread for all of them.

        `device_failed` is called after a fault of the device that stays. `threads`: of the CPU, for each computing thread, or
        with CUDA for the staging thread. The others have one.
        """
        self._line, self._capacity = line, capacity
        self._served = served
        self._together = together
        self._device_failed = device_failed
        self._in_flight = in_flight
        # A batch is not chosen before the batch before it starts to compute, nor beyond the capacity's batches in flight.
        self._may_choose = threading.Semaphore(1)
        self._stages, on_cpu = served[0].engine.stages, served[0].engine.device.type == "cpu"
        self._last = len(self._stages) - 1  # stage
        self._before: list[queue.SimpleQueue[tuple[Batch[Text], StagedBatch] | None]]  # batches that wait for each stage
        self._before = [queue.SimpleQueue() for _ in self._stages]
        self._computed: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()  # give back the slots that a batch held
        self._answering = runner.beside("answer")
        self._computing_since: list[float | None] = [None for _ in self._stages]
        self._threads = [
            runner.repeat(self._stage_next, "stage", partial(compute_with, 1 if on_cpu else threads)),
            *(self._computing(runner, stage, threads if on_cpu else 1) for stage in range(len(self._stages))),
            runner.repeat(self._expire_next, "expire"),
        ]

    def _computing(self, runner: Runner, stage: int, threads: int) -> threading.Thread:
        def prepare() -> None:
            self._stages[stage].pin()
            compute_with(threads)

        step = self._compute_next if stage == self._last else partial(self._enter_next, stage)
        return runner.repeat(step, f"compute {stage + 1}" if self._last else "compute", prepare)

    @property
    def computing_s(self) -> float:
        """How long a stage has been computing its batch: the longest time of all stages."""
        begun = [since for since in self._computing_since if since is not None]
        return time.monotonic() - min(begun) if begun else 0.0

    def close(self, timeout: float) -> None:
        """Serves all waiting texts for `timeout` seconds at most, and answers the rest with an error."""
        self._line.close()
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._refuse(self._line.abandon(), drained)
        self._answering.shutdown(wait=True)

    def refuse(self, texts: list[Text]) -> None:
        """Answers texts that lost their places in a full queue."""
        self._refuse(texts, full)

    def _stage_next(self) -> bool:
        """Stages one batch. Returns False when the pipeline closes.

        Its variables are freed before the next wait: a request keeps its tables and banks open.
        """
        self._may_choose.acquire()
        try:
            batch = self._line.take(self._capacity)
            if batch is None:
                self._before[0].put(None)
                return False
            if not self._stage_batch(batch):
                self._in_flight.leave(batch)
                self._may_choose.release()
            return True
        except BaseException:
            self._may_choose.release()
            raise

    def _stage_batch(self, batch: Batch[Text]) -> bool:
        """Whether the batch is staged now. If not, its texts are answered."""
        try:
            self._in_flight.enter(batch, {text.request.mark for text in batch.texts})
            self._release_computed()
            waiting = [number for number, text in enumerate(batch.texts) if not text.request.answered]
            texts, places = [batch.texts[number] for number in waiting], batch.places and batch.places.of(waiting)
            staged = self._of(batch).stager.stage(texts, self._broken, places) if texts else None
        except Exception as error:
            self._give_up(batch, batch.texts, error)
            return False
        if staged is None:
            self._line.dropped(batch)
            return False
        self._before[0].put((batch, staged))
        return True

    def _expire_next(self) -> bool:
        """Answers expired texts at once, even while the engine is busy."""
        texts = self._line.expired()
        if texts is None:
            return False
        with self._together():
            self._refuse(texts, lambda text: DeadlineMissed.after(text.arrival_ns, text.deadline_ns))
        return True

    def _enter_next(self, stage: int) -> bool:
        """Computes one batch in a stage that is not the last one, and hands it on. Returns False when the pipeline closes."""
        chosen = self._before[stage].get()
        if chosen is None:
            self._before[stage + 1].put(None)
            return False
        batch, staged = chosen
        try:
            with ExitStack() as next_batch:
                if stage == 0:
                    self._begin(batch, staged, next_batch)
                with self._timed(staged, stage):
                    for leaving in self._of(batch).engine.enter(staged, stage):
                        self._leave(batch, staged, leaving)
            if stage == 0:
                self._line.released(batch)
        except Exception as error:
            self._give_up(batch, staged.left, error, staged)
        else:
            self._before[stage + 1].put(chosen)
        return True

    def _compute_next(self) -> bool:
        """Computes one batch in the last stage or the only one. Returns False when the pipeline closes."""
        chosen = self._before[self._last].get()
        if chosen is None:
            return False
        batch, staged = chosen
        try:
            with ExitStack() as next_batch:
                if self._last == 0:
                    self._begin(batch, staged, next_batch)
                end = Computed([], [])
                with self._timed(staged, self._last):
                    for computed in self._of(batch).engine.run(staged):
                        if computed.exit is None:
                            end = computed
                        else:
                            self._leave(batch, staged, computed)
            self._hand_back(batch, staged)  # before the line hears of it, and lets a batch be staged in their place
            self._line.finished(batch, staged.brought, staged.computing_ns if self._last else ())
        except Exception as error:
            self._give_up(batch, staged.left, error, staged)
        else:
            self._note(self._of(batch).instruments.computed, staged)
            if end.indexes:  # not if all texts have left
                self._answer(batch, staged, end)
        return True

    def _leave(self, batch: Batch[Text], staged: StagedBatch, leaving: Computed) -> None:
        """Answers texts that leave at an exit, while others of their batch compute."""
        texts = [staged.texts[index] for index in leaving.indexes]
        self._line.left(batch, texts)
        self._note(self._of(batch).instruments.reached, texts)
        self._answer(batch, staged, leaving)

    def _begin(self, batch: Batch[Text], staged: StagedBatch, next_batch: ExitStack) -> None:
        next_batch.callback(self._may_choose.release)
        self._line.started(batch)
        self._note(self._of(batch).instruments.started, batch, staged)
        self._of(batch).stager.finish(staged)
        if self._of(batch).stager.overlap.staging:
            next_batch.close()  # the next batch may be chosen and staged while this one computes

    @contextmanager
    def _timed(self, staged: StagedBatch, stage: int) -> Generator[None]:
        """Measures how long a stage computes a batch."""
        name = f"compute_{stage + 1}" if stage else "compute"
        try:
            with staged.timed(name):
                self._computing_since[stage] = time.monotonic()
                yield
        finally:
            self._computing_since[stage] = None
        start, end = staged.stages[name]
        staged.computing_ns.append(max(1, end - start))

    @staticmethod
    def _note(instrument: Callable[..., None], *args: object) -> None:
        """Counts something. A failure of that is logged, and changes no answer."""
        try:
            instrument(*args)
        except Exception:
            log.exception("cannot count a batch")

    def _of(self, batch: Batch[Text]) -> Served:
        return self._served[batch.backbone]

    def _hand_back(self, batch: Batch[Text], staged: StagedBatch) -> None:
        """Lets the staging thread have the slots of a computed batch again. May be called twice."""
        self._in_flight.leave(batch)
        self._computed.put(partial(self._of(batch).stager.release, staged.held))

    def _release_computed(self) -> None:
        while True:
            try:
                self._computed.get_nowait()()
            except queue.Empty:
                return

    def _answer(self, batch: Batch[Text], staged: StagedBatch, computed: Computed) -> None:
        staged.gone.update(computed.indexes)
        texts, served = [staged.texts[index] for index in computed.indexes], self._of(batch)
        is_alone = len({text.request for text in staged.texts}) == 1
        if is_alone and len(staged.gone) == len(staged.texts) and self._before[self._last].empty():
            self._answer_now(served, texts, computed)  # the engine is idle, so this thread answers
            return
        try:
            self._answering.submit(self._answer_now, served, texts, computed)
        except RuntimeError:  # the pipeline was closed during this batch, which still needs its answer
            self._answer_now(served, texts, computed)

    def _answer_now(self, served: Served, texts: Sequence[Text], computed: Computed) -> None:
        try:
            with self._together():
                for text, found in read_answers(texts, computed.logits, computed.exit):
                    if isinstance(found, HplmError):
                        _sending(text.request.fail, found)
                        continue
                    _sending(text.request.done, text.index, found)
                    if text.guess is not None:
                        self._note(served.engine.watch.audit, text, text.guess, found)
            self._note(served.instruments.answered, texts, computed.exit)
        except Exception as error:
            self._fail(texts, failure("answering", error))

    @staticmethod
    def _refuse(texts: Sequence[Text], error: Callable[[Text], HplmError]) -> None:
        """Answers texts that are not computed."""
        for text in texts:
            _sending(text.request.fail, error(text))

    def _broken(self, text: Text, error: HplmError) -> None:
        log.error("tenant %s: %s", text.request.tenant.id, error)
        _sending(text.request.fail, type(error)(f"tenant {text.request.tenant.id!r}: {error}"))

    def _give_up(self, batch: Batch[Text], texts: list[Text], error: Exception, staged: StagedBatch | None = None) -> None:
        """Answers the texts of a batch that failed. If the device has no memory for it, its halves are tried first."""
        what = "staging" if staged is None else "computing"
        if faults.stays(error):
            log.critical("%s a batch failed, and the device with it", what, exc_info=error)
            self._device_failed()  # while the batch is still shown: its tenants are the suspects
        if staged is not None:
            self._hand_back(batch, staged)  # before a half may be staged in its place
        if faults.is_out_of_memory(error):
            if self._line.halve(batch, texts):
                log.warning("the device has no memory for a batch of %d texts: smaller ones are next", len(batch.texts))
                return
            error = no_memory(texts)
        self._line.dropped(batch)
        self._fail(texts, failure(what, error))

    def _fail(self, texts: Sequence[Text], error: HplmError) -> None:
        with self._together():
            for request in {text.request for text in texts}:
                _sending(request.fail, error)


def _sending(send: Callable[..., None], *args: object) -> None:
    """Calls `send` and logs an exception, so that the others are still answered."""
    try:
        send(*args)
    except Exception:
        log.exception("cannot send an answer")
