"""A bounded line in which tenants take turns, for work that comes before the scheduler: lookups and forwarded requests.

Each tenant has a meter of the work that was taken from it, and the tenant with the lowest meter is next. So a tenant that sends
little waits for a piece of each other tenant's work at most, however much they have sent. Large items are taken in pieces.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Generic, Protocol, TypeVar

from hplm.errors import Draining
from hplm.scheduling.limits import Limits, Shares

LAZY = 64  # expiries of items that have left are removed when there are so many more of them than items


class Item(Protocol):
    """Something that waits for its turn. Times are nanoseconds of the line's clock."""

    @property
    def owner(self) -> Hashable: ...  # the tenant
    @property
    def left(self) -> int: ...  # work that is not yet done; at least 1
    @property
    def deadline_ns(self) -> int: ...  # 0: no deadline


T = TypeVar("T", bound=Item)


@dataclass(eq=False)
class _Tenant(Generic[T]):
    meter: int  # work taken so far; only differences between tenants count
    items: deque[T] = field(default_factory=deque)


class Turns(Generic[T]):
    """`piece` is how much work is taken at once."""

    def __init__(self, limits: Limits, piece: int, now_ns: Callable[[], int]) -> None:
        self._shares = Shares(limits)
        self._piece = piece
        self._now_ns = now_ns
        self._changed = threading.Condition()
        self._tenants: dict[Hashable, _Tenant[T]] = {}  # those with items, and those that are still ahead of the others
        self._next: list[tuple[int, int, Hashable]] = []  # heap of (meter, order of entry, tenant)
        self._work: dict[T, int] = {}  # of the items that wait
        self._expiries: list[tuple[int, int, T]] = []  # heap of (deadline, order of entry, item); some items have left
        self._entries = 0
        self._clock = 0  # the meter with which a tenant joins: that of the tenant whose turn was last
        self._closed = False

    def __len__(self) -> int:
        return self._shares.items

    def offer(self, item: T) -> list[T]:
        """Adds an item. Returns the items for which the line has no place; the caller answers them.

        A full line refuses the item if its tenant would hold the largest part of the line. Otherwise the newest items of the
        tenant that does hold the largest part lose their places.
        """
        with self._changed:
            if self._closed:
                raise Draining("the server is shutting down: send the request to another replica, or retry later")
            evicted = self._shares.evicted(item.owner, 1, item.left, self._newest)
            if evicted is None:
                return [item]
            refused = [self._leave(self._tenants[newest.owner].items.pop()) for newest in evicted]
            self._enter(item, at_front=False)
            self._changed.notify()
            return refused

    def take(self, most: int | None = None) -> tuple[list[T], list[T]] | None:
        """Waits for items. Returns those whose turn it is, `most` and a piece of work at most, and those that have expired.

        An item that is larger than a piece is returned alone: the caller does a piece of it and calls `give_back`. Returns None
        once the line is closed and empty.
        """
        with self._changed:
            self._changed.wait_for(lambda: len(self) or self._closed)
            if not len(self):
                return None
            expired = self._expire()
            taken: list[T] = []
            room = self._piece
            while len(self) and (most is None or len(taken) < most):
                tenant = self._first_tenant()
                work = min(self._piece, self._work[tenant.items[0]])
                if work > room:
                    break
                room -= work
                taken.append(self._take_from(tenant, work))
            return taken, expired

    def expired(self) -> list[T]:
        """Removes and returns the items that can no longer be in time."""
        with self._changed:
            return self._expire()

    def give_back(self, item: T) -> None:
        """Puts an item that is not finished before its tenant's other items."""
        with self._changed:
            self._enter(item, at_front=True)
            self._changed.notify()

    def charge(self, item: T, more: int) -> None:
        """Counts what was done of a taken item beyond a piece."""
        with self._changed:
            tenant = self._tenants.get(item.owner)
            if more > 0 and tenant is not None:  # else nobody waits
                tenant.meter += more
                self._line_up(item.owner, tenant)

    def close(self) -> None:
        """Refuses new items. Waiting items are still taken."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _newest(self, tenant: Hashable) -> Iterator[tuple[int, int, T]]:
        return ((1, self._work[item], item) for item in reversed(self._tenants[tenant].items))

    def _enter(self, item: T, at_front: bool) -> None:
        tenant = self._tenants.get(item.owner)
        if tenant is None:
            tenant = self._tenants[item.owner] = _Tenant(self._clock)
            self._line_up(item.owner, tenant)
        if at_front:
            tenant.items.appendleft(item)
        else:
            tenant.items.append(item)
        self._work[item] = work = item.left
        self._shares.add(item.owner, 1, work)
        if item.deadline_ns:
            self._entries += 1
            heappush(self._expiries, (item.deadline_ns, self._entries, item))

    def _line_up(self, name: Hashable, tenant: _Tenant[T]) -> None:
        self._entries += 1
        heappush(self._next, (tenant.meter, self._entries, name))

    def _first_tenant(self) -> _Tenant[T]:
        """Returns the tenant whose turn it is. Forgets tenants without items that would have been before it."""
        while True:
            meter, _, name = self._next[0]
            tenant = self._tenants.get(name)
            if tenant is not None and tenant.meter == meter:
                if tenant.items:
                    return tenant
                del self._tenants[name]
            heappop(self._next)

    def _take_from(self, tenant: _Tenant[T], work: int) -> T:
        item = tenant.items.popleft()
        self._clock = tenant.meter
        tenant.meter += work
        self._line_up(item.owner, tenant)
        return self._leave(item)

    def _leave(self, item: T) -> T:
        """Counts an item that was removed from its tenant."""
        self._shares.remove(item.owner, 1, self._work.pop(item))
        if not len(self):  # nobody waits, so nobody is ahead
            self._tenants.clear()
            self._next.clear()
            self._expiries.clear()
        return item

    def _expire(self) -> list[T]:
        """Removes the items that can no longer be in time."""
        now = self._now_ns()
        late: list[T] = []
        while self._expiries and (self._expiries[0][0] <= now or self._expiries[0][2] not in self._work):
            item = heappop(self._expiries)[2]
            if item in self._work:
                self._tenants[item.owner].items.remove(item)
                late.append(self._leave(item))
        if len(self._expiries) > LAZY + 2 * len(self):  # one that was given back has several
            self._expiries = [*{entry[2]: entry for entry in self._expiries if entry[2] in self._work}.values()]
            heapify(self._expiries)
        return late
