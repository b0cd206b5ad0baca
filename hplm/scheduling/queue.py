"""The queue of every engine: it offers, evicts, expires and abandons texts. Only the choice of the next ones differs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Generic

import numpy as np

from hplm.arrays import Array
from hplm.errors import Draining
from hplm.scheduling.columns import NEVER, Columns
from hplm.scheduling.cost import FIRST, CostModel
from hplm.scheduling.filling import full_batch_ns
from hplm.scheduling.limits import Limits, Shares, T
from hplm.scheduling.policy import FirstComeFirstServed, Policy
from hplm.scheduling.selection import Batch, Capacity, Places, Selection

log = logging.getLogger(__name__)
LEARNING = 0.1  # rate of running means
LEAST_TOKENS = 128  # of a batch that is bounded, so that one wrong prediction cannot make batches tiny
MOST_TIMES = 4  # what a bounded batch may have behind a long line, over what it may always have


class Queue(Generic[T]):
    """The waiting texts, the policy that chooses among them, and what is known of its batches. It has no threads and no clock.

    `predicts`: whether a text expires as soon as it can no longer be in time. If not, it expires at its deadline.
    """

    def __init__(self, policy: Policy, limits: Limits, answering_ns: int = 0) -> None:
        self.shares = Shares(limits)
        self.columns: Columns[T] = Columns(shares=self.shares)
        self.cost = CostModel()
        self.draining = False
        self.loaded = 0.0  # mean number of adapters copied to the device for each slot key of a batch
        self._policy = policy
        self._answering_ns = answering_ns
        self._earliest: int | None = NEVER  # when the first text must start. None: not known any more
        self._predicted = False  # whether that is by prediction

    def __len__(self) -> int:
        return len(self.columns)

    @property
    def known(self) -> bool:
        """Whether enough batches were seen for predictions."""
        return self.cost.observed >= FIRST

    def offer(self, texts: Sequence[T], now_ns: int) -> list[T]:
        """Adds all texts of one request, or raises and adds none.

        Returns texts of other tenants that lost their places to them, all of a request: the caller answers these.
        """
        if self.draining:
            raise Draining("the server is shutting down: send the request to another replica, or retry later")
        leaving = self.shares.room_for(texts, self.columns.newest)
        self._admit(texts, now_ns)
        self.add(texts)  # behind all others: their indexes stay
        return self.remove(np.concatenate(leaving)) if leaving else []

    def close(self) -> None:
        """Refuses new requests. Waiting texts are still served."""
        self.draining = True

    def abandon(self) -> list[T]:
        """Removes and returns all waiting texts."""
        return self.remove(np.arange(len(self.columns)))

    def add(self, texts: Sequence[T]) -> None:
        """Adds the texts of one request, which have one deadline. The longest must start first."""
        self.columns.add(texts)
        deadline_ns = texts[0].deadline_ns
        if self._earliest is not None and deadline_ns:
            longest = max([text.tokens for text in texts])
            needed = int(self._needed_ns(longest)) if self._predicted and self.known else 0
            self._earliest = min(self._earliest, deadline_ns - needed)

    def remove(self, indexes: Array) -> list[T]:
        """Removes texts that are not served."""
        texts = self.columns.remove(indexes)
        self._forget_earliest()
        return texts

    def serve(self, indexes: Array) -> list[T]:
        """Removes texts that are served: they count in the fair shares of their tenants."""
        texts = self.columns.serve(indexes)
        self._forget_earliest()
        return texts

    def earliest(self, predicts: bool) -> int:
        """Returns when the first waiting text must start, or NEVER.

        Every request asks for it. So it is computed again only after texts have left, or the prediction has changed.
        """
        if self._predicted != predicts:
            self._predicted = predicts
            self._forget_earliest()
        if self._earliest is None:
            self._earliest = int(self._last_starts(predicts).min())
        return self._earliest

    def late(self, start_ns: int, predicts: bool) -> list[T]:
        """Removes and returns the texts that had to start by this time, and the others of their requests."""
        if self.earliest(predicts) > start_ns:
            return []
        return self.remove(self.columns.whole_requests(np.flatnonzero(self._last_starts(predicts) <= start_ns)))

    def bounded(self, capacity: Capacity, batch_ns: int, start_ns: int) -> Capacity:
        """Returns the capacity of a batch that takes no longer than it may. What comes next waits for all of a batch.

        Where more waits than it may have, short batches would make all of it wait longer. So it may have as much as waits, but
        no text that waits misses its deadline by it. The tenant with the most tokens does not count: a flood lengthens nobody's
        wait.
        """
        if not batch_ns or not self.known:
            return capacity
        columns, cost = self.columns, self.cost
        mean = columns.all_tokens / len(columns)
        tokens = max(LEAST_TOKENS, cost.tokens_within(batch_ns, mean, self.loaded))
        if columns.all_tokens > tokens:
            line = columns.all_tokens - int(columns.demand.max())
            in_time = cost.tokens_within(int(columns.deadline.min()) - start_ns - cost.predict(0, 0), mean, self.loaded)
            tokens = max(tokens, min(tokens * MOST_TIMES, line, in_time))
        return capacity if tokens >= capacity.tokens else replace(capacity, tokens=tokens)

    def select(self, start_ns: int, capacity: Capacity, is_idle: bool, among: Array | None = None) -> Selection:
        """Lets the policy choose. `is_idle`: nothing runs, so it must choose something if a text has no deadline.

        `among`: the indexes of the texts that it may choose; None: all.
        """
        cost, columns = self.cost, self.columns if among is None else self.columns.only(among)
        if cost.slowest < 1:
            # Policies count as if each batch began after the other stages, and only took the time of the slowest one.
            start_ns += int((1 - cost.slowest) * full_batch_ns(columns, capacity, cost))
        try:
            selection = Selection.of(self._policy.select(columns, start_ns, capacity, cost.by_batch()))
            selection.check(len(columns), is_idle and not len(selection.indexes) and NEVER in columns.deadline)
        except Exception:  # a policy may be anybody's code; waiting texts must be answered even if it fails
            log.exception("the policy failed: this batch is taken in order of arrival")
            selection = Selection(FirstComeFirstServed().select(columns, start_ns, capacity, cost))
        return selection if among is None else Selection(among[selection.indexes], selection.places)

    def batch(
        self, texts: list[T], now_ns: int, alone: bool = False, places: Places | None = None, is_half: bool = False
    ) -> Batch[T]:
        tokens, slot_keys = sum([text.tokens for text in texts]), len({text.slot_key for text in texts})
        expected = self.cost.predict(tokens, len(texts), slot_keys * self.loaded)
        return Batch(texts, tokens, slot_keys, now_ns, expected, alone, places, is_half)

    def learn(self, batch: Batch[T], adapters: int, took_ns: int, stages_ns: Sequence[int]) -> None:
        """Learns from a batch that has run, for which `adapters` adapters had to be loaded."""
        self.loaded += LEARNING * (adapters / batch.slot_keys - self.loaded)
        self.cost.observe(batch.tokens, len(batch.texts), adapters, took_ns, stages_ns)
        self._forget_earliest()

    def _admit(self, texts: Sequence[T], now_ns: int) -> None:
        """Raises if the texts of a request cannot be in time."""

    def _forget_earliest(self) -> None:
        self._earliest = None if len(self.columns) else NEVER

    def _last_starts(self, predicts: bool) -> Array:
        """Returns for each waiting text when it must start, in a batch of its own."""
        deadline = self.columns.deadline
        if not (predicts and self.known):
            return deadline
        needed_ns = np.asarray(self._needed_ns(self.columns.tokens)).astype(np.int64)
        return np.where(deadline == NEVER, NEVER, deadline - needed_ns)

    def _needed_ns(self, tokens: Array | int) -> Array | float:
        """Returns the time from the start of a batch of one text until its client has the answer."""
        return self._answering_ns + self.cost.predict(tokens, 1, self.loaded)
