"""What waits as columns of numbers, in order of arrival at the line: choosing among ten thousand is a few array operations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from hplm.scheduling.waiting import Waiting

NEVER = np.iinfo(np.int64).max  # the deadline of what has none
FIRST_ROOM = 1024
TOKENS, BYTES, ARRIVAL, DEADLINE, PRIORITY, KNOWLEDGE, TENANT, REQUEST = range(8)


class Numbers:
    """Gives values small numbers of their own, and gives a number again once nobody holds it, so that they index arrays."""

    def __init__(self) -> None:
        self._number: dict[int, int] = {}
        self._value: list[int] = []
        self._held: list[int] = []
        self._free: list[int] = []

    def __len__(self) -> int:
        """All numbers in use are below it."""
        return len(self._value)

    def take(self, value: int) -> int:
        number = self._number.get(value)
        if number is None:
            if self._free:
                number = self._free.pop()
                self._value[number] = value
            else:
                number = len(self._value)
                self._value.append(value)
                self._held.append(0)
            self._number[value] = number
        self._held[number] += 1
        return number

    def give_back(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._held[number] -= 1
            if not self._held[number]:
                del self._number[self._value[number]]
                self._free.append(number)


class Columns:
    """Index i of every column is the same text; `len(columns)` texts wait."""

    def __init__(self, texts: Sequence[Waiting] = ()) -> None:
        self._length = 0
        self._numbers = np.empty((8, FIRST_ROOM), np.int64)
        self._texts = np.empty(FIRST_ROOM, object)
        self._knowledges, self._tenants = Numbers(), Numbers()
        self._requests = 0
        self.add(texts)

    def __len__(self) -> int:
        return self._length

    @property
    def tokens(self) -> np.ndarray:
        return self._numbers[TOKENS, : self._length]

    @property
    def bytes(self) -> np.ndarray:
        return self._numbers[BYTES, : self._length]

    @property
    def arrival(self) -> np.ndarray:
        """Nanoseconds."""
        return self._numbers[ARRIVAL, : self._length]

    @property
    def deadline(self) -> np.ndarray:
        """Nanoseconds; NEVER for none."""
        return self._numbers[DEADLINE, : self._length]

    @property
    def priority(self) -> np.ndarray:
        return self._numbers[PRIORITY, : self._length]

    @property
    def knowledge(self) -> np.ndarray:
        """Small numbers, below `knowledges`."""
        return self._numbers[KNOWLEDGE, : self._length]

    @property
    def tenant(self) -> np.ndarray:
        """Small numbers, below `tenants`."""
        return self._numbers[TENANT, : self._length]

    @property
    def request(self) -> np.ndarray:
        """Texts with the same number came together."""
        return self._numbers[REQUEST, : self._length]

    @property
    def texts(self) -> np.ndarray:
        return self._texts[: self._length]

    @property
    def knowledges(self) -> int:
        return len(self._knowledges)

    @property
    def tenants(self) -> int:
        return len(self._tenants)

    def add(self, texts: Sequence[Waiting]) -> None:
        """The texts of one request."""
        end = self._length + len(texts)
        while end > len(self._texts):
            self._numbers = np.concatenate([self._numbers, np.empty_like(self._numbers)], axis=1)
            self._texts = np.concatenate([self._texts, np.empty_like(self._texts)])
        self._requests += 1
        for i, text in enumerate(texts, self._length):
            self._numbers[:, i] = (
                text.tokens,
                text.bytes,
                text.arrival_ns,
                text.deadline_ns or NEVER,
                text.priority,
                self._knowledges.take(text.knowledge),
                self._tenants.take(text.tenant),
                self._requests,
            )
            self._texts[i] = text
        self._length = end

    def remove(self, indexes: np.ndarray) -> list[Waiting]:
        """Takes these out, and hands them over in the order given."""
        out = self._texts[indexes].tolist()
        self._knowledges.give_back(self.knowledge[indexes].tolist())
        self._tenants.give_back(self.tenant[indexes].tolist())
        stays = np.ones(self._length, bool)
        stays[indexes] = False
        kept = np.flatnonzero(stays)
        self._numbers[:, : len(kept)] = self._numbers.take(kept, axis=1)
        self._texts[: len(kept)] = self._texts.take(kept)
        self._texts[len(kept) : self._length] = None
        self._length = len(kept)
        return out
