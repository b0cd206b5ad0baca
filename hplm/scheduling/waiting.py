"""What waits: a text as the scheduler sees it, and how much room a batch has."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol, TypeVar


class Waiting(Protocol):
    """One text in line: the engine's, or a simulated one. Times are nanoseconds of the clock that the queue reads."""

    @property
    def tokens(self) -> int: ...
    @property
    def bytes(self) -> int: ...  # that it keeps in memory while it waits
    @property
    def arrival_ns(self) -> int: ...
    @property
    def deadline_ns(self) -> int: ...  # 0: none
    @property
    def priority(self) -> int: ...  # higher goes first, where a policy looks at it
    @property
    def slot_key(self) -> Hashable: ...  # texts that share it share device slots
    @property
    def tenant(self) -> int: ...  # whose share of the engine it takes


T = TypeVar("T", bound=Waiting)  # what waits in one queue


@dataclass(frozen=True)
class Capacity:
    """What fits in one batch."""

    tokens: int
    texts: int
    tenants: int  # device slots: as many different slot keys may share a batch
