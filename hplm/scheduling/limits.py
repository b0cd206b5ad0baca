"""How much may wait, and who loses a place in a full queue: the tenant that holds the largest share of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hplm.arrays import Array
from hplm.errors import QueueFull
from hplm.scheduling.columns import Columns
from hplm.scheduling.waiting import Waiting

NOBODY = np.empty(0, np.int64)


@dataclass(frozen=True)
class Limits:
    """How much may wait."""

    texts: int
    bytes: int

    def displaced(self, texts: Sequence[Waiting], columns: Columns) -> Array:
        """Returns the indexes of the waiting texts that have to leave, so that a request has room. Raises if it gets none.

        It gets none if its tenant would hold the largest share. Otherwise the tenant that does hold the largest share loses its
        newest requests.
        """
        size = sum(text.bytes for text in texts)
        excess_texts = len(columns) + len(texts) - self.texts
        excess_bytes = columns.bytes + size - self.bytes
        if excess_texts <= 0 and excess_bytes <= 0:
            return NOBODY
        shares = np.maximum(columns.counts / self.texts, columns.sizes / self.bytes)
        mine = columns.number_of(texts[0].tenant)
        waiting, kept = (0, 0) if mine is None else (int(columns.counts[mine]), int(columns.sizes[mine]))
        wanted = max((waiting + len(texts)) / self.texts, (kept + size) / self.bytes)
        leave: list[Array] = []
        newest: dict[int, _Newest] = {}
        while excess_texts > 0 or excess_bytes > 0:
            largest = int(shares.argmax()) if len(shares) else -1
            if largest < 0 or shares[largest] <= wanted:
                raise self._full(texts, size, columns)
            requests = newest.get(largest) or newest.setdefault(largest, _Newest(columns, largest))
            indexes, freed = requests.take()
            leave.append(indexes)
            excess_texts -= len(indexes)
            excess_bytes -= freed
            shares[largest] = max(requests.texts / self.texts, requests.bytes / self.bytes)
        return np.concatenate(leave)

    def _full(self, texts: Sequence[Waiting], size: int, columns: Columns) -> QueueFull:
        if len(columns) + len(texts) > self.texts:
            return QueueFull(
                f"{len(columns)} texts are waiting and {len(texts)} more would exceed the limit of {self.texts}: "
                "retry after 0.1 s, or send fewer texts in a request"
            )
        return QueueFull(
            f"{columns.bytes} bytes are waiting and {size} more would exceed the limit of {self.bytes}: "
            "retry after 0.1 s, or send fewer or shorter texts in a request"
        )


class _Newest:
    """A tenant's waiting requests, the newest first."""

    def __init__(self, columns: Columns, tenant: int) -> None:
        self._columns = columns
        self._indexes = np.flatnonzero(columns.tenant == tenant)
        self.texts = len(self._indexes)
        self.bytes = int(columns.sizes[tenant])

    def take(self) -> tuple[Array, int]:
        """Returns the indexes of the newest request that is left, and the memory that its texts keep."""
        requests = self._columns.request[self._indexes[: self.texts]]
        first = np.count_nonzero(requests < requests[-1])
        indexes = self._indexes[first : self.texts]
        size = sum(self._columns.text(index).bytes for index in indexes.tolist())
        self.texts = first
        self.bytes -= size
        return indexes, size
