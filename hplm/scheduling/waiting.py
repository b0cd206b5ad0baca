"""What waits: a text, and how much room a batch has."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, eq=False)
class Waiting:
    """One text in line. Times are nanoseconds of the clock the queue is read with."""

    tokens: int
    arrival_ns: int
    deadline_ns: int  # 0: none
    priority: int  # higher goes first, where a policy looks at it
    knowledge: Hashable  # texts that share it share device slots: their tenant and version
    work: Any  # the engine's business

    def expired(self, now_ns: int) -> bool:
        return 0 < self.deadline_ns <= now_ns


@dataclass(frozen=True)
class Capacity:
    """What fits in one batch."""

    tokens: int
    texts: int
    tenants: int
