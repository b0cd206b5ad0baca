"""Waiting texts as columns of numbers, in the order they joined the queue. A choice is a few array operations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from heapq import heappop, heappush
from operator import attrgetter
from typing import Generic

import numpy as np

from hplm.arrays import Array
from hplm.scheduling.kernel import WIDTHS, Table, kernel
from hplm.scheduling.waiting import T

NEVER = np.iinfo(np.int64).max  # the deadline of a text without one
FIRST_ROOM = 1024
SIZE = attrgetter("bytes")  # of a text


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

    def take(self, value: Hashable) -> int:
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
        self._held[number] += 1
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


class Columns(Generic[T]):
    """Index i of every column is the same text. `len(columns)` texts wait."""

    def __init__(self, texts: Sequence[T] = ()) -> None:
        self._length = 0
        self._columns = {name: np.empty(FIRST_ROOM, width) for name, width in WIDTHS.items()}
        # Texts do not move: the column `position` holds their index here. A free place holds None.
        self._texts = np.full(FIRST_ROOM, None, object)
        self._places = 0  # those that were used before
        self._free: list[int] = []
        self._slot_keys, self._tenants = Numbers(), Numbers()
        # By a tenant's number: its waiting tokens, texts and bytes, and its backbone.
        self._demand, self._counts, self._sizes, self._backbones = (np.zeros(FIRST_ROOM, np.int64) for _ in range(4))
        self._bytes = 0
        self._table = self._place()
        self._requests = 0
        for text in texts:
            self.add([text])

    def __len__(self) -> int:
        return self._length

    @property
    def tokens(self) -> Array:
        return self._columns["tokens"][: self._length]

    @property
    def arrival(self) -> Array:
        """Nanoseconds."""
        return self._columns["arrival"][: self._length]

    @property
    def deadline(self) -> Array:
        """Nanoseconds; NEVER for no deadline."""
        return self._columns["deadline"][: self._length]

    @property
    def priority(self) -> Array:
        return self._columns["priority"][: self._length]

    @property
    def slot_key(self) -> Array:
        """Small numbers, below `slot_keys`."""
        return self._columns["slot_key"][: self._length]

    @property
    def tenant(self) -> Array:
        """Small numbers, below `tenants`."""
        return self._columns["tenant"][: self._length]

    @property
    def request(self) -> Array:
        """The texts of one request share a number. Later requests have higher numbers."""
        return self._columns["request"][: self._length]

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

    @property
    def counts(self) -> Array:
        """The waiting texts of each tenant, by its number."""
        return self._counts[: len(self._tenants)]

    @property
    def sizes(self) -> Array:
        """The bytes that each tenant's waiting texts keep, by its number."""
        return self._sizes[: len(self._tenants)]

    @property
    def backbones(self) -> Array:
        """The backbone of each tenant, by its number."""
        return self._backbones[: len(self._tenants)]

    @property
    def backbone(self) -> Array:
        return self.backbones[self.tenant]

    @property
    def bytes(self) -> int:
        """The memory that all waiting texts keep."""
        return self._bytes

    @property
    def table(self) -> Table:
        """The same for the compiled kernel."""
        self._table.count, self._table.slot_keys, self._table.tenants = self._length, self.slot_keys, self.tenants
        return self._table

    def number_of(self, tenant: int) -> int | None:
        """Returns the number of a tenant that has waiting texts, else None."""
        return self._tenants.number_of(tenant)

    def tenant_of(self, number: int) -> Hashable:
        """Returns the tenant with waiting texts that has this number."""
        return self._tenants.value_of(number)

    def text(self, index: int) -> T:
        return self._texts[int(self._columns["position"][index])]

    def add(self, texts: Sequence[T]) -> None:
        """Adds the texts of one request."""
        end = self._length + len(texts)
        while end > len(self._columns["tokens"]):
            self._columns = {name: np.concatenate([column, np.empty_like(column)]) for name, column in self._columns.items()}
            self._table = self._place()
        self._requests += 1
        for i, text in enumerate(texts, self._length):
            tokens, size, tenant = text.tokens, text.bytes, self._tenants.take(text.tenant)
            row = (
                tokens,
                text.arrival_ns,
                text.deadline_ns or NEVER,
                text.priority,
                self._slot_keys.take(text.slot_key),
                tenant,
                self._requests,
                self._put(text),
            )
            for column, value in zip(self._columns.values(), row, strict=True):
                column[i] = value
            if tenant == len(self._demand):
                self._demand, self._counts, self._sizes, self._backbones = (
                    np.concatenate([counted, np.zeros_like(counted)])
                    for counted in (self._demand, self._counts, self._sizes, self._backbones)
                )
                self._table = self._place()
            self._backbones[tenant] = text.backbone
            self._demand[tenant] += tokens
            self._counts[tenant] += 1
            self._sizes[tenant] += size
            self._bytes += size
        self._length = end

    def remove(self, indexes: Array) -> list[T]:
        """Removes these texts and returns them in the order given."""
        if not len(indexes):
            return []
        positions = self._columns["position"][indexes]
        out: list[T] = self._texts[positions].tolist()
        self._texts[positions] = None
        self._free += positions.tolist()
        if len(indexes) == self._length:  # nothing stays
            self._length = self._bytes = 0
            self._slot_keys, self._tenants = Numbers(), Numbers()
            for counted in (self._demand, self._counts, self._sizes):
                counted[:] = 0
            return out
        self._slot_keys.give_back(self.slot_key[indexes].tolist())
        tenant = self.tenant[indexes]
        sizes = np.fromiter(map(SIZE, out), np.int64, len(out))
        self._bytes -= int(sizes.sum())
        tenants = len(self._tenants)
        self._demand[:tenants] -= np.bincount(tenant, self.tokens[indexes], tenants).astype(np.int64)  # exact: below 2^53
        self._counts[:tenants] -= np.bincount(tenant, minlength=tenants)
        self._sizes[:tenants] -= np.bincount(tenant, sizes, tenants).astype(np.int64)
        self._tenants.give_back(tenant.tolist())
        compiled = kernel()
        if compiled is not None:
            compiled.remove(self.table, indexes.astype(np.int64))
        else:
            self._close_gaps(indexes)
        self._length -= len(indexes)
        return out

    def whole_requests(self, indexes: Array) -> Array:
        """Returns these indexes and those of the other texts of their requests. A request's texts lie side by side."""
        mine = self.request[indexes]
        starts, ends = np.searchsorted(self.request, mine, side="left"), np.searchsorted(self.request, mine, side="right")
        if ((ends - starts) == 1).all():
            return indexes
        whole: list[Array] = [np.arange(start, end) for start, end in zip(starts, ends, strict=True)]
        return np.unique(np.concatenate(whole))

    def only(self, backbone: int, indexes: Array) -> Columns[T]:
        """Returns the texts of one backbone, which have these indexes, as columns of their own, for reading.

        The numbers of tenants and slot keys stay the same.
        """
        own: Columns[T] = Columns()
        own._length = len(indexes)
        own._columns = {name: column[indexes] for name, column in self._columns.items()}
        own._texts, own._slot_keys, own._tenants, own._backbones = self._texts, self._slot_keys, self._tenants, self._backbones
        is_its = self.backbones == backbone
        own._demand, own._counts, own._sizes = (
            np.where(is_its, counted, 0) for counted in (self.demand, self.counts, self.sizes)
        )
        own._bytes = int(own._sizes.sum())
        own._table = own._place()
        return own

    def _put(self, text: T) -> int:
        if self._free:
            position = self._free.pop()
        else:
            position = self._places
            self._places += 1
            if position == len(self._texts):
                self._texts = np.concatenate([self._texts, np.full_like(self._texts, None)])
        self._texts[position] = text
        return position

    def _close_gaps(self, indexes: Array) -> None:
        """Does the same as the compiled kernel."""
        stays = np.ones(self._length, bool)
        stays[indexes] = False
        first = int(stays.argmin())  # texts before the first gap do not move
        kept = np.flatnonzero(stays[first:])
        for column in self._columns.values():
            column[first : first + len(kept)] = column[first : self._length].take(kept)

    def _place(self) -> Table:
        return Table.of(self._columns.values(), self._demand)
