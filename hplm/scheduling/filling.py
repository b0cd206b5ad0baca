"""Texts in an order into a batch with limited room: tokens, texts, and device slots."""

from __future__ import annotations

import numpy as np

from hplm.scheduling.columns import Columns
from hplm.scheduling.waiting import Capacity

LONGEST = 0xFFFF  # sixteen bits are sorted by counting, several times as fast as by comparing


class Room:
    """What is left of a batch while texts are put into it. A first text goes in whatever its length, or it never would."""

    def __init__(self, columns: Columns, capacity: Capacity) -> None:
        self._columns = columns
        self.tokens = capacity.tokens
        self.texts = capacity.texts
        self.tenants = capacity.tenants
        self._inside = np.zeros(columns.slot_keys, bool)  # whose slots the batch has
        self._taken: list[np.ndarray] = []

    @property
    def taken(self) -> np.ndarray:
        """In the order in which they went in."""
        return np.concatenate(self._taken) if self._taken else np.empty(0, np.int64)

    @property
    def full(self) -> bool:
        return self.tokens <= 0 or self.texts <= 0

    def prefix(self, ordered: np.ndarray, limit: int | None = None) -> np.ndarray:
        """Puts the longest prefix in that fits, of not more tokens than `limit`; returns it."""
        if self.full or not len(ordered):
            return ordered[:0]
        ordered = ordered[: self.texts]
        sums = np.cumsum(self._columns.tokens[ordered])
        count = int(np.searchsorted(sums, self.tokens if limit is None else min(limit, self.tokens), side="right"))
        if not count and not self._taken and limit is None:
            count = 1
        count = self._with_slots(ordered[:count])
        if count:
            self._take(ordered[:count], int(sums[count - 1]))
        return ordered[:count]

    def greedily(self, ordered: np.ndarray, limit: int | None = None) -> None:
        """Puts in, one after the other, whatever still fits: what does not is skipped."""
        tokens, slot_key = self._columns.tokens, self._columns.slot_key
        left = self.tokens if limit is None else min(limit, self.tokens)
        may_be_larger = not self._taken and limit is None
        while len(ordered) and not self.full:
            before = self.tokens
            went_in = self.prefix(ordered, None if may_be_larger else left)
            may_be_larger = False
            left -= before - self.tokens
            ordered = ordered[len(went_in) + 1 :]  # what stopped the prefix does not fit, and room only shrinks
            fits = tokens[ordered] <= left
            if self.tenants <= 0:
                fits &= self._inside[slot_key[ordered]]
            ordered = ordered[fits]

    def _with_slots(self, ordered: np.ndarray) -> int:
        """How many of these the slots allow."""
        new = self._columns.slot_key[ordered]
        positions = np.flatnonzero(~self._inside[new])
        _, first = np.unique(new[positions], return_index=True)
        if len(first) <= self.tenants:
            return len(ordered)
        return int(positions[np.sort(first)[self.tenants]])

    def _take(self, chosen: np.ndarray, tokens: int) -> None:
        slot_key = self._columns.slot_key[chosen]
        new = np.unique(slot_key[~self._inside[slot_key]])
        self._inside[new] = True
        self.tenants -= len(new)
        self.tokens -= tokens
        self.texts -= len(chosen)
        self._taken.append(chosen)


def first_come(columns: Columns) -> np.ndarray:
    """Everything, highest priority first, then in order of arrival at the line."""
    return by_priority(columns, np.arange(len(columns)))


def shortest_first(columns: Columns) -> np.ndarray:
    """Everything, in order of length, then of arrival at the line."""
    return np.argsort(np.minimum(columns.tokens, LONGEST).astype(np.uint16), kind="stable")


def by_priority(columns: Columns, ordered: np.ndarray) -> np.ndarray:
    """Highest priority first, otherwise in the order given."""
    priority = columns.priority
    if not priority.any():
        return ordered
    return ordered[np.argsort(-priority[ordered].astype(np.int64), kind="stable")]
