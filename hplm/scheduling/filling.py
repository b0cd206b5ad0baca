"""Fills a batch with texts in a given order, within its limits of tokens, texts and device slots. Orders of texts."""

from __future__ import annotations

import numpy as np

from hplm.arrays import Array
from hplm.scheduling.columns import Columns
from hplm.scheduling.cost import Cost
from hplm.scheduling.selection import OUTSIDE, Capacity

LONGEST = 0xFFFF  # numpy sorts 16-bit integers by counting, several times as fast as by comparing
CHUNK = 1024  # texts that are looked at together


class Room:
    """The free capacity of a batch that is being filled.

    The first text may be longer than the batch: otherwise it would wait for ever.
    """

    def __init__(self, columns: Columns, capacity: Capacity) -> None:
        self._columns = columns
        self.tokens = capacity.tokens
        self.texts = capacity.texts
        self.tenants = capacity.tenants
        self._shortest = int(columns.tokens.min())
        self._enough_slots = columns.slot_keys <= capacity.tenants  # for all waiting texts: nothing needs to be counted
        self._inside = np.zeros(columns.slot_keys, bool)  # by slot key: whether the batch has its slots
        self._taken: list[Array] = []

    @property
    def taken(self) -> Array:
        """The indexes of the texts in the batch, in the order in which they were added."""
        return np.concatenate(self._taken) if self._taken else np.empty(0, np.int64)

    @property
    def full(self) -> bool:
        return self.tokens <= 0 or self.texts <= 0

    def prefix(self, ordered: Array, limit: int | None = None) -> Array:
        """Adds the longest prefix that fits and has at most `limit` tokens. Returns it."""
        if self.full or not len(ordered):
            return ordered[:0]
        left = self.tokens if limit is None else min(limit, self.tokens)
        ordered = ordered[: max(1, min(self.texts, left))]  # no text is empty
        sums = self._columns.tokens[ordered].cumsum()
        count = int(sums.searchsorted(left, side="right"))
        if not count and not self._taken and (limit is None or sums[0] <= limit):
            count = 1
        count = self._with_slots(ordered[:count])
        if count:
            self._take(ordered[:count], int(sums[count - 1]))
        return ordered[:count]

    def greedily(self, ordered: Array, limit: int | None = None, among: Array | None = None) -> Array:
        """Adds in this order every text that still fits, and skips the others. Returns the added texts.

        `among` says for each waiting text whether it may be added.
        """
        left = self.tokens if limit is None else min(limit, self.tokens)
        may_be_larger, before = not self._taken and limit is None, len(self._taken)
        for start in range(0, len(ordered), CHUNK):  # the first chunk nearly always fills a batch
            if self.full or not (left >= self._shortest or may_be_larger):
                break
            chunk = ordered[start : start + CHUNK]
            if among is not None:
                chunk = chunk[among[chunk]]
            if not may_be_larger:
                chunk = chunk[self._fits(chunk, left)]
            while len(chunk) and not self.full:
                room = self.tokens
                went_in = self.prefix(chunk, None if may_be_larger else left)
                may_be_larger = False
                left -= room - self.tokens
                chunk = chunk[len(went_in) + 1 :]  # the text after the prefix does not fit, now or later
                chunk = chunk[self._fits(chunk, left)]
        return np.concatenate([np.empty(0, np.int64), *self._taken[before:]])

    def _fits(self, texts: Array, left: int) -> Array:
        fits = self._columns.tokens[texts] <= left
        if self.tenants <= 0 and not self._enough_slots:
            fits &= self._inside[self._columns.slot_key[texts]]
        return fits

    def _with_slots(self, ordered: Array) -> int:
        """Returns how many of these texts the device slots allow."""
        if self._enough_slots:
            return len(ordered)
        new = self._columns.slot_key[ordered]
        positions = np.flatnonzero(~self._inside[new])
        if not len(positions):
            return len(ordered)
        _, first = np.unique(new[positions], return_index=True)
        if len(first) <= self.tenants:
            return len(ordered)
        return int(positions[np.sort(first)[self.tenants]])

    def _take(self, chosen: Array, tokens: int) -> None:
        if not self._enough_slots:
            slot_key = self._columns.slot_key[chosen]
            new = np.unique(slot_key[~self._inside[slot_key]])
            self._inside[new] = True
            self.tenants -= len(new)
        self.tokens -= tokens
        self.texts -= len(chosen)
        self._taken.append(chosen)


def fits(columns: Columns, capacity: Capacity) -> bool:
    """Whether one batch holds all that waits, as it mostly does: then there is nothing to choose."""
    return len(columns) <= capacity.texts and columns.slot_keys <= capacity.tenants and columns.all_tokens <= capacity.tokens


def full_batch_ns(columns: Columns, capacity: Capacity, cost: Cost) -> float:
    """Returns how long a batch takes that is as full as the waiting texts can make it, with texts of their mean length."""
    share = min(1.0, capacity.tokens / columns.all_tokens, capacity.texts / len(columns))
    return max(1.0, float(cost.predict(columns.all_tokens * share, len(columns) * share)))


def first_come(columns: Columns) -> Array:
    """Returns all texts in the order they joined the queue (`by_priority`)."""
    return by_priority(columns, np.arange(len(columns)))


def shortest_first(columns: Columns) -> Array:
    """Returns all texts in order of length, then in the order they joined the queue."""
    return np.argsort(np.minimum(columns.tokens, LONGEST).astype(np.uint16), kind="stable")


def by_priority(columns: Columns, ordered: Array) -> Array:
    """Returns the texts with each tenant's places in the order given to its own texts, the highest priority first.

    Priorities of different tenants are not compared: clients choose them.
    """
    priority = columns.priority
    if not priority.any():
        return ordered
    tenant, found = columns.tenant[ordered], ordered.copy()
    found[np.argsort(tenant, kind="stable")] = ordered[np.lexsort((-priority[ordered].astype(np.int64), tenant))]
    return found


def first_fit(lengths: Array, size: int, boxes: int) -> Array:
    """Returns for each text the first of the boxes, such as rows or slots, that has enough room, or OUTSIDE if none has."""
    free = np.full(boxes, size)
    box = np.full(len(lengths), OUTSIDE)
    for text, length in enumerate(lengths.tolist()):
        fits = free >= length
        if fits.any():
            box[text] = fits.argmax()
            free[box[text]] -= length
    return box
