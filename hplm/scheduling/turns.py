"""A queue in which tenants take turns, for work that comes before the scheduler: look-ups, prompts and forwarded requests.

The tenant that has had least work is next. So a tenant that sends little waits for a piece of each other tenant's work at most,
however much they have sent.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from hplm.arrays import Array
from hplm.errors import QueueFull
from hplm.scheduling.columns import Columns
from hplm.scheduling.cost import Cost
from hplm.scheduling.fairness import served_before
from hplm.scheduling.filling import Room, fits
from hplm.scheduling.limits import Limits
from hplm.scheduling.queue import Queue
from hplm.scheduling.selection import Capacity

AT_ONCE = 64  # pieces that are taken at a time, at most


class Item(Protocol):
    """Something that waits for its turns. Times are nanoseconds of the line's clock."""

    @property
    def owner(self) -> Hashable: ...  # the tenant
    @property
    def deadline_ns(self) -> int: ...  # 0: no deadline


W = TypeVar("W", bound=Item)


@dataclass(eq=False, slots=True)
class Piece(Generic[W]):
    """A piece of an item's work, as it waits in the queue (`hplm.scheduling.limits`)."""

    item: W
    tenant: Hashable
    tokens: int  # its work; at least 1
    deadline_ns: int
    arrival_ns: int = 0
    priority: int = 0
    slot_key: int = 0

    @property
    def bytes(self) -> int:
        return self.tokens


class InTurn:
    """Takes pieces of the tenants that have had least, the first that came of equal ones, until a piece does not fit.

    All in any order, if all fit.
    """

    def select(self, columns: Columns, start_ns: int, capacity: Capacity, cost: Cost) -> Array:
        if fits(columns, capacity):
            return np.arange(len(columns))
        room, turns = Room(columns, capacity), columns.had[columns.tenant] + served_before(columns, np.arange(len(columns)))
        order = (turns - turns.min()) * len(columns) + np.arange(len(columns))
        first = np.argpartition(order, last := min(capacity.texts, len(columns)) - 1)[: last + 1]
        room.prefix(first[np.argsort(order[first])])
        return room.taken


class Turns(Queue[Piece[W]]):
    """Threads may share it. `piece` is how much work is taken at once.

    `places`: how many items may be taken and not `done`; 0: any number, and nobody calls `done`. A tenant gets another place
    only while more are free than it has. So one tenant has half of them at most, and any newcomer finds a free one.
    """

    def __init__(self, limits: Limits, piece: int, now_ns: Callable[[], int], places: int = 0) -> None:
        super().__init__(InTurn(), limits)
        self._places, self._taken = places, Counter[Hashable]()  # by tenant: places that it has
        self._piece = piece
        self._now_ns = now_ns
        self._changed = threading.Condition()

    def enqueue_item(self, item: W, *works: int) -> list[W]:
        """Adds an item, with the work of each of its pieces. Returns the items that have no place; the caller answers them.

        A full line refuses the item if its tenant would hold the largest part of the line. Otherwise the newest items of the
        tenant that does hold the largest part lose their places.
        """
        pieces = [Piece(item, item.owner, work, item.deadline_ns) for work in works]
        with self._changed:
            try:
                refused = self.offer(pieces, 0)
            except QueueFull:
                return [item]
            self._changed.notify()
        return _items(refused)

    def take(self, most: int = AT_ONCE) -> tuple[list[W], list[W]] | None:
        """Waits for pieces with a place. Returns the items whose turn it is, for a piece each, and those that have expired.

        It takes `most` and `piece` of work at most, but a piece that is larger is taken alone. An item has one piece that is
        smaller, its last. Returns None once the line is closed and empty.
        """
        with self._changed:
            self._changed.wait_for(self._may_take)
            if not len(self):
                return None
            expired, taken = self._expired(), list[Piece[W]]()
            if len(self):
                chosen = self.select(0, Capacity(self._piece, most, 1), is_idle=True, among=self._with_place())
                taken = self.serve(chosen.indexes)
                if self._places:
                    self._taken.update(piece.tenant for piece in taken)
            return _items(taken), expired

    def done(self, item: W) -> None:
        """Gives back the place of an item that was taken."""
        with self._changed:
            self._taken[item.owner] -= 1
            if not self._taken[item.owner]:
                del self._taken[item.owner]
            self._changed.notify_all() if self.draining else self._changed.notify()

    def expired(self) -> list[W]:
        """Removes and returns the items that can no longer be in time."""
        with self._changed:
            return self._expired()

    def check(self) -> None:
        """Passes a piece through the queue, beside its limits and turns. Raises what the queue raises."""
        with self._changed:
            self.add([Piece[Any](None, None, 1, 0)])
            self.remove(np.array([len(self) - 1]))

    def close(self) -> None:
        """Refuses new items. Waiting items are still taken."""
        with self._changed:
            super().close()
            self._changed.notify_all()

    def _may_take(self) -> bool:
        if not len(self):
            return self.draining
        return (indexes := self._with_place()) is None or len(indexes) > 0

    def _with_place(self) -> Array | None:
        """Returns the indexes of pieces whose tenants may have another place; None: all."""
        free, columns = self._places - self._taken.total(), self.columns
        full = [columns.number_of(tenant) for tenant, taken in self._taken.items() if taken >= free]
        full = [number for number in full if number is not None]
        return np.flatnonzero(~np.isin(columns.tenant, full)) if full else None

    def _expired(self) -> list[W]:
        return _items(self.late(self._now_ns(), predicts=False))


def _items(pieces: Sequence[Piece[W]]) -> list[W]:
    """Returns each piece's item once."""
    return list(dict.fromkeys(piece.item for piece in pieces))
