"""Waiting texts as columns of numbers, in the order they joined the queue. A choice is a few array operations."""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from heapq import heappop, heappush
from typing import Any, Generic

import numpy as np

from hplm.arrays import Array
from hplm.scheduling.limits import Shares, T

NEVER = int(np.iinfo(np.int64).max)  # the deadline of a text without one
FIRST_ROOM = 1024
# A waiting text. `number` says which one it is.
ROW = np.dtype([
    *((name, np.int64) for name in ("arrival", "deadline", "request", "number")),
    *((name, np.int32) for name in ("tokens", "priority", "slot_key", "tenant")),
])  # fmt: skip
_check = struct.Struct("=qqii").pack  # raises if a number does not fit its column


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
                self._release(number)
        while self._held and not self._held[-1]:
            self._held.pop()
            self._value.pop()

    def _release(self, number: int) -> None:
        del self._number[self._value[number]]
        heappush(self._free, number)


class Tenants(Numbers):
    """Numbers of the tenants with waiting texts, and the work that each has had: its virtual time.

    A tenant that comes counts as having had as much as the one of those that wait that has had least, or more if it did before.
    So an idle time gives no right to catch up, and nobody gains by leaving the queue for a moment.
    """

    def __init__(self) -> None:
        super().__init__()
        self._had = np.zeros(FIRST_ROOM, np.int64)  # by number
        self._least = 0
        self._ahead: dict[Hashable, int] = {}  # what tenants that do not wait have had, if it was more than the least

    @property
    def had(self) -> Array:
        """By number."""
        return self._had[: len(self)]

    def take(self, value: Hashable, times: int = 1) -> int:
        is_new, number = self.number_of(value) is None, super().take(value, times)
        if is_new:
            if number == len(self._had):
                self._had = np.concatenate([self._had, np.zeros_like(self._had)])
            self._had[number] = max(self._least, self._ahead.pop(value, 0))
        return number

    def serve(self, numbers: Array, work: Array) -> None:
        """Counts work that tenants get, before it leaves the queue."""
        self._least = int(self.had[np.array(self._held) > 0].min())
        np.add.at(self._had, numbers, work)
        if len(self._ahead) > 2 * len(self) + FIRST_ROOM:
            self._ahead = {tenant: had for tenant, had in self._ahead.items() if had > self._least}

    def _release(self, number: int) -> None:
        self._ahead[self._value[number]] = int(self._had[number])
        super()._release(number)


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
        """`shares`: counts them. Without it they have no limit."""
        self.shares = shares or Shares()
        self.all_tokens = 0  # of all texts
        self.bytes = 0  # the memory that all texts keep
        self._length = 0
        self._joined: list[Sequence[T]] = []  # the texts of the newest requests, which have no rows yet
        self._rows = np.empty(FIRST_ROOM, ROW)
        self._texts: dict[int, T] = {}  # by number
        self._slot_keys, self._tenants = Numbers(), Tenants()
        self._requests = self._entries = 0
        for text in texts:
            self.add([text])

    def __len__(self) -> int:
        return self._length

    @property
    def rows(self) -> Array:
        if self._joined:
            self._fill()
        return self._rows[: self._length]

    @property
    def slot_keys(self) -> int:
        if self._joined:
            self._fill()
        return len(self._slot_keys)

    @property
    def tenants(self) -> int:
        if self._joined:
            self._fill()
        return len(self._tenants)

    @property
    def demand(self) -> Array:
        """The waiting tokens of each tenant, by its number."""
        return np.bincount(self.tenant, self.tokens, len(self._tenants)).astype(np.int64)  # exact: below 2^53

    @property
    def had(self) -> Array:
        """The virtual time of each tenant, by its number: the tokens that it has had, or that it counts as having had."""
        if self._joined:
            self._fill()
        return self._tenants.had

    def number_of(self, tenant: Hashable) -> int | None:
        """Returns the number of a tenant that has waiting texts, else None."""
        if self._joined:
            self._fill()
        return self._tenants.number_of(tenant)

    def by_tenant(self) -> Iterator[tuple[Hashable, int]]:
        """Yields the tenants with waiting texts, and the tokens of these."""
        for number, tokens in enumerate(self.demand.tolist()):
            if tokens:
                yield self._tenants.value_of(number), tokens

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
        """Adds the texts of one request. They have one tenant, arrival, deadline and priority.

        They get rows with those of others, when these are read. Raises struct.error, and adds none, if a number does not fit
        its column.
        """
        first, tokens, size = texts[0], [text.tokens for text in texts], sum([text.bytes for text in texts])
        _check(first.arrival_ns, first.deadline_ns, max(tokens), first.priority)
        self._joined.append(texts)
        self.all_tokens += sum(tokens)
        self._length += len(texts)
        self.bytes += size
        self.shares.add(texts[0].tenant, len(texts), size)

    def _fill(self) -> None:
        """Gives rows to the texts that have joined."""
        while self._length > len(self._rows):
            self._rows = np.concatenate([self._rows, np.empty_like(self._rows)])
        rows: list[tuple[int, ...]] = []
        take = self._slot_keys.take
        for request, texts in enumerate(self._joined, self._requests + 1):
            first, tenant = texts[0], self._tenants.take(texts[0].tenant, len(texts))
            arrival, deadline, priority = first.arrival_ns, first.deadline_ns or NEVER, first.priority
            for number, text in enumerate(texts, self._entries + 1):
                self._texts[number] = text
                rows.append((arrival, deadline, request, number, text.tokens, priority, take(text.slot_key), tenant))
            self._entries += len(texts)
        self._requests += len(self._joined)
        self._joined = []
        self._rows[self._length - len(rows) : self._length] = rows

    def serve(self, indexes: Array) -> list[T]:
        """Removes these texts, as work that their tenants have had, and returns them in the order given."""
        if len(indexes) < self._length:  # where nobody waits, nobody has had more than another
            served = self.rows[indexes]
            self._tenants.serve(served["tenant"], served["tokens"])
        return self.remove(indexes)

    def remove(self, indexes: Array) -> list[T]:
        """Removes these texts and returns them in the order given."""
        if not len(indexes):
            return []
        out = [self._texts.pop(number) for number in self.rows["number"][indexes].tolist()]
        for text in out:
            self.all_tokens -= text.tokens
            self.bytes -= text.bytes
            self.shares.release(text.tenant, 1, text.bytes)
        if len(out) == self._length:  # nothing stays
            self._length = 0
            self._slot_keys, self._tenants = Numbers(), Tenants()
            return out
        gone = self.rows[indexes]
        self._slot_keys.give_back(gone["slot_key"].tolist())
        self._tenants.give_back(gone["tenant"].tolist())
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
        own._length, own._rows = len(indexes), self.rows[indexes]
        own._texts, own._slot_keys, own._tenants = self._texts, self._slot_keys, self._tenants
        own.all_tokens = int(own.tokens.sum())
        return own
