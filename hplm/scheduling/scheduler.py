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
from hplm.scheduling.cost import CostModel
from hplm.scheduling.governor import Governor
from hplm.scheduling.limits import Limits, T
from hplm.scheduling.policy import Policy
from hplm.scheduling.queue import LEARNING, Queue, Queues
from hplm.scheduling.selection import Batch, Capacity, Selection

STALE_NS = 10**9  # after so long without a batch, predictions are not used: only another batch can correct a wrong one
LEAD_NS = 100_000_000  # of the engine's time that a backbone may have beyond that of another one with waiting texts


class Scheduler(Queues[T]):
    """Backbones that share an engine have a queue each, and take turns (`_in_turn`)."""

    def __init__(
        self,
        policies: Sequence[Policy],
        limits: Limits,
        admission: bool = False,
        commit_ns: int | None = None,
        batch_ns: int = 0,
        answering_ns: int = 0,
    ) -> None:
        """`policies`: one for each backbone, because a policy may keep a state. `limits`: of all queues together.
        `admission`: refuse requests that cannot be answered in time, and drop waiting ones that no longer can.

        `commit_ns`: how long before the engine is free the next batch is chosen. None: at once.
        `batch_ns`: how long the tokens of a batch may take by prediction, if they are more than LEAST_TOKENS and no long line
        waits (`Queue.bounded`); 0: no bound.
        `answering_ns`: the time from the end of computing until the client has the answer.
        """
        super().__init__(policies, limits, answering_ns)
        self.alone: frozenset[int] = frozenset()  # tenants: while a text of one is in a batch, no other's is in any batch
        self.governor = Governor(self.costs)
        self._admissions = [Admission(queue, self._queues) for queue in self._queues] if admission else []  # of the queues
        self._commit_ns = commit_ns
        self._batch_ns = batch_ns
        self._answering_ns = answering_ns
        self._running: deque[Batch[T]] = deque()  # chosen and not finished, in order
        self._halves: deque[Batch[T]] = deque()  # to be run next
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

    @property
    def costs(self) -> Sequence[CostModel]:
        """The cost model of each backbone."""
        return [queue.cost for queue in self._queues]

    def waiting(self, backbone: int) -> tuple[int, int, int]:
        """Returns how many texts of a backbone wait, the memory that they keep, and when the oldest arrived, or NEVER."""
        columns = self._queues[backbone].columns
        halves = [text for half in self._halves if half.backbone == backbone for text in half.texts]
        oldest = min((text.arrival_ns for text in halves), default=NEVER)
        return len(columns) + len(halves), columns.bytes, int(columns.arrival.min(initial=oldest))

    def _admit(self, texts: Sequence[T], now_ns: int) -> None:
        if not self._admissions:
            return
        admission = self._admissions[texts[0].backbone]
        if admission.must_count:
            admission.count(self._start_at(now_ns) + self._answering_ns, bool(self._running))
        try:
            admission.check(texts, self.shares.items > 0 or self._predicts(now_ns), now_ns)
        except DeadlineMissed:
            self._unserved += sum([text.tokens for text in texts])
            raise

    def choose_at(self, now_ns: int) -> int:
        """Returns the time at which the next batch should be chosen."""
        if self._commit_ns is None or not self._running:
            return now_ns
        return max(now_ns, int(self._free_at(now_ns) - self._staging_ns - self._commit_ns))

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
        # Policies compare deadlines with the end of computing, so the time after it is added to the start.
        start_ns = self._start_at(now_ns) + self._answering_ns if self.shares.items else 0
        for queue in self._in_turn():
            own = self._capacity = queue.bounded(capacity, self._batch_ns, start_ns)
            selection = queue.select(start_ns, own, not self._running)
            if self.alone and len(selection.indexes):
                selection, must_wait = selection.separated(queue.columns, self.alone)
                if must_wait and self._running:
                    return None  # nor other texts: the engine would never be free of them
            if len(selection.indexes):
                return self._take(queue, selection, now_ns)
        return None

    def _in_turn(self) -> list[Queue[T]]:
        """Returns the queues with waiting texts, the next one first (`Queue.urgency`).

        A backbone that has used the engine for clearly longer than others lets these go first. So none waits for ever, whatever
        the priorities and deadlines of the others are. Running batches count with the time that is expected of them. A backbone
        without a waiting text saves up no time, but for the batches that run when its next text comes.
        """
        waiting = [queue for queue in self._queues if len(queue.columns)]
        if len(self._queues) == 1 or not waiting:
            return waiting
        used_ns = [queue.used_ns for queue in self._queues]
        for batch in self._running:
            used_ns[batch.backbone] += batch.expected_ns
        least_ns = min(used_ns[queue.backbone] for queue in waiting)
        settled_ns = min(queue.used_ns for queue in waiting)  # running batches may take less: what they raised would stay
        for queue in self._queues:
            if not len(queue.columns):
                queue.used_ns += max(0, settled_ns - used_ns[queue.backbone])
        return sorted(waiting, key=lambda queue: (used_ns[queue.backbone] > least_ns + LEAD_NS, *queue.urgency()))

    def _take(self, queue: Queue[T], selection: Selection, now_ns: int) -> Batch[T]:
        """Takes the chosen texts out of the line."""
        is_crowd = self._waits_a_crowd()
        self._recount()
        batch = queue.batch(queue.serve(selection.indexes), now_ns, not self._running, selection.places)
        self._running.append(batch)
        held = batch.tokens, len(batch.texts), batch.slot_keys * queue.loaded
        left_some = len(queue.columns) > 0
        full = held if left_some or self._unserved else None
        is_crowd = is_crowd and (self.shares.items > 0 or self._unserved > 0)
        self._unserved = 0
        self.governor.chosen(full, [own.columns for own in self._queues], is_crowd, queue.backbone, now_ns)
        if self._admissions and left_some:
            self._admissions[queue.backbone].chosen(*held)
        return batch

    def _remove(self, queue: Queue[T], indexes: Array) -> list[T]:
        self._recount()
        return super()._remove(queue, indexes)

    def _waits_a_crowd(self) -> bool:
        """Whether more waits than a batch holds, with what was not served in time since the last choice."""
        columns = [queue.columns for queue in self._queues]
        return (
            sum([own.all_tokens for own in columns]) + self._unserved > self._capacity.tokens
            or self.shares.items > self._capacity.texts
            or sum([own.slot_keys for own in columns]) > self._capacity.tenants
        )

    def started(self, batch: Batch[T], now_ns: int) -> None:
        """Records that the engine has started the batch."""
        batch.started_ns = now_ns
        if batch.alone:  # a stalled batch counts for at most twice the mean, or for its own computing time
            staged = min(now_ns - batch.chosen_ns, max(2 * self._staging_ns, batch.expected_ns))
            self._staging_ns += LEARNING * (staged - self._staging_ns)

    def answered(self, batch: Batch[T], texts: Sequence[T], now_ns: int) -> None:
        """Records that texts of a running batch are answered, those that were not yet."""
        if self._admissions:
            by_ns, new = now_ns + self._answering_ns, [text for text in texts if text.deadline_ns and text not in batch.judged]
            late = sum([text.deadline_ns < by_ns for text in new])
            self._admissions[batch.backbone].done(len(new) - late, late)
            batch.judged.update(new)

    def finished(self, batch: Batch[T], now_ns: int, adapters: int = 0, stages_ns: Sequence[int] = ()) -> None:
        """Records that the engine has finished the batch, for which `adapters` adapters had to be loaded.

        `stages_ns`: if there are several, how long each of those has computed it that had something to compute.
        """
        assert batch.started_ns is not None  # `started` was called before
        self._running.remove(batch)
        self._ended_ns = now_ns
        self._queues[batch.backbone].learn(batch, adapters, sum(stages_ns) or now_ns - batch.started_ns, stages_ns)
        self.answered(batch, batch.texts, now_ns)
        self._recount()

    def dropped(self, batch: Batch[T], now_ns: int) -> None:
        """Forgets a batch that failed or will not run, without learning from it. It has used the engine since its start."""
        if batch in self._running:
            self._running.remove(batch)
            if batch.started_ns is not None:
                self._queues[batch.backbone].used_ns += now_ns - batch.started_ns
        self._recount()

    def halve(self, batch: Batch[T], unanswered: Sequence[T], now_ns: int) -> bool:
        """Replaces a batch for which the device had no memory by smaller ones, with its `unanswered` texts.

        Returns False if that was done before, or cannot be.
        """
        if batch.is_half or not unanswered or len(batch.texts) < 2:
            return False
        middle, queue = len(unanswered) // 2, self._queues[batch.backbone]
        for texts in filter(None, (list(unanswered[:middle]), list(unanswered[middle:]))):
            self._halves.append(queue.batch(texts, now_ns, is_half=True))
        self.dropped(batch, now_ns)
        return True

    def expired(self, now_ns: int) -> list[T]:
        """Removes and returns the texts that can no longer be answered in time, and the other texts of their requests."""
        expired: list[T] = []
        if self.shares.items:
            predicts = self._predicts(now_ns)
            for queue, late in self._late(self._start_at(now_ns) if predicts else now_ns, predicts):
                expired += late
                self._unserved += sum(text.tokens for text in late)
                if self._admissions:
                    self._admissions[queue.backbone].done(0, len(late))
        return expired

    def next_expiry(self, now_ns: int) -> int:
        """Returns when the next text expires if nothing changes until then, or NEVER if no text has a deadline."""
        predicts = self._predicts(now_ns)
        earliest = min([queue.earliest(predicts) for queue in self._queues])
        return now_ns if predicts and earliest <= self._start_at(now_ns) else earliest

    def abandon(self) -> list[T]:
        """Returns all texts without an answer, also those of running batches. Running batches are not stopped."""
        chosen = [text for batch in (*self._running, *self._halves) for text in batch.texts]
        self._halves.clear()
        return chosen + super().abandon()

    def _predicts(self, now_ns: int) -> bool:
        """Whether a text may be dropped before its deadline has passed."""
        return bool(self._admissions) and (bool(self._running) or now_ns - self._ended_ns < STALE_NS)

    def _recount(self) -> None:
        for admission in self._admissions:
            admission.must_count = True

    def _free_at(self, now_ns: int) -> float:
        """Returns when the next batch finds the stages of the engine free, each when it gets there.

        A batch ends after the time through all stages, and after the batch before it by the time of the slowest stage at least.
        The next batch counts as if it were as large as the last one of those that run.
        """
        free, ends = float(now_ns), float(self._ended_ns)
        for batch in self._running:
            started = free if batch.started_ns is None else batch.started_ns
            between = batch.expected_ns * self._queues[batch.backbone].cost.slowest
            ends = max(now_ns, started + batch.expected_ns, ends + between)
            free = max(now_ns, ends + between - batch.expected_ns)
        oldest = self._running[0] if len(self._running) >= self._capacity.in_flight else None
        if oldest is not None and oldest.started_ns is not None:
            free = max(free, oldest.started_ns + oldest.expected_ns)
        return free

    def _start_at(self, now_ns: int) -> int:
        """Returns when a batch that is chosen now will start to compute."""
        return int(max(self._free_at(now_ns) if self._running else now_ns, now_ns + self._staging_ns))
