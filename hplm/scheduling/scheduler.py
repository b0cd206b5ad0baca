"""Waiting texts, running batches and the choice of the next batch. It has no threads and no clock of its own.

The server drives it through `Encoder`, the simulator on a virtual clock.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Generic

import numpy as np

from hplm.arrays import Array
from hplm.errors import DeadlineMissed, Draining
from hplm.scheduling.admission import Admission
from hplm.scheduling.backbones import Backbones
from hplm.scheduling.batch import Batch
from hplm.scheduling.columns import NEVER, Columns
from hplm.scheduling.cost import FIRST, CostModel
from hplm.scheduling.expiry import Expiry
from hplm.scheduling.filling import fits
from hplm.scheduling.governor import Governor
from hplm.scheduling.limits import Limits
from hplm.scheduling.orders import FirstComeFirstServed
from hplm.scheduling.policy import Policy
from hplm.scheduling.selection import Places, Selection
from hplm.scheduling.stages import Ended, beside_ns, next_start
from hplm.scheduling.waiting import Capacity, T

log = logging.getLogger(__name__)
LEAST_TOKENS = 128  # of a batch that is bounded, so that one wrong prediction cannot make batches tiny
LEARNING = 0.1  # rate of the running mean of staging


class Scheduler(Generic[T]):
    def __init__(
        self,
        policy: Policy,
        limits: Limits,
        admission: bool = False,
        commit_ns: int | None = None,
        batch_ns: int = 0,
        answering_ns: int = 0,
        others: Sequence[Policy] = (),
    ) -> None:
        """`commit_ns`: how long before the engine is free the next batch is chosen. None: at once.
        `batch_ns`: how long the tokens of a batch may take by prediction, if they are more than LEAST_TOKENS; 0: no bound.

        `answering_ns`: the time from the end of computing until the client has the answer.
        `admission`: refuse requests that cannot be answered in time, and drop waiting ones that no longer can.
        `others`: the policies of further backbones that share the line. A policy may keep a state, so each has its own.
        """
        self.limits = limits
        self.columns: Columns[T] = Columns()
        self.alone: frozenset[int] = frozenset()  # tenants: while a text of one is in a batch, no other's is in any batch
        self._policies = [policy, *others]
        self._backbones = Backbones(len(self._policies))
        self.governor = Governor(self.costs)
        self._admission = Admission(self.costs) if admission else None
        self._commit_ns = commit_ns
        self._batch_ns = batch_ns
        self._answering_ns = answering_ns
        self._running: deque[Batch[T]] = deque()  # chosen and not finished, in order
        self._gone: list[T] = []  # expired texts that still have to be answered
        self._halves: deque[Batch[T]] = deque()  # to be run next
        self._staging_ns = 0.0  # from choice to start, with an idle engine
        self._capacity = Capacity(0, 0, 0)  # of the batch that was chosen last
        self._unserved = 0  # tokens that were refused for their deadline, or expired, since the last choice
        self._expiry = Expiry(self.columns, self._backbones, answering_ns)
        self._ended = Ended()
        self._draining = False

    def __len__(self) -> int:
        return len(self.columns) + len(self._gone) + sum(len(half.texts) for half in self._halves)

    @property
    def costs(self) -> Sequence[CostModel]:
        """The cost model of each backbone."""
        return self._backbones.costs

    def waiting(self, backbone: int) -> tuple[int, int]:
        """Returns how many texts of a backbone wait, and the memory that they keep."""
        own = self.columns.backbones == backbone
        aside = [*self._gone, *(text for half in self._halves for text in half.texts)]
        texts = int(self.columns.counts[own].sum()) + sum(text.backbone == backbone for text in aside)
        return texts, int(self.columns.sizes[own].sum())

    @property
    def draining(self) -> bool:
        return self._draining

    def offer(self, texts: Sequence[T], now_ns: int) -> list[T]:
        """Adds all texts of one request, or raises and adds none.

        Returns texts of other tenants that lost their places to them, all of a request: the caller answers these.
        """
        if self._draining:
            raise Draining("the server is shutting down: send the request to another replica, or retry later")
        leaving = self.limits.displaced(texts, self.columns)
        if self._admission:
            try:
                self._admission.check(texts, self.columns, bool(self._running), now_ns)
            except DeadlineMissed:
                self._unserved += sum(text.tokens for text in texts)
                raise
        displaced = self._remove(leaving) if len(leaving) else []
        self.columns.add(texts)
        if displaced:
            self._recount(now_ns)
        self._expiry.joined(texts)
        return displaced

    def rung(self, tenant: Hashable, tokens: int, costs: Sequence[float], now_ns: int) -> int:
        """Returns the rung of a request that has arrived (`Governor.rung_for`)."""
        return self.governor.rung_for(tenant, tokens, costs, now_ns)

    def close(self) -> None:
        """Refuses new requests. Waiting texts are still served."""
        self._draining = True

    def choose_at(self, now_ns: int) -> int:
        """Returns the time at which the next batch should be chosen."""
        if self._commit_ns is None or not self._running:
            return now_ns
        return max(now_ns, int(self._free_at(now_ns) - self._staging_ns - self._commit_ns))

    def choose(self, capacity: Capacity, now_ns: int) -> Batch[T] | None:
        """Returns the next batch, or None if nothing should run now."""
        if len(self._running) >= capacity.in_flight or any(batch.texts[0].tenant in self.alone for batch in self._running):
            return None
        if self._halves:
            half = self._halves.popleft()
            self._running.append(half)
            return half
        self._put_aside(now_ns)
        if not len(self.columns):
            return None
        # Policies compare deadlines with the end of computing, so the time after it is added to the start.
        start_ns = self._start_at(now_ns) + self._answering_ns
        for backbone, columns, indexes in self._backbones.in_turn(self.columns, self._running):
            own = self._capacity = self._bounded(capacity, backbone, columns)
            crowd = self._waits_a_crowd()
            selection = self._select(backbone, columns, start_ns, own)
            if self.alone and len(selection.indexes):
                selection, must_wait = selection.separated(columns, self.alone)
                if must_wait and self._running:
                    return None  # nor other texts: the engine would never be free of them
            if len(selection.indexes):
                chosen = selection.indexes if indexes is None else indexes[selection.indexes]
                left = len(columns) - len(chosen)
                return self._take(backbone, chosen, selection.places, crowd, left, now_ns)
        return None

    def _select(self, backbone: int, columns: Columns, start_ns: int, capacity: Capacity) -> Selection:
        """Lets the policy choose among the texts of one backbone."""
        cost = self._backbones[backbone].cost
        start_ns += beside_ns(cost, columns, capacity)
        try:
            selection = Selection.of(self._policies[backbone].select(columns, start_ns, capacity, cost.by_batch()))
            selection.check(len(columns), not self._running and bool((columns.deadline == NEVER).any()))
        except Exception:  # a policy may be anybody's code; waiting texts must be answered even if it fails
            log.exception("the policy failed: this batch is taken in order of arrival")
            selection = Selection(FirstComeFirstServed().select(columns, start_ns, capacity, cost))
        return selection

    def _take(
        self, backbone: int, indexes: Array, places: Places | None, waits_a_crowd: bool, left: int, now_ns: int
    ) -> Batch[T]:
        """Takes the chosen texts out of the line. `left`: how many others of their backbone stay in it."""
        learned = self._backbones[backbone]
        tokens = int(self.columns.tokens[indexes].sum())
        slot_keys = len(set(self.columns.slot_key[indexes].tolist()))
        adapters = slot_keys * learned.loaded
        expected = learned.expected_ns(tokens, len(indexes), slot_keys)
        alone = not self._running
        promised = self.columns.deadline[indexes]
        texts = self._remove(indexes)
        batch = Batch(texts, tokens, slot_keys, now_ns, expected, alone, promised, places, backbone=backbone)
        self._running.append(batch)
        crowded = waits_a_crowd and (len(self.columns) > 0 or self._unserved > 0)
        full = (tokens, len(texts), adapters) if left or self._unserved else None
        self._unserved = 0
        self.governor.chosen(full, self.columns, crowded, backbone, now_ns)
        if self._admission:
            self._admission.chosen(backbone, tokens, len(texts), adapters, is_full=left > 0)
            self._recount(now_ns)
        return batch

    def _bounded(self, capacity: Capacity, backbone: int, columns: Columns) -> Capacity:
        """Returns the capacity of a batch that takes no longer than it may. What comes next waits for all of a batch."""
        learned = self._backbones[backbone]
        if not self._batch_ns or learned.cost.observed < FIRST:
            return capacity
        mean = int(columns.demand.sum()) / len(columns)
        tokens = learned.cost.tokens_within(self._batch_ns, mean, learned.loaded)
        return replace(capacity, tokens=min(capacity.tokens, max(tokens, LEAST_TOKENS)))

    def _waits_a_crowd(self) -> bool:
        """Whether more waits than a batch holds, with what was not served in time since the last choice."""
        wanted = int(self.columns.demand.sum()) + self._unserved
        return wanted > self._capacity.tokens or not fits(self.columns, self._capacity)

    def started(self, batch: Batch[T], now_ns: int) -> None:
        """Records that the engine has started the batch."""
        batch.started_ns = now_ns
        if batch.alone:  # a stalled batch counts for at most twice the mean, or for its own computing time
            staged = min(now_ns - batch.chosen_ns, max(2 * self._staging_ns, batch.expected_ns))
            self._staging_ns += LEARNING * (staged - self._staging_ns)

    def released(self, batch: Batch[T], now_ns: int) -> None:
        """Records that the batch has left the first of several stages, which can start the next one."""
        batch.released_ns = now_ns
        self._recount(now_ns)

    def left(self, batch: Batch[T], texts: Sequence[T], now_ns: int) -> None:
        """Records that texts of a running batch are answered before its end."""
        if self._admission:
            batch.judge(texts, now_ns + self._answering_ns)

    def finished(self, batch: Batch[T], now_ns: int, adapters: int = 0, stages_ns: Sequence[int] = ()) -> None:
        """Records that the engine has finished the batch, for which `adapters` adapters had to be loaded.

        `stages_ns`: if there are several, how long each of those has computed it that had something to compute.
        """
        assert batch.started_ns is not None  # `started` was called before
        self._running.remove(batch)
        self._ended = Ended(now_ns, batch.expected_ns, batch.backbone)
        self._backbones[batch.backbone].finished(batch, adapters, sum(stages_ns) or now_ns - batch.started_ns, stages_ns)
        self._expiry.forget()
        if self._admission:
            batch.judge(batch.texts, now_ns + self._answering_ns)
            self._admission.ran(now_ns)
            self._admission.done(batch.on_time, batch.late)
            self._recount(now_ns)

    def dropped(self, batch: Batch[T], now_ns: int) -> None:
        """Forgets a batch that failed or will not run, without learning from it. It has used the engine since its start."""
        if batch in self._running:
            self._running.remove(batch)
            if batch.started_ns is not None:
                self._backbones[batch.backbone].used_ns += now_ns - batch.started_ns
        self._recount(now_ns)

    def halve(self, batch: Batch[T], left: Sequence[T], now_ns: int) -> bool:
        """Replaces a batch for which the device had no memory by smaller ones, with those of its texts that are `left`.

        Returns False if that was done before, or cannot be.
        """
        if batch.is_half or not left or len(batch.texts) < 2:
            return False
        promised_to = {id(text): deadline for text, deadline in zip(batch.texts, batch.promised.tolist(), strict=True)}
        learned = self._backbones[batch.backbone]
        middle = len(left) // 2
        for texts in filter(None, (list(left[:middle]), list(left[middle:]))):
            promised = np.array([promised_to[id(text)] for text in texts])
            tokens, slot_keys = sum(text.tokens for text in texts), len({text.slot_key for text in texts})
            expected = learned.expected_ns(tokens, len(texts), slot_keys)
            half = Batch(texts, tokens, slot_keys, now_ns, expected, False, promised, backbone=batch.backbone, is_half=True)
            self._halves.append(half)
        self.dropped(batch, now_ns)
        return True

    def expired(self, now_ns: int) -> list[T]:
        """Returns the texts that can no longer be answered in time, and the other texts of their requests."""
        self._put_aside(now_ns)
        gone, self._gone = self._gone, []
        return gone

    def next_expiry(self, now_ns: int) -> int:
        """Returns when the next text expires if nothing changes until then, or NEVER if no text has a deadline."""
        if self._gone:
            return now_ns
        predicts = self._predicts(now_ns)
        earliest = self._expiry.earliest(predicts)
        return now_ns if predicts and earliest <= self._start_at(now_ns) else earliest

    def abandon(self) -> list[T]:
        """Returns all texts without an answer, also those of running batches. Running batches are not stopped."""
        gone, self._gone = self._gone, []
        chosen = [text for batch in (*self._running, *self._halves) for text in batch.texts]
        self._halves.clear()
        return chosen + gone + self._remove(np.arange(len(self.columns)))

    def _put_aside(self, now_ns: int) -> None:
        predicts = self._predicts(now_ns)
        start_ns = self._start_at(now_ns) if predicts else now_ns
        if self._expiry.earliest(predicts) > start_ns:
            return
        leaving = self.columns.whole_requests(self._expiry.late(start_ns, predicts))
        self._unserved += int(self.columns.tokens[leaving].sum())
        self._gone += self._remove(leaving)
        if self._admission:
            self._admission.done(0, len(leaving))
            self._recount(now_ns)

    def _predicts(self, now_ns: int) -> bool:
        """Whether a text may be dropped before its deadline has passed."""
        return self._admission is not None and self._admission.is_believed(bool(self._running), now_ns)

    def _recount(self, now_ns: int) -> None:
        if self._admission:
            self._admission.count(self.columns, self._start_at(now_ns) + self._answering_ns, bool(self._running))

    def _free_at(self, now_ns: int) -> float:
        """Returns when the engine will have computed all chosen batches, or its stages will let the next one pass.

        Nor is it free before there may be another batch in flight.
        """
        free = next_start(self._running, self._ended, self._backbones.shares, now_ns)
        oldest = self._running[0] if len(self._running) >= self._capacity.in_flight else None
        if oldest is not None and oldest.started_ns is not None:
            free = max(free, oldest.started_ns + oldest.expected_ns)
        return free

    def _start_at(self, now_ns: int) -> int:
        """Returns when a batch that is chosen now will start to compute."""
        return int(max(self._free_at(now_ns), now_ns + self._staging_ns))

    def _remove(self, indexes: Array) -> list[T]:
        texts = self.columns.remove(indexes)
        self._expiry.forget()
        return texts
