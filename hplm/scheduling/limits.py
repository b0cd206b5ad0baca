"""Counts what waits, by tenant. In a full line the tenant with the largest share loses places."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any, Protocol

from typing_extensions import TypeVar

from hplm.errors import QueueFull

LAZY = 64  # outdated entries of the heap are removed when there are so many more of them than tenants
NOTHING = (0, 0)


class Waiting(Protocol):
    """A waiting text, of the engine or simulated. Times are nanoseconds of the queue's clock."""

    @property
    def tokens(self) -> int: ...
    @property
    def bytes(self) -> int: ...  # memory that it keeps while it waits
    @property
    def arrival_ns(self) -> int: ...
    @property
    def deadline_ns(self) -> int: ...  # 0: no deadline
    @property
    def priority(self) -> int: ...  # higher goes first, in policies that use it
    @property
    def slot_key(self) -> Hashable: ...  # texts with the same key share device slots
    @property
    def tenant(self) -> Hashable: ...  # the tenant whose fair share it uses


# The type of the texts in a queue. Policies and admission do not name it: they take columns of any texts.
T = TypeVar("T", bound=Waiting, default=Any)
L = TypeVar("L")
# Yields what a tenant has waiting, the newest first: items, their work, and what the caller needs to remove them.
Newest = Callable[[Hashable], Iterator[tuple[int, int, L]]]


@dataclass(frozen=True)
class Limits:
    """The most that may wait: items, such as texts or requests, and their work or bytes."""

    items: int
    work: int


class Shares:
    """Whoever holds the line tells what joins and leaves."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits(2**62, 2**62)
        self.items = self.work = 0
        self._held: dict[Hashable, tuple[int, int]] = {}  # items and work of each tenant
        # Heap of (-share, order of entry, tenant), from the first full line on: for each tenant an entry that is not too small.
        self._largest: list[tuple[float, int, Hashable]] | None = None
        self._entries = 0

    def add(self, tenant: Hashable, items: int, work: int) -> None:
        self.items += items
        self.work += work
        held = self._held.get(tenant, NOTHING)
        self._held[tenant] = held = held[0] + items, held[1] + work
        if self._largest is not None:
            self._push(tenant, held)

    def release(self, tenant: Hashable, items: int, work: int) -> None:
        self.items -= items
        self.work -= work
        held = self._held[tenant]
        if held[0] > items:
            self._held[tenant] = held[0] - items, held[1] - work
            return
        del self._held[tenant]
        if not self._held:
            self._largest = None

    def room_for(self, texts: Sequence[Waiting], newest: Newest[L]) -> list[L]:
        """Returns what has to leave for the texts of a request.

        Raises if its tenant would hold the largest share. Otherwise the tenant that does hold it loses its newest items.
        """
        items, work = len(texts), sum([text.bytes for text in texts])
        items_over, work_over = self.items + items - self.limits.items, self.work + work - self.limits.work
        leaving: list[L] = []
        if items_over <= 0 and work_over <= 0:
            return leaving
        own, error = self._held.get(texts[0].tenant, NOTHING), None
        wanted = self._share((own[0] + items, own[1] + work))
        left: dict[Hashable, tuple[int, int]] = {}  # of the tenants that lose something
        losing: dict[Hashable, Iterator[tuple[int, int, L]]] = {}
        while items_over > 0 or work_over > 0:
            loses = self._largest_of(left)
            if loses is None or self._share(left.get(loses, self._held[loses])) <= wanted:
                error = self._full(items, work)
                break
            out_items, out_work, out = next(losing.get(loses) or losing.setdefault(loses, newest(loses)))
            held = left.get(loses, self._held[loses])
            left[loses] = held[0] - out_items, held[1] - out_work
            items_over, work_over = items_over - out_items, work_over - out_work
            leaving.append(out)
        for other in left:  # the loop has lowered their entries, but nothing has left yet, and admission may still refuse
            self._push(other, self._held[other])
        if error is not None:
            raise error
        return leaving

    def _full(self, items: int, work: int) -> QueueFull:
        if self.items + items > self.limits.items:
            return QueueFull(
                f"{self.items} texts are waiting and {items} more would exceed the limit of {self.limits.items}: "
                "retry after 0.1 s, or send fewer texts in a request"
            )
        return QueueFull(
            f"{self.work} bytes are waiting and {work} more would exceed the limit of {self.limits.work}: "
            "retry after 0.1 s, or send fewer or shorter texts in a request"
        )

    def _share(self, held: tuple[int, int]) -> float:
        return max(held[0] / self.limits.items, held[1] / self.limits.work)

    def _push(self, tenant: Hashable, held: tuple[int, int]) -> None:
        heap = self._heap()
        self._entries += 1
        heappush(heap, (-self._share(held), self._entries, tenant))

    def _heap(self) -> list[tuple[float, int, Hashable]]:
        if self._largest is None or len(self._largest) > 2 * len(self._held) + LAZY:
            held = enumerate(self._held.items())
            self._largest = [(-self._share(own), number, tenant) for number, (tenant, own) in held]
            self._entries = len(self._largest)
            heapify(self._largest)
        return self._largest

    def _largest_of(self, left: dict[Hashable, tuple[int, int]]) -> Hashable | None:
        """Returns the tenant with the largest share, after what has left it."""
        heap, lowered = self._heap(), set[Hashable]()
        while heap:
            share, _, tenant = heap[0]
            held = left.get(tenant, self._held.get(tenant))
            now = -1.0 if held is None else self._share(held)
            if now == -share:
                return tenant
            if 0 < now < -share and tenant not in lowered:
                self._entries += 1
                lowered.add(tenant)
                heapreplace(heap, (-now, self._entries, tenant))
            else:  # it has nothing, or another entry
                heappop(heap)
        return None
