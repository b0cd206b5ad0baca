"""TCB's scheduling (section 5): DAS, Algorithm 1."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from math import ceil

import numpy as np

from hplm.arrays import Array
from hplm.errors import InvalidInput
from hplm.scheduling.columns import Columns
from hplm.scheduling.cost import Cost
from hplm.scheduling.filling import Room, by_priority, first_come, shortest_first
from hplm.scheduling.policy import between_0_and_1, whole
from hplm.scheduling.selection import OUTSIDE, Capacity, Places, Selection

log = logging.getLogger(__name__)
ROW_TOKENS = 512  # a row has no more unless the options or the texts need it: the limit of rows in the packing `concat`
USUAL = 0.99  # of the waiting texts fit in a row
NONE = np.empty(0, np.int64)


@dataclass(frozen=True)
class FilledRow:
    texts: Array
    dominant: Array  # the texts that were chosen for their utility; all, if all that are left fit


@dataclass(frozen=True)
class Filled:
    """The rows of a batch, and the texts outside of them, which are longer than a row."""

    rows: list[FilledRow]
    outside: Array
    free: int  # rows whose tokens the texts outside have not taken
    row_tokens: int  # L

    @property
    def inside(self) -> Array:
        return np.concatenate([NONE, *(row.texts for row in self.rows)])


@dataclass
class DeadlineAware:
    """Fills a row with the shortest texts (`eta` of those that fit), then urgent ones, then the rest.

    Urgent texts are taken by deadline, if they have at least `q` of the shortest texts' mean utility. The paper
    requires eta + q = 1, for a competitive ratio of eta q / (eta q + 1).

    In the paper no text is longer than a row. Here such a text takes the tokens of as many rows as it needs. It is chosen when
    rows are left, or when the batch would hold only texts that came after it.
    """

    eta: float = 0.5
    q: float = 0.5
    rows: int = 0  # B; 0: as many as fit in a batch. Fewer where the batch is too small
    row_tokens: int = 0  # L; 0: a batch's tokens, shared by `rows`, or by as few rows as have at most ROW_TOKENS
    _fewest: int = field(default=0, init=False, repr=False, compare=False)  # rows of a batch, below `rows`

    def __post_init__(self) -> None:
        between_0_and_1(eta=self.eta, q=self.q)
        if self.eta + self.q > 1:
            raise InvalidInput(f"policy options eta={self.eta:g} and q={self.q:g} are more than 1 together: lower one of them")
        whole(rows=self.rows, row_tokens=self.row_tokens)

    def select(self, columns: Columns, start_ns: int, capacity: Capacity, cost: Cost) -> Selection:
        filled = self.fill(columns, capacity)
        rows = np.repeat([OUTSIDE, *range(len(filled.rows))], [len(filled.outside), *(len(row.texts) for row in filled.rows)])
        return Selection(np.concatenate([filled.outside, filled.inside]), Places(rows))

    def shape(self, capacity: Capacity, usual: int) -> tuple[int, int]:
        """Returns the number of rows, B, and the tokens of each, L. `usual`: the length of the longest usual text.

        The server bounds a batch by its time. On a slow machine it may not hold B rows for such texts. Then B falls, not L,
        because DAS fills rows only with texts that fit in one.
        """
        fitting = max(1, capacity.tokens // min(self.row_tokens or usual, capacity.tokens))
        rows = min(self.rows or (fitting if self.row_tokens else -(-capacity.tokens // ROW_TOKENS)), fitting)
        row_tokens = min(self.row_tokens or capacity.tokens, capacity.tokens // rows)
        if rows < (self._fewest or self.rows):
            self._fewest = rows
            log.warning(
                "a batch of %d tokens has %d rows of %d tokens, not %d: lower the policy's option `rows`%s, or allow larger "
                "batches (`batch_tokens`, `batch_ms`)",
                capacity.tokens, rows, row_tokens, self.rows, " or `row_tokens`" if self.row_tokens else "",
            )  # fmt: skip
        return rows, row_tokens

    def fill(self, columns: Columns, capacity: Capacity) -> Filled:
        by_length = shortest_first(columns)
        free, row_tokens = self.shape(capacity, int(columns.tokens[by_length[ceil(USUAL * (len(columns) - 1))]]))
        by_utility = by_priority(columns, by_length)
        by_deadline = by_priority(columns, np.argsort(columns.deadline, kind="stable"))
        room, outside = Room(columns, capacity), NONE
        rows = self._fill_rows(columns, room, free, row_tokens, by_utility, by_deadline)
        fits = columns.tokens <= row_tokens
        if not fits.all():
            needed = -(-columns.tokens // row_tokens)  # rows whose tokens a text takes
            came = first_come(columns)
            first = came[~fits[came]][:1]
            if _came_before(columns, first, room.taken):
                room = Room(columns, capacity)
                outside = room.prefix(first)
                free = max(0, free - int(needed[first[0]]))
                rows = self._fill_rows(columns, room, free, row_tokens, by_utility, by_deadline)
            fits[outside] = True
            long = by_utility[~fits[by_utility]]
            more = room.prefix(long[: np.searchsorted(np.cumsum(needed[long]), free - len(rows), side="right")])
            outside, free = np.concatenate([outside, more]), free - int(needed[more].sum())
        return Filled(rows, outside, free, row_tokens)

    def _fill_rows(
        self, columns: Columns, room: Room, rows: int, row_tokens: int, by_utility: Array, by_deadline: Array
    ) -> list[FilledRow]:
        """Fills rows with texts that are not longer than a row."""
        tokens, utility = columns.tokens, 1 / columns.tokens
        waiting = tokens <= row_tokens
        best = by_utility[waiting[by_utility]]
        # The best texts of a row are among the first of these, because the rows before it took no more tokens than they have.
        best = best[: int(np.searchsorted(np.cumsum(tokens[best]), (rows + 1) * row_tokens, side="right")) + 1]
        filled: list[FilledRow] = []
        while len(filled) < rows and not room.full:
            best = best[waiting[best]]
            if not len(best):
                break
            sums = np.cumsum(tokens[best])
            if sums[-1] <= row_tokens:
                texts = room.greedily(best, row_tokens)
                row = FilledRow(texts, texts)
            else:
                saturating = int(np.searchsorted(sums, row_tokens, side="right"))
                wanted = best[: max(1, int(self.eta * saturating))]
                dominant = room.prefix(wanted, row_tokens)  # fewer only if the device has no slots for them
                left = row_tokens - int(tokens[dominant].sum())
                least = self.q * utility[wanted].mean()
                waiting[dominant] = False
                urgent = room.greedily(by_deadline, left, waiting & (utility >= least))
                left -= int(tokens[urgent].sum())
                rest = NONE
                if left * least >= 1:  # otherwise all texts with less utility are longer than that
                    rest = room.greedily(by_utility, left, waiting & (utility < least))
                row = FilledRow(np.concatenate([dominant, urgent, rest]), dominant)
            if not len(row.texts):
                break
            waiting[row.texts] = False
            filled.append(row)
        return filled


def _came_before(columns: Columns, text: Array, others: Array) -> bool:
    """Whether a text came before all others, none of which is of its tenant and has a higher priority."""
    own, priority = columns.tenant[others] == columns.tenant[text], columns.priority
    later = np.where(own & (priority[others] != priority[text]), priority[others] < priority[text], others > text)
    return bool(later.all())
