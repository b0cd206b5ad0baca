"""Waiting texts as columns of numbers, in the order they joined the queue. A choice is a few array operations."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from heapq import heappop, heappush
from typing import Any, Generic

import numpy as np

from hplm.arrays import Array
from hplm.scheduling.limits import Shares
from hplm.scheduling.waiting import T

NEVER = int(np.iinfo(np.int64).max)  # the deadline of a text without one
FIRST_ROOM = 1024
# A waiting text. `number` says which one it is.
ROW = np.dtype([
    *((name, np.int64) for name in ("arrival", "deadline", "request", "number")),
    *((name, np.int32) for name in ("tokens", "priority", "slot_key", "tenant")),
])  # fmt: skip


class Numbers:
    """Gives each value a number of its own, the smallest free one, so that the numbers can index arrays."""

    def __init__(self) -> None:
        self._number: dict[Hashable, int] = {}
        self._value: list[Hashable] = []
        self._held: list[int] = []
        self._free: list[int] = []

    def __len__(self) -> int:
        """Returns a bound: all numbers in use are below it."""
        return len(self._value)

    def number_of(self, value: Hashable) -> int | None:
        return self._number.get(value)

    def value_of(self, number: int) -> Hashable:
        return self._value[number]

    def take(self, value: Hashable, times: int = 1) -> int:
        number = self._number.get(value)
        if number is None:
            if self._free and self._free[0] < len(self._value):
                number = heappop(self._free)
                self._value[number] = value
            else:
                self._free.clear()  # the numbers left there are beyond the end
                number = len(self._value)
                self._value.append(value)
                self._held.append(0)
            self._number[value] = number
        self._held[number] += times
        return number

    def give_back(self, numbers: Iterable[int]) -> None:
        for number, times in Counter(numbers).items():
            self._held[number] -= times
            if not self._held[number]:
                del self._number[self._value[number]]
                heappush(self._free, number)
        while self._held and not self._held[-1]:
            self._held.pop()
            self._value.pop()


class Column:
    """A column of `Columns`, without the free rows behind the last text."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, columns: Columns[Any], owner: type) -> Array:
        return columns.rows[self._name]


