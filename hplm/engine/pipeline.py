"""select -> stage -> compute -> answer, batch k+1 made ready while batch k computes.

Four kinds of thread: one stages (and owns the slots), one computes, one tells who is too late, a few answer. Whatever fails
in any of them is the answer to the texts it held; none of them ends before the pipeline does.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np

from hplm.adapters.slots import Slots
from hplm.engine.engine import Engine
from hplm.engine.instruments import Instruments
from hplm.engine.niceness import let_others_go_first
from hplm.engine.request import Request, Work
from hplm.engine.staging import StagedBatch, Stager
from hplm.errors import Broken, DeadlineMissed, Draining, HplmError
from hplm.scheduling.queue import Queue
from hplm.scheduling.scheduler import Batch
from hplm.scheduling.waiting import Capacity, Waiting

log = logging.getLogger(__name__)
ANSWERING_THREADS = 4  # sending is a round trip to the server process: one thread does not keep up


class Pipeline:
    def __init__(self, line: Queue, capacity: Capacity, stager: Stager, engine: Engine, instruments: Instruments) -> None:
        self._line = line
        self._capacity = capacity
        self._stager = stager
        self._engine = engine
        self._instruments = instruments
        self._overlap = stager.overlap
        # Two batches are in flight at most: one is not chosen before the one before it starts to compute.
        self._room = threading.Semaphore(1)
        self._staged: queue.SimpleQueue[tuple[Batch, StagedBatch] | None] = queue.SimpleQueue()
        self._computed: queue.SimpleQueue[list[tuple[Slots, int]]] = queue.SimpleQueue()  # what a batch held
        self._answering = ThreadPoolExecutor(ANSWERING_THREADS, thread_name_prefix="answer")
        self._threads = [
            threading.Thread(target=self._stage, name="stage", daemon=True),
            threading.Thread(target=self._compute, name="compute", daemon=True),
            threading.Thread(target=self._expire, name="expire", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, request: Request, texts: list[Work], arrival_ns: int, deadline_ns: int, priority: int) -> None:
        """Takes the request, or raises why not; once taken it gets its answer from the pipeline."""
        tenant = request.tenant
        self._line.offer(
            [
                Waiting(
                    tokens=work.tokens,
                    bytes=work.bytes,
                    arrival_ns=arrival_ns,
                    deadline_ns=deadline_ns,
                    priority=priority,
                    knowledge=(tenant.head, tenant.adapter),
                    tenant=tenant.uid,
                    work=work,
                )
                for work in texts
            ]
        )

    def close(self, timeout: float) -> None:
        """Serves what it has taken; what is not served in time is answered with an error. Nothing is left unanswered."""
        self._line.close()
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        for text in self._line.abandon():
            _sending(text.work.request.fail, Draining("the server is shutting down: send the request again"))
        self._answering.shutdown(wait=True)

    def _stage(self) -> None:
        while self._stage_next():
            pass

    def _stage_next(self) -> bool:
        """What it has in hand is let go before it waits again: a request keeps open what its tenant stood on."""
        self._room.acquire()
        batch = self._line.take(self._capacity)
        if batch is None:
            self._staged.put(None)
            return False
        self._release_computed()
        works = [text.work for text in batch.texts if not text.work.request.answered]
        staged = self._stage_one(works) if works else None
        if staged is None:
            self._line.dropped(batch)
            self._room.release()
        else:
            self._staged.put((batch, staged))
        return True

    def _expire(self) -> None:
        """Who is too late hears it at once, whatever the engine is doing."""
        while self._expire_next():
            pass

    def _expire_next(self) -> bool:
        texts = self._line.expired()
        for text in texts or ():
            self._answer_with(text.work.request.fail, _expired(text))
        return texts is not None

    def _stage_one(self, works: list[Work]) -> StagedBatch | None:
        try:
            return self._stager.stage(works, broken=self._broken)
        except Exception as error:
            self._fail(works, "staging", error)
            return None

    def _compute(self) -> None:
        if self._engine.device.type == "cpu":
            let_others_go_first()
        while self._compute_next():
            pass

    def _compute_next(self) -> bool:
        chosen = self._staged.get()
        if chosen is None:
            return False
        batch, staged = chosen
        self._line.started(batch)
        self._instruments.started(batch, staged)
        try:
            logits = self._run(staged)
        except Exception as error:
            self._line.dropped(batch)
            self._fail(staged.works, "computing", error)
        else:
            self._line.finished(batch, staged.brought)
            self._instruments.computed(staged)
            self._answer(staged.works, logits)
        self._computed.put(staged.held)
        return True

    def _run(self, staged: StagedBatch) -> list[np.ndarray]:
        with ExitStack() as next_batch:
            next_batch.callback(self._room.release)
            self._stager.finish(staged)
            if self._overlap.staging:
                next_batch.close()  # it may be chosen and staged while this one computes
            with staged.timed("compute"):
                return self._engine.run(staged)

    def _release_computed(self) -> None:
        while True:
            try:
                self._stager.release(self._computed.get_nowait())
            except queue.Empty:
                return

    def _answer(self, works: list[Work], logits: list[np.ndarray]) -> None:
        """Texts of one request go to one thread, so that a batch of a thousand does not become a thousand tasks."""
        by_request: dict[Request, list[tuple[Work, np.ndarray]]] = {}
        for pair in zip(works, logits, strict=True):
            by_request.setdefault(pair[0].request, []).append(pair)
        if len(by_request) == 1 and self._staged.empty():
            _sending(_answer_texts, next(iter(by_request.values())))  # the engine has nothing better to do: spare the hand-over
            return
        for pairs in by_request.values():
            self._answer_with(_answer_texts, pairs)

    def _answer_with(self, send: Callable[..., None], *args: object) -> None:
        try:
            self._answering.submit(_sending, send, *args)
        except RuntimeError:  # the pipeline was closed over this batch: still exactly one answer
            _sending(send, *args)

    def _broken(self, work: Work, error: HplmError) -> None:
        log.error("tenant %s: %s", work.request.tenant.id, error)
        self._answer_with(work.request.fail, Broken(f"tenant {work.request.tenant.id!r}: {error}"))

    def _fail(self, works: list[Work], what: str, error: Exception) -> None:
        log.error("%s a batch of %d texts failed", what, len(works), exc_info=error)
        failure = error if isinstance(error, HplmError) else Broken(f"{what} the batch failed: {error}")
        for request in {work.request for work in works}:
            self._answer_with(request.fail, failure)


def _sending(send: Callable[..., None], *args: object) -> None:
    """The last resort: whoever sends has answered or failed the request itself, and no thread ends of it."""
    try:
        send(*args)
    except Exception:
        log.exception("an answer could not be sent")


def _answer_texts(pairs: list[tuple[Work, np.ndarray]]) -> None:
    for work, logits in pairs:
        request = work.request
        try:
            labels = request.tenant.labels
            own = np.zeros((len(work.spans), len(labels)), dtype=logits.dtype)  # rows without a token are left out of answers
            own[work.read] = logits[:, : len(labels)]
            request.done(work.index, request.tenant.task_object.answer(own, work.spans, labels, request.top_k, work.passage))
        except Exception as error:
            log.exception("answering failed")
            request.fail(Broken(f"answering failed: {error}"))


def _expired(text: Waiting) -> DeadlineMissed:
    allowed = (text.deadline_ns - text.arrival_ns) / 1e6
    return DeadlineMissed(f"not to be answered within the {allowed:g} ms that the request allowed: allow more, or send fewer")
