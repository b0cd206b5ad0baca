"""What waits: a text, and how much room a batch has."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Waiting:
    """One text in line. Times are nanoseconds of the clock the line is read with."""

    tokens: int
    bytes: int = 0  # what it keeps in memory while it waits
    arrival_ns: int
    deadline_ns: int = 0  # 0: none
    priority: int = 0  # higher goes first, where a policy looks at it
    knowledge: Hashable = 0  # texts that share it share device slots
    tenant: int = 0  # whose share of the engine it takes
    work: Any = None  # the engine's business


@dataclass(frozen=True)
class Capacity:
    """What fits in one batch."""

    tokens: int
    texts: int
    tenants: int  # device slots: as many different `knowledge` may share a batch
