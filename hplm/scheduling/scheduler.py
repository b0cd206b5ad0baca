"""Waiting texts, running batches and the choice of the next batch. It has no threads and no clock of its own.

The server drives it through `Encoder`, the simulator on a virtual clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from hplm.arrays import Array
from hplm.errors import DeadlineMissed
from hplm.scheduling.admission import Admission
from hplm.scheduling.columns import NEVER
from hplm.scheduling.governor import Governor
from hplm.scheduling.limits import Limits, T
from hplm.scheduling.policy import Policy
from hplm.scheduling.queue import LEARNING, Queue
from hplm.scheduling.selection import Batch, Capacity, Selection

STALE_NS = 10**9  # after so long without a batch, predictions are not used: only another batch can correct a wrong one


class Scheduler(Queue[T]):
    def __init__(
        self,
        policy: Policy,
        limits: Limits,
        admission: bool = False,
        commit_ns: int | None = None,
        batch_ns: int = 0,
        answering_ns: int = 0,
    ) -> None:
        """`admission`: refuse requests that cannot be answered in time, and drop waiting ones that no longer can.

        `commit_ns`: how long before the engine is free the next batch is chosen. None: at once.
        `batch_ns`: how long the tokens of a batch may take by prediction, if they are more than LEAST_TOKENS and no longer
        line waits (`Queue.bounded`); 0: no bound.
        `answering_ns`: the time from the end of computing until the client has the answer.
        """
        super().__init__(policy, limits, answering_ns)
        self.alone: frozenset[int] = frozenset()  # tenants: while a text of one is in a batch, no other's is in any batch
        self.governor = Governor(self.cost)
        self._admission = Admission(self) if admission else None
        self._commit_ns = commit_ns
        self._batch_ns = batch_ns
        self._running: deque[Batch[T]] = deque()  # chosen and not finished, in order
        self._halves: deque[Batch[T]] = deque()  # to be run next
        self._uneven_ns = 0.0  # mean: so long before a batch ends, a thread of the engine is free
        self._staging_ns = 0.0  # from choice to start, with an idle engine
        self._capacity = Capacity(0, 0, 0)  # of the batch that was chosen last
        self._unserved = 0  # tokens that were refused for their deadline, or expired, since the last choice
        self._ended_ns = 0  # when the last batch was finished

    def __len__(self) -> int:
        return super().__len__() + sum([len(half.texts) for half in self._halves])

    @property
    def is_empty(self) -> bool:
        """Whether no text waits, or is in a batch."""
        return not self._running and not len(self)

    def waiting(self) -> tuple[int, int, int]:
        """Returns how many texts wait, the memory that they keep, and when the oldest arrived, or NEVER."""
        oldest = min((text.arrival_ns for half in self._halves for text in half.texts), default=NEVER)
        return len(self), self.columns.bytes, int(self.columns.arrival.min(initial=oldest))

    def _admit(self, texts: Sequence[T], now_ns: int) -> None:
        if (admission := self._admission) is None:
            return
        if admission.must_count:
            admission.count(self._start_at(now_ns) + self._answering_ns, bool(self._running))
        try:
            admission.check(texts, len(self.columns) > 0 or self._predicts(now_ns), now_ns)
        except DeadlineMissed:
            self._unserved += sum([text.tokens for text in texts])
            raise

    def choose_at(self, now_ns: int) -> int:
        """Returns the time at which the next batch should be chosen."""
        if self._commit_ns is None or not self._running:
            return now_ns
        return max(now_ns, int(self._free_at(now_ns) - self._uneven_ns - self._staging_ns - self._commit_ns))

    def due(self, now_ns: int) -> int:
        """Returns when a text expires or a batch is to be chosen if nothing changes until then, or NEVER. Not if it is now."""
        choose_at = self.choose_at(now_ns) if len(self) else now_ns
        return min(self.next_expiry(now_ns), choose_at if choose_at > now_ns else NEVER)

    def choose(self, capacity: Capacity, now_ns: int) -> Batch[T] | None:
        """Returns the next batch, or None if nothing should run now. Call `expired` before: policies get no expired text."""
        if (
            self.choose_at(now_ns) > now_ns
            or len(self._running) >= capacity.in_flight
            or (self.alone and not self.alone.isdisjoint([batch.texts[0].tenant for batch in self._running]))
        ):
            return None
        if self._halves:
            half = self._halves.popleft()
            self._running.append(half)
            return half
        if not len(self.columns):
            return None
        # Policies compare deadlines with the end of computing, so the time after it is added to the start.
        start_ns = self._start_at(now_ns) + self._answering_ns
        self._capacity = self.bounded(capacity, self._batch_ns, start_ns)
        selection = self.select(start_ns, self._capacity, not self._running)
        if self.alone and len(selection.indexes):
            selection, must_wait = selection.separated(self.columns, self.alone)
            if must_wait and self._running:
                return None  # nor other texts: the engine would never be free of them
        return self._take(selection, now_ns) if len(selection.indexes) else None

    def _take(self, selection: Selection, now_ns: int) -> Batch[T]:
        """Takes the chosen texts out of the line."""
        is_crowd = self._waits_a_crowd()
        self._recount()
        batch = self.batch(self.serve(selection.indexes), now_ns, not self._running, selection.places)
        self._running.append(batch)
        held = batch.tokens, len(batch.texts), batch.slot_keys * self.loaded
        left_some = len(self.columns) > 0
        full = held if left_some or self._unserved else None
        is_crowd = is_crowd and (left_some or self._unserved > 0)
        self._unserved = 0
        self.governor.chosen(full, self.columns, is_crowd, now_ns)
        if self._admission is not None and left_some:
            self._admission.chosen(*held)
        return batch

    def remove(self, indexes: Array) -> list[T]:
        """Removes texts that are not served."""
        self._recount()
        return super().remove(indexes)

    def _waits_a_crowd(self) -> bool:
        """Whether more waits than a batch holds, with what was not served in time since the last choice."""
        columns, capacity = self.columns, self._capacity
        return (
            columns.all_tokens + self._unserved > capacity.tokens
            or len(columns) > capacity.texts
            or columns.slot_keys > capacity.tenants
        )

    def started(self, batch: Batch[T], now_ns: int) -> None:
        """Records that the engine has started the batch."""
        batch.started_ns = now_ns
        if batch.alone:  # a stalled batch counts for at most twice the mean, or for its own computing time
            staged = min(now_ns - batch.chosen_ns, max(2 * self._staging_ns, batch.expected_ns))
            self._staging_ns += LEARNING * (staged - self._staging_ns)

    def answered(self, batch: Batch[T], texts: Sequence[T], now_ns: int) -> None:
        """Records that texts of a running batch are answered, those that were not yet."""
        if self._admission is not None:
            by_ns, new = now_ns + self._answering_ns, [text for text in texts if text.deadline_ns and text not in batch.judged]
            late = sum([text.deadline_ns < by_ns for text in new])
            self._admission.done(len(new) - late, late)
            batch.judged.update(new)

    def finished(self, batch: Batch[T], now_ns: int, adapters: int = 0, stages_ns: Sequence[int] = ()) -> None:
        """Records that the engine has finished the batch, for which `adapters` adapters had to be loaded.

        `stages_ns`: if there are several, how long each of those has computed it that had something to compute.
        """
        assert batch.started_ns is not None  # `started` was called before
        self._running.remove(batch)
        self._ended_ns = now_ns
        self._uneven_ns += LEARNING * (batch.uneven_ns - self._uneven_ns)
        self.learn(batch, adapters, sum(stages_ns) or now_ns - batch.started_ns, stages_ns)
        self.answered(batch, batch.texts, now_ns)
        self._recount()

    def dropped(self, batch: Batch[T]) -> None:
        """Forgets a batch that failed or will not run, without learning from it."""
        if batch in self._running:
            self._running.remove(batch)
        self._recount()

    def halve(self, batch: Batch[T], unanswered: Sequence[T], now_ns: int) -> bool:
        """Replaces a batch for which the device had no memory by smaller ones, with its `unanswered` texts.

        Returns False if that was done before, or cannot be.
        """
        if batch.is_half or not unanswered or len(batch.texts) < 2:
            return False
        middle = len(unanswered) // 2
        for texts in filter(None, (list(unanswered[:middle]), list(unanswered[middle:]))):
            self._halves.append(self.batch(texts, now_ns, is_half=True))
        self.dropped(batch)
        return True

    def expired(self, now_ns: int) -> list[T]:
        """Removes and returns the texts that can no longer be answered in time, and the other texts of their requests."""
        predicts = self._predicts(now_ns)
        expired = self.late(self._start_at(now_ns) if predicts else now_ns, predicts) if len(self.columns) else []
        self._unserved += sum([text.tokens for text in expired])
        if expired and self._admission is not None:
            self._admission.done(0, len(expired))
        return expired

    def next_expiry(self, now_ns: int) -> int:
        """Returns when the next text expires if nothing changes until then, or NEVER if no text has a deadline."""
        predicts = self._predicts(now_ns)
        earliest = self.earliest(predicts)
        return now_ns if predicts and earliest <= self._start_at(now_ns) else earliest

    def abandon(self) -> list[T]:
        """Returns all texts without an answer, also those of running batches. Running batches are not stopped."""
        chosen = [text for batch in (*self._running, *self._halves) for text in batch.texts]
        self._halves.clear()
        return chosen + super().abandon()

    def _predicts(self, now_ns: int) -> bool:
        """Whether a text may be dropped before its deadline has passed."""
        return self._admission is not None and (bool(self._running) or now_ns - self._ended_ns < STALE_NS)

    def _recount(self) -> None:
        if self._admission is not None:
            self._admission.must_count = True

    def _free_at(self, now_ns: int) -> float:
        """Returns when the next batch finds the stages of the engine free, each when it gets there.

        A batch ends after the time through all stages, and after the batch before it by the time of the slowest stage at least.
        The next batch counts as if it were as large as the last one of those that run.
        """
        free, ends = float(now_ns), float(self._ended_ns)
        for batch in self._running:
            started = free if batch.started_ns is None else batch.started_ns
            between = batch.expected_ns * self.cost.slowest
            ends = max(now_ns, started + batch.expected_ns, ends + between)
            free = max(now_ns, ends + between - batch.expected_ns)
        oldest = self._running[0] if len(self._running) >= self._capacity.in_flight else None
        if oldest is not None and oldest.started_ns is not None:
            free = max(free, oldest.started_ns + oldest.expected_ns)
        return free

    def _start_at(self, now_ns: int) -> int:
        """Returns when a batch that is chosen now will start to compute."""
        return int(max(self._free_at(now_ns) if self._running else now_ns, now_ns + self._staging_ns))