class Columns(Generic[T]):
    """Index i of every column is the same text. `len(columns)` texts wait."""

    tokens = Column()
    arrival = Column()  # nanoseconds
    deadline = Column()  # nanoseconds; NEVER for no deadline
    priority = Column()
    slot_key = Column()  # small numbers, below `slot_keys`
    tenant = Column()  # small numbers, below `tenants`
    request = Column()  # the texts of one request share a number. Later requests have higher numbers

    def __init__(self, texts: Sequence[T] = (), shares: Shares | None = None) -> None:
        """`shares`: of all columns that have one limit together. Without it there is none."""
        self.shares = shares or Shares()
        self.all_tokens = 0  # of all texts
        self.bytes = 0  # the memory that all texts keep
        self._length = 0
        self._rows = np.empty(FIRST_ROOM, ROW)
        self._texts: dict[int, T] = {}  # by number
        self._slot_keys, self._tenants = Numbers(), Numbers()
        self._demand = np.zeros(FIRST_ROOM, np.int64)
        self._requests = self._entries = 0
        for text in texts:
            self.add([text])

    def __len__(self) -> int:
        return self._length

    @property
    def rows(self) -> Array:
        return self._rows[: self._length]

    @property
    def slot_keys(self) -> int:
        return len(self._slot_keys)

    @property
    def tenants(self) -> int:
        return len(self._tenants)

    @property
    def demand(self) -> Array:
        """The waiting tokens of each tenant, by its number."""
        return self._demand[: len(self._tenants)]

    def number_of(self, tenant: Hashable) -> int | None:
        """Returns the number of a tenant that has waiting texts, else None."""
        return self._tenants.number_of(tenant)

    def by_tenant(self) -> Iterator[tuple[Hashable, int]]:
        """Yields the tenants with waiting texts, and the tokens of these."""
        for number in np.flatnonzero(self.demand).tolist():
            yield self._tenants.value_of(number), int(self._demand[number])

    def text(self, index: int) -> T:
        return self._texts[int(self.rows["number"][index])]

    def newest(self, tenant: Hashable) -> Iterator[tuple[int, int, Array]]:
        """Yields the waiting requests of a tenant, the newest first: the number of texts, their bytes, and their indexes."""
        own = np.flatnonzero(self.tenant == self.number_of(tenant))
        requests, end = self.request[own].tolist(), len(own)
        while end:
            first = bisect_left(requests, requests[end - 1])
            indexes = own[first:end]
            yield len(indexes), sum(self.text(index).bytes for index in indexes.tolist()), indexes
            end = first

    def add(self, texts: Sequence[T]) -> None:
        """Adds the texts of one request. They have one tenant."""
        while self._length + len(texts) > len(self._rows):
            self._rows = np.concatenate([self._rows, np.empty_like(self._rows)])
        self._requests += 1
        first, count = texts[0], len(texts)
        tenant, take = self._tenants.take(first.tenant, count), self._slot_keys.take
        is_one = texts[-1].slot_key is first.slot_key  # as of all requests but those that students answer
        slot_keys = [take(first.slot_key, count)] * count if is_one else [take(text.slot_key) for text in texts]
        row, tokens, size = self._length, 0, 0
        for number, (text, slot_key) in enumerate(zip(texts, slot_keys, strict=True), self._entries + 1):
            self._texts[number] = text
            self._rows[row] = (
                *(text.arrival_ns, text.deadline_ns or NEVER, self._requests, number),
                *(text.tokens, text.priority, slot_key, tenant),
            )
            row, tokens, size = row + 1, tokens + text.tokens, size + text.bytes
        self._length, self._entries = row, self._entries + count
        if tenant == len(self._demand):
            self._demand = np.concatenate([self._demand, np.zeros_like(self._demand)])
        self._demand[tenant] += tokens
        self.all_tokens += tokens
        self.bytes += size
        self.shares.add(first.tenant, count, size)

    def remove(self, indexes: Array) -> list[T]:
        """Removes these texts and returns them in the order given."""
        if not len(indexes):
            return []
        gone = self._rows[indexes]
        out = [self._texts.pop(number) for number in gone["number"].tolist()]
        self.all_tokens -= sum(gone["tokens"].tolist())
        left: dict[Hashable, tuple[int, int]] = {}  # texts and bytes of each tenant
        for text in out:
            texts, size = left.get(text.tenant, (0, 0))
            left[text.tenant] = texts + 1, size + text.bytes
        for tenant, (texts, size) in left.items():
            self.bytes -= size
            self.shares.remove(tenant, texts, size)
        if len(out) == self._length:  # nothing stays
            self._length = 0
            self._demand[: len(self._tenants)] = 0
            self._slot_keys, self._tenants = Numbers(), Numbers()
            return out
        tenant, tenants = gone["tenant"], len(self._tenants)
        self._demand[:tenants] -= np.bincount(tenant, gone["tokens"], tenants).astype(np.int64)  # exact: below 2^53
        self._slot_keys.give_back(gone["slot_key"].tolist())
        self._tenants.give_back(tenant.tolist())
        stays = np.ones(self._length, bool)
        stays[indexes] = False
        first = int(stays.argmin())  # texts before the first gap do not move
        kept = first + np.flatnonzero(stays[first:])
        words = self._rows.view(np.int64).reshape(len(self._rows), -1)  # numpy moves rows of fields one field at a time
        self._length -= len(out)
        words[first : self._length] = words.take(kept, axis=0)
        return out

    def whole_requests(self, indexes: Array) -> Array:
        """Returns these indexes and those of the other texts of their requests. A request's texts lie side by side."""
        mine = self.request[indexes]
        starts, ends = np.searchsorted(self.request, mine, side="left"), np.searchsorted(self.request, mine, side="right")
        if ((ends - starts) == 1).all():
            return indexes
        whole: list[Array] = [np.arange(start, end) for start, end in zip(starts, ends, strict=True)]
        return np.unique(np.concatenate(whole))

    def only(self, indexes: Array) -> Columns[T]:
        """Returns these texts as columns of their own, for reading. The numbers of tenants and slot keys stay the same."""
        if len(indexes) == len(self):
            return self
        own: Columns[T] = Columns()
        own._length, own._rows = len(indexes), self._rows[indexes]
        own._texts, own._slot_keys, own._tenants = self._texts, self._slot_keys, self._tenants
        own._demand = np.bincount(own.tenant, own.tokens, len(self._tenants)).astype(np.int64)
        own.all_tokens = int(own._demand.sum())
        return own
