"""The requests that the engine has in batches, in memory that outlives its process.

The model process makes the memory and reads it when the engine has ended, however it ended. The engine writes for each batch:
before it is staged, because staging reads tables, before it is computed, and after.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

LONGEST = 128  # bytes of a request's entry: two numbers, and a tenant's id of at most 64 characters
_ENTRY = re.compile(rb"^(\d+) (\d+) (\S+)\n", re.MULTILINE)
# The bytes of a batch's place, how many of them are entries, which are none while it is free, and whether the batch computes.
_PLACE = struct.Struct("<qqq")


class InFlightEntry(NamedTuple):
    """A request in a batch."""

    number: int  # of the request, in the model process
    tenant: int  # its uid
    tenant_id: str

    def packed(self) -> bytes:
        return f"{self.number} {self.tenant} {self.tenant_id}\n".encode()


class InFlight:
    def __init__(self, batches: int, requests: int, descriptor: int = -1) -> None:
        """`requests`: the most of a batch. Without a descriptor of memory, no other process sees them."""
        self._requests = requests
        self._size = _PLACE.size + requests * LONGEST
        if descriptor >= 0:
            os.ftruncate(descriptor, batches * self._size)
        self._shown = mmap.mmap(descriptor, batches * self._size)
        self._free = [number * self._size for number in range(batches)]
        self._places: dict[object, int] = {}  # by batch
        for place in self._free:
            _PLACE.pack_into(self._shown, place, self._size, 0, 0)

    def enter(self, batch: object, entries: Iterable[bytes]) -> None:
        """Shows the entries of a batch's requests."""
        packed = b"".join(islice(entries, self._requests))  # a policy of somebody else may choose too many
        place = self._places[batch] = self._free.pop()
        start = place + _PLACE.size
        self._shown[start : start + len(packed)] = packed
        _PLACE.pack_into(self._shown, place, self._size, len(packed), 0)  # last: a process may end between two steps

    def compute(self, batch: object) -> None:
        """Says that a batch is computed from now on."""
        place = self._places.get(batch)
        if place is not None:
            size, used, _ = _PLACE.unpack_from(self._shown, place)
            _PLACE.pack_into(self._shown, place, size, used, 1)

    def leave(self, batch: object) -> None:
        """Call it at least once for each batch."""
        place = self._places.pop(batch, None)
        if place is None:
            return
        _PLACE.pack_into(self._shown, place, self._size, 0, 0)
        self._free.append(place)


def read(descriptor: int, staged: bool = True) -> Iterator[InFlightEntry]:
    """Yields the requests that an engine has in batches, or had when it ended. `staged`: also before they compute.

    Raises ValueError if its memory is damaged, as other memory of an engine that ends may be too.
    """
    place, end = 0, os.fstat(descriptor).st_size
    while place < end:
        size, used, computes = _PLACE.unpack(os.pread(descriptor, _PLACE.size, place))
        if not size:  # it ended before it was ready
            return
        if not _PLACE.size <= size <= end - place or not 0 <= used <= size - _PLACE.size:
            raise ValueError(f"at byte {place} of {end}, {size} bytes with {used} bytes of entries cannot be")
        # An engine that still runs may write between these two steps: what is no entry is left out.
        shown = os.pread(descriptor, used, place + _PLACE.size) if computes or staged else b""
        for number, tenant, tenant_id in _ENTRY.findall(shown):
            yield InFlightEntry(int(number), int(tenant), tenant_id.decode())
        place += size
