"""TCB's scheduling (section 5): DAS, Algorithm 1, and Slotted-DAS, Algorithm 2."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hplm.arrays import Array
from hplm.scheduling.columns import Columns
from hplm.scheduling.cost import Cost
from hplm.scheduling.filling import Room, by_priority, shortest_first
from hplm.scheduling.policy import positive
from hplm.scheduling.waiting import Capacity


@dataclass(frozen=True)
class Row:
    texts: Array
    dominant: Array  # the texts of the row that were chosen for their utility


@dataclass
class DeadlineAware:
    """Fills a row with the shortest texts (`eta` of those that fit), then urgent ones, then the rest.

    Urgent texts are taken by deadline, if they have at least `q` of the shortest texts' mean utility. The paper
    requires eta + q = 1, for a competitive ratio of eta q / (eta q + 1).
    """

    eta: float = 0.5
    q: float = 0.5
    rows: int = 0  # B; 0: as many as fit in a batch
    row_tokens: int = 0  # L; 0: a batch's tokens, shared by the rows

    def __post_init__(self) -> None:
        positive(eta=self.eta, q=self.q, rows=self.rows or 1, row_tokens=self.row_tokens or 1)

    def select(self, columns: Columns, start_ns: int, capacity: Capacity, cost: Cost) -> Array:
        return np.concatenate([row.texts for row in self.fill(columns, capacity)])

    def fill(self, columns: Columns, capacity: Capacity) -> list[Row]:
        rows, row_tokens = self.shape(columns, capacity)
        room = Room(columns, capacity)
        by_utility = by_priority(columns, shortest_first(columns))
        by_deadline = by_priority(columns, np.argsort(columns.deadline, kind="stable"))
        filled: list[Row] = []
        while len(by_utility) and len(filled) < rows and not room.full:
            row = self._fill_row(columns, room, row_tokens, by_utility, by_deadline)
            if not len(row.texts):
                break
            filled.append(row)
            left = np.ones(len(columns), bool)
            left[row.texts] = False
            by_utility, by_deadline = by_utility[left[by_utility]], by_deadline[left[by_deadline]]
        return filled

    def shape(self, columns: Columns, capacity: Capacity) -> tuple[int, int]:
        """Returns the number of rows and the tokens of each.

        A row is as long as the options say, but at least as long as the longest waiting text that fits in a batch.
        """
        row_tokens = self.row_tokens or capacity.tokens // (self.rows or 1)
        fitting = columns.tokens[columns.tokens <= capacity.tokens]
        row_tokens = max(row_tokens, int(fitting.max(initial=1)))
        return max(1, min(self.rows or capacity.tokens, capacity.tokens // row_tokens)), row_tokens

    def _fill_row(self, columns: Columns, room: Room, row_tokens: int, by_utility: Array, by_deadline: Array) -> Row:
        tokens, before = columns.tokens, len(room.taken)
        sums = np.cumsum(tokens[by_utility])
        if sums[-1] <= row_tokens:
            room.greedily(by_utility, row_tokens)
            return Row(room.taken[before:], by_utility)
        saturating = int(np.searchsorted(sums, row_tokens, side="right"))
        if not saturating:  # even the shortest text is longer than a row: it runs alone, or it would wait for ever
            room.prefix(by_utility[:1])
            return Row(room.taken[before:], by_utility[:1])
        dominant = room.prefix(by_utility[: max(1, int(self.eta * saturating))], row_tokens)
        left = row_tokens - int(tokens[dominant].sum())
        rest = np.ones(len(columns), bool)
        rest[dominant] = False
        aware = rest & (1 / tokens >= self.q * (1 / tokens[dominant]).mean())
        left -= self._put(room, by_deadline[aware[by_deadline]], left)
        self._put(room, by_utility[(rest & ~aware)[by_utility]], left)
        return Row(room.taken[before:], dominant)

    @staticmethod
    def _put(room: Room, ordered: Array, left: int) -> int:
        before = room.tokens
        room.greedily(ordered, left)
        return before - room.tokens


@dataclass
class SlottedDeadlineAware(DeadlineAware):
    """DAS, then slots as long as the longest text that was chosen for its utility. Longer texts wait."""

    def select(self, columns: Columns, start_ns: int, capacity: Capacity, cost: Cost) -> Array:
        rows = self.fill(columns, capacity)
        _, row_tokens = self.shape(columns, capacity)
        tokens = columns.tokens
        slot = max(int(tokens[row.dominant].max(initial=0)) for row in rows)
        return np.concatenate([_into_slots(row.texts, tokens[row.texts], slot, row_tokens // slot) for row in rows])


def _into_slots(texts: Array, tokens: Array, slot: int, slots: int) -> Array:
    """Puts each text into the first slot with enough room, as the paper does. Returns the texts that fit."""
    left = [slot] * max(1, slots)
    inside: list[int] = []
    for text, length in zip(texts.tolist(), tokens.tolist(), strict=True):
        for i, room in enumerate(left):
            if length <= room:
                left[i] -= length
                inside.append(text)
                break
    return np.array(inside, dtype=np.int64)
