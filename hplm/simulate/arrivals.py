"""Simulated arrivals with their times, lengths and deadlines."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hplm.arrays import Array

SECOND, MILLISECOND = 10**9, 10**6


@dataclass(slots=True, eq=False, kw_only=True)
class SimulatedText:
    """A waiting text that has a length and times, but no tokens and no answer."""

    tokens: int
    bytes: int = 0
    arrival_ns: int
    deadline_ns: int = 0
    priority: int = 0
    slot_key: Hashable = 0
    tenant: int = 0
    number: int = 0  # index in the arrivals
    request: Any = None  # set by the server that it goes to


@dataclass(frozen=True)
class Lengths:
    """Lengths of texts in tokens: normally distributed and clipped, as in TCB."""

    mean: float = 20.0
    variance: float = 20.0
    least: int = 3
    most: int = 100

    def draw(self, count: int, rng: np.random.Generator) -> Array:
        drawn = rng.normal(self.mean, self.variance**0.5, count)
        return np.clip(np.rint(drawn), self.least, self.most).astype(np.int64)


@dataclass(frozen=True)
class Arrivals:
    """Arrivals as columns, in order of time."""

    at_ns: Array
    tokens: Array
    allowed_ns: Array  # from arrival to deadline; 0: no deadline
    tenant: Array
    priority: Array

    def __len__(self) -> int:
        return len(self.at_ns)

    def text(self, i: int) -> SimulatedText:
        at, allowed, tenant = int(self.at_ns[i]), int(self.allowed_ns[i]), int(self.tenant[i])
        return SimulatedText(
            tokens=int(self.tokens[i]),
            arrival_ns=at,
            deadline_ns=at + allowed if allowed else 0,
            priority=int(self.priority[i]),
            slot_key=tenant,
            tenant=tenant,
            number=i,
        )

    @classmethod
    def together(cls, streams: Sequence[Arrivals]) -> Arrivals:
        at = np.concatenate([stream.at_ns for stream in streams])
        order = np.argsort(at, kind="stable")
        names = ("at_ns", "tokens", "allowed_ns", "tenant", "priority")
        return cls(*(np.concatenate([getattr(stream, name) for stream in streams])[order] for name in names))


@dataclass(frozen=True)
class Stream:
    """A random load: `rate` texts a second for `seconds`.

    `cv` is the coefficient of variation of the gaps between arrivals (Gamma); 1 is Poisson.
    """

    rate: float
    seconds: float
    lengths: Lengths = Lengths()
    allowed_ms: tuple[float, float] = (50.0, 300.0)  # uniform; (0, 0): no deadline
    cv: float = 1.0
    tenants: Sequence[int] = (0,)  # each text belongs to one of these, chosen at random
    priority: int = 0

    def draw(self, seed: int) -> Arrivals:
        rng = np.random.default_rng(seed)
        count = int(self.rate * self.seconds)
        shape = 1 / self.cv**2
        gaps = rng.gamma(shape, 1 / (shape * self.rate), count)
        return Arrivals(
            at_ns=(np.cumsum(gaps) * SECOND).astype(np.int64),
            tokens=self.lengths.draw(count, rng),
            allowed_ns=(rng.uniform(*self.allowed_ms, count) * MILLISECOND).astype(np.int64),
            tenant=rng.choice(np.asarray(self.tenants), count),
            priority=np.full(count, self.priority),
        )
