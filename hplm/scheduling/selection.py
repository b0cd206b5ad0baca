"""The capacity of a batch, the choice of a policy, with rows and slots from policies that know them, and the batch itself."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from typing import Generic

import numpy as np

from hplm.arrays import Array
from hplm.scheduling.columns import Columns
from hplm.scheduling.limits import T

OUTSIDE = -1  # the row and the slot of a text that is longer than they are


@dataclass(frozen=True)
class Capacity:
    """The most that fits in one batch."""

    tokens: int
    texts: int
    tenants: int  # device slots: the most different slot keys in a batch
    in_flight: int = 2  # batches that are chosen and not finished: one in each stage of the engine, and the next one


@dataclass(frozen=True)
class Places:
    """The row and the slot of each text of a batch. Texts with the same number share a row, or a slot.

    The packings `concat` (rows) and `slotted` (slots) arrange the batch in this way. Other packings do not need it.
    """

    row: Array
    slot: Array | None = None  # None: the rows are not cut into slots

    def of(self, texts: list[int]) -> Places:
        """Returns the places of some of the texts, such as those that are still to be computed."""
        return Places(self.row[texts], None if self.slot is None else self.slot[texts])

    def check(self, texts: int) -> None:
        """Raises if these cannot be the places of so many texts."""
        for numbers in (self.row, self.slot):
            if numbers is not None and (numbers.shape != (texts,) or numbers.dtype.kind not in "iu" or numbers.min() < OUTSIDE):
                raise ValueError(f"{numbers} are not the rows or slots of {texts} texts")


@dataclass(frozen=True)
class Selection:
    """The texts of the next batch, as indexes of the waiting texts. Without places, the packing makes its own."""

    indexes: Array
    places: Places | None = None

    @classmethod
    def of(cls, chosen: Array | Selection) -> Selection:
        """Returns what a policy has returned as a selection, also if it has returned indexes only."""
        return chosen if isinstance(chosen, Selection) else cls(np.asarray(chosen))

    def separated(self, columns: Columns, alone: Set[int]) -> tuple[Selection, bool]:
        """Returns the texts that may run together, and whether nothing else may run meanwhile. `alone`: tenants that run alone.

        The oldest text decides whether the batch is for such a tenant, so that no text waits for ever.
        """
        tenants, oldest = columns.tenant[self.indexes], columns.request[self.indexes].argmin()
        numbers = [number for tenant in alone if (number := columns.number_of(tenant)) is not None]
        are_alone = np.isin(tenants, numbers)
        is_alone = bool(are_alone[oldest])
        kept = np.flatnonzero(tenants == tenants[oldest] if is_alone else ~are_alone)
        return Selection(self.indexes[kept], self.places and self.places.of(kept.tolist())), is_alone

    def check(self, waiting: int, must_choose: bool) -> None:
        """Raises if a policy may not choose so among so many waiting texts. `must_choose`: they would wait for ever."""
        indexes = self.indexes
        if not len(indexes):
            if must_choose:
                raise ValueError("nothing was chosen and nothing runs: texts without a deadline would wait for ever")
        elif indexes.ndim != 1 or indexes.dtype.kind not in "iu" or not 0 <= min(own := indexes.tolist()) <= max(own) < waiting:
            raise ValueError(f"{indexes} are not indexes of the {waiting} waiting texts")
        elif len(set(own)) < len(own):
            raise ValueError(f"{indexes} contains a text twice")
        elif self.places is not None:
            self.places.check(len(indexes))


@dataclass(eq=False)
class Batch(Generic[T]):
    """Texts that were chosen to run together, with their times."""

    texts: list[T]
    tokens: int
    slot_keys: int
    chosen_ns: int
    expected_ns: float  # how long it will compute
    alone: bool  # chosen while no other batch ran: its staging overlapped with nothing
    places: Places | None = None  # of the texts, if the policy has chosen them
    is_half: bool = False  # of a batch for which the device had no memory
    uneven_ns: int = 0  # how long before its end a thread of the engine was free
    started_ns: int | None = None
    judged: set[T] = field(default_factory=set)  # texts whose answers came in time, or late
