"""Select, stage, compute and answer batches. Batch k+1 is staged while batch k computes.

There are four threads: one stages and owns the slots, one computes, one answers, one answers expired texts. An error in any of
them becomes the answer to the texts that it held. Nothing ends a thread before the pipeline closes.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from itertools import compress

from hplm.adapters.slots import Slots
from hplm.engine.dispatch import Leaving, divided
from hplm.engine.engine import Computed, Engine
from hplm.engine.instruments import Instruments
from hplm.engine.request import InHand, Text
from hplm.engine.results import read_answers
from hplm.engine.staged import StagedBatch
from hplm.engine.staging import Stager
from hplm.engine.threads import repeat
from hplm.errors import Broken, DeadlineMissed, Draining, HplmError, QueueFull
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
        stager: Stager,
        engine: Engine,
        instruments: Instruments,
        together: Together,
        device_failed: Callable[[], None],
        threads: int,
    ) -> None:
        """`device_failed` is called after a fault of the device that stays. `threads`: of the CPU, for the computing thread, or
        with CUDA for the staging thread. The other one has one.
        """
        self._line = line
        self._capacity = capacity
        self._stager = stager
        self._engine = engine
        self._instruments = instruments
        self._together = together
        self._device_failed = device_failed
        self._overlap = stager.overlap
        # Two batches are in flight at most: a batch is not chosen before the batch before it starts to compute.
        self._may_choose = threading.Semaphore(1)
        self._staged: queue.SimpleQueue[tuple[Batch[Text], StagedBatch] | None] = queue.SimpleQueue()
        self._computed: queue.SimpleQueue[list[tuple[Slots, int]]] = queue.SimpleQueue()  # slots that a batch held
        self._answering = ThreadPoolExecutor(1, thread_name_prefix="answer")
        self._computing_since: float | None = None
        on_cpu = engine.device.type == "cpu"
        self._threads = [
            repeat(self._stage_next, "stage", partial(compute_with, 1 if on_cpu else threads)),
            repeat(self._compute_next, "compute", partial(compute_with, threads if on_cpu else 1)),
            repeat(self._expire_next, "expire"),
        ]

    @property
    def computing_s(self) -> float:
        """How long the current batch has been computing."""
        since = self._computing_since
        return time.monotonic() - since if since is not None else 0.0

    def close(self, timeout: float) -> None:
        """Serves all waiting texts for `timeout` seconds at most, and answers the rest with an error."""
        self._line.close()
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._end(list(dict.fromkeys(self._line.abandon())), "draining", _drained)
        self._answering.shutdown(wait=True)

    def refuse(self, texts: list[Text]) -> None:
        """Answers texts that lost their places in a full queue."""
        self._end(texts, "full", _full)

    def _stage_next(self) -> bool:
        """Stages one batch. Returns False when the pipeline closes.

        Its variables are freed before the next wait: a request keeps its tables and banks open.
        """
        self._may_choose.acquire()
        try:
            batch = self._line.take(self._capacity)
            if batch is None:
                self._staged.put(None)
                return False
            if not self._stage_batch(batch):
                self._may_choose.release()
            return True
        except BaseException:
            self._may_choose.release()
            raise

    def _stage_batch(self, batch: Batch[Text]) -> bool:
        """Whether the batch is staged now. If not, its texts are answered."""
        try:
            self._release_computed()
            waiting = [number for number, text in enumerate(batch.texts) if not text.request.answered]
            texts, places = [batch.texts[number] for number in waiting], batch.places and batch.places.of(waiting)
            staged = self._stager.stage(texts, self._broken, places, not batch.is_half) if texts else None
        except Exception as error:
            self._give_up("staging", batch, batch.texts, error)
            return False
        if staged is None:
            self._line.dropped(batch)
            return False
        self._staged.put((batch, staged))
        return True

    def _expire_next(self) -> bool:
        """Answers expired texts at once, even while the engine is busy."""
        texts = self._line.expired()
        if texts is None:
            return False
        with self._together():
            self._end(texts, "late", lambda text: DeadlineMissed.after(text.arrival_ns, text.deadline_ns))
        return True

    def _compute_next(self) -> bool:
        chosen = self._staged.get()
        if chosen is None:
            return False
        batch, staged = chosen
        left, leaving = set(range(len(staged.texts))), Leaving([], [])
        try:
            for computed in self._run(batch, staged):
                self._line.computed(batch, [staged.texts[index] for index in computed.indexes])
                leaving, going_on = self._divide(batch, staged, computed)
                rest = left.difference(computed.indexes).union(going_on)
                if rest:  # more is computed in this batch
                    left = rest
                    self._note(self._instruments.reached, leaving.all)
                    self._answer_beside(leaving)
                    staged.go_on(going_on)
            self._line.finished(batch, staged.brought)
        except Exception as error:
            self._give_up("computing", batch, [staged.texts[index] for index in sorted(left)], error)
        else:
            self._note(self._instruments.computed, staged)
            self._answer(leaving)
        finally:
            self._computed.put(staged.held)
        return True

    def _divide(self, batch: Batch[Text], staged: StagedBatch, computed: Computed) -> tuple[Leaving, list[int]]:
        """Returns the computed texts that leave the batch, and the indexes of those that go on in it."""
        texts = [staged.texts[index] for index in computed.indexes]
        at_end = [text.is_at_end for text in texts]
        leaving = Leaving(list(compress(texts, at_end)), list(compress(computed.logits, at_end)))
        if all(at_end):
            return leaving, []
        undecided = [not ends for ends in at_end]
        texts, logits = list(compress(texts, undecided)), list(compress(computed.logits, undecided))
        try:
            read = list(read_answers(texts, logits))
            broken = [(text, found) for text, found in read if isinstance(found, HplmError)]
            answers = [(text, found) for text, found in read if not isinstance(found, HplmError)]
            sure, unsure, across = divided(answers, {staged.texts[index]: own for index, own in computed.received.items()})
            self._note(self._instruments.decided, *([text for text, _ in some] for some in (sure, across)), unsure)
            going_on = set(self._line.going_on(batch, [text for text in unsure if staged.has_level_of(text)]))
        except Exception as error:
            self._fail(texts, _failure("answering", error))
            return leaving, []
        leaving.sure, leaving.across, leaving.broken = sure, across, broken
        leaving.back = [text for text in unsure if text not in going_on]
        return leaving, [index for index in computed.indexes if staged.texts[index] in going_on]

    def _run(self, batch: Batch[Text], staged: StagedBatch) -> Iterator[Computed]:
        with ExitStack() as next_batch:
            next_batch.callback(self._may_choose.release)
            self._line.started(batch)
            self._note(self._instruments.started, batch, staged)
            self._stager.finish(staged)
            if self._overlap.staging:
                next_batch.close()  # the next batch may be chosen and staged while this one computes
            with staged.timed("compute"):
                self._computing_since = time.monotonic()
                try:
                    yield from self._engine.run(staged)
                finally:
                    self._computing_since = None

    @staticmethod
    def _note(instrument: Callable[..., None], *args: object) -> None:
        """Counts something. A failure of that is logged, and changes no answer."""
        try:
            instrument(*args)
        except Exception:
            log.exception("cannot count a batch")

    def _release_computed(self) -> None:
        while True:
            try:
                self._stager.release(self._computed.get_nowait())
            except queue.Empty:
                return

    def _answer(self, leaving: Leaving) -> None:
        if len({text.request for text in leaving.all}) == 1 and self._staged.empty():
            self._answer_now(leaving)  # the engine is idle, so this thread answers
        else:
            self._answer_beside(leaving)

    def _answer_beside(self, leaving: Leaving) -> None:
        try:
            self._answering.submit(self._answer_now, leaving)
        except RuntimeError:  # the pipeline was closed during this batch, which still needs its answer
            self._answer_now(leaving)

    def _answer_now(self, leaving: Leaving) -> None:
        try:
            with self._together():
                self._done(leaving.sure, "sure")
                self._done(leaving.across, "across")
                broken: list[tuple[Text, HplmError]] = [*leaving.broken]
                ended: dict[str, list[tuple[Text, InHand]]] = {"only": [], "last": []}
                for text, found in read_answers(leaving.texts, leaving.logits):
                    if isinstance(found, HplmError):
                        broken.append((text, found))
                    else:
                        ended["only" if text.in_hand is None else "last"].append((text, found))
                for text, error in broken:
                    _sending(text.request.fail, error)
                for reason, answered in ended.items():
                    self._done(answered, reason)
                self._end(self._line.again(leaving.back), "draining", _drained)
        except Exception as error:
            self._fail(leaving.all, _failure("answering", error))

    def _done(self, answered: list[tuple[Text, InHand]], reason: str) -> None:
        for text, found in answered:
            _sending(text.request.done, text.index, found.answer)
        if not answered:
            return
        counted = [found.answer for text, found in answered if text.request.tenant.is_cascaded]
        self._note(self._instruments.answered, counted, reason)

    def _end(self, texts: list[Text], reason: str, error: Callable[[Text], HplmError]) -> None:
        """Answers texts that are not computed again: with the answer in hand, or with an error where there is none."""
        self._done([(text, text.in_hand) for text in texts if text.in_hand is not None], reason)
        for text in texts:
            if text.in_hand is None:
                _sending(text.request.fail, error(text))

    def _broken(self, text: Text, error: HplmError) -> None:
        log.error("tenant %s: %s", text.request.tenant.id, error)
        _sending(text.request.fail, Broken(f"tenant {text.request.tenant.id!r}: {error}"))

    def _give_up(self, what: str, batch: Batch[Text], texts: list[Text], error: Exception) -> None:
        """Answers the texts of a batch that failed. If the device has no memory for it, its halves are tried first."""
        if faults.stays(error):
            log.critical("%s a batch failed, and the device with it", what, exc_info=error)
            self._device_failed()
        if faults.is_out_of_memory(error):
            if self._line.halve(batch, texts):
                log.warning("the device has no memory for a batch of %d texts: smaller ones are next", len(batch.texts))
                return
            error = Broken(
                f"the device has no memory for a batch of {len(texts)} texts with {sum(text.length for text in texts)} tokens: "
                "give it fewer with the parameter batch_tokens, or fewer slots"
            )
        self._line.dropped(batch)
        self._fail(texts, _failure(what, error))

    def _fail(self, texts: list[Text], failure: HplmError) -> None:
        with self._together():
            for request in {text.request for text in texts}:
                _sending(request.fail, failure)


def _full(text: Text) -> QueueFull:
    return QueueFull(
        f"the queue is full, and tenant {text.request.tenant.id!r} holds the largest part of it: retry after 0.1 s, or send "
        "fewer texts in a request"
    )


def _drained(text: Text) -> Draining:
    return Draining("the server is shutting down: send the request again")


def _failure(what: str, error: Exception) -> HplmError:
    log.error("%s a batch failed", what, exc_info=error)
    return error if isinstance(error, HplmError) else Broken(f"{what} the batch failed: {error}")


def _sending(send: Callable[..., None], *args: object) -> None:
    """Calls `send` and logs an exception, so that the others are still answered."""
    try:
        send(*args)
    except Exception:
        log.exception("cannot send an answer")
