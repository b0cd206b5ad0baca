"""The papers' workloads as columns of arrivals: when, how long a text, for which tenant, until when.

The native generator, Locust and the simulator of `hplm.scheduling` are all driven by these.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hplm.errors import InvalidInput
from hplm.scheduling.simulation.arrivals import MILLISECOND, SECOND, Arrivals, Lengths

HMI_PERIOD, HMI_REQUESTS = 20.0, 100  # of each tenant (HMI 7.4)
BURST_USERS, BURST_APART, BURST_PERIOD, BURST_REQUESTS = 250, 0.05, 1.2, 50  # HMI 7.4
TCB = Lengths(mean=20, variance=20, least=3, most=100)


@dataclass(frozen=True)
class Mix:
    """What a request is: for whom, how long, how urgent."""

    tenants: int = 1
    zipf: float = 0.0  # the k-th tenant asks 1 / k ** zipf as often as the first; 0: all alike
    lengths: Lengths = TCB
    deadline_ms: tuple[float, float] = (0.0, 0.0)  # uniform between; 0, 0: none

    def draw_tenants(self, count: int, rng: np.random.Generator) -> np.ndarray:
        weights = 1 / np.arange(1, self.tenants + 1) ** self.zipf
        return rng.choice(self.tenants, count, p=weights / weights.sum())

    def draw(self, at: np.ndarray, tenant: np.ndarray | None, rng: np.random.Generator) -> Arrivals:
        """Requests at these seconds."""
        order = np.argsort(at, kind="stable")
        tenant = self.draw_tenants(len(at), rng) if tenant is None else tenant[order]
        return Arrivals(
            at_ns=(at[order] * SECOND).astype(np.int64),
            tokens=self.lengths.draw(len(at), rng),
            allowed_ns=(rng.uniform(*self.deadline_ms, len(at)) * MILLISECOND).astype(np.int64),
            tenant=tenant.astype(np.int64),
            priority=np.zeros(len(at), dtype=np.int64),
        )


def fixed(tokens: int) -> Lengths:
    return Lengths(mean=tokens, variance=0, least=tokens, most=tokens)


def lengths_of(given: str) -> Lengths:
    """`128`: all alike. `normal:20,100`: mean and variance, clipped to 3-100 as in TCB. `normal:20,100,3,512`: to others."""
    kind, _, numbers = given.partition(":")
    try:
        if not numbers:
            return fixed(int(kind))
        mean, variance, *bounds = (float(number) for number in numbers.split(","))
        least, most = (int(bound) for bound in bounds) if bounds else (TCB.least, TCB.most)
        if kind != "normal" or not math.isfinite(mean) or not 0 <= variance < math.inf or not 3 <= least <= most:
            raise ValueError
        return Lengths(mean, variance, least, most)
    except (ValueError, OverflowError):
        raise InvalidInput(f"lengths {given!r}: a number of tokens, or normal:MEAN,VARIANCE[,LEAST,MOST]") from None


def steady(mix: Mix, seed: int = 0, period: float = HMI_PERIOD, each: int = HMI_REQUESTS) -> Arrivals:
    """Every tenant once a period, each begun at its own moment of it."""
    rng = np.random.default_rng(seed)
    begin = rng.uniform(0, period, mix.tenants)
    at = (begin[:, None] + period * np.arange(each)).ravel()
    return mix.draw(at, np.repeat(np.arange(mix.tenants), each), rng)


def burst(
    mix: Mix,
    seed: int = 0,
    users: int = BURST_USERS,
    apart: float = BURST_APART,
    period: float = BURST_PERIOD,
    each: int = BURST_REQUESTS,
) -> Arrivals:
    """One user more every `apart` seconds, each of one tenant, each with a request every `period` seconds."""
    rng = np.random.default_rng(seed)
    at = (apart * np.arange(users)[:, None] + period * np.arange(each)).ravel()
    return mix.draw(at, np.repeat(mix.draw_tenants(users, rng), each), rng)


def gamma(mix: Mix, rate: float, seconds: float, cv: float = 1.0, seed: int = 0) -> Arrivals:
    """So many requests a second on average, whatever becomes of them. `cv` of the gaps: 1 is Poisson, more is burstier."""
    rng = np.random.default_rng(seed)
    shape = 1 / cv**2
    # Enough to reach the end but for one time in a million; what lies beyond it is cut off.
    expected = rate * seconds
    gaps = rng.gamma(shape, 1 / (shape * rate), int(expected + 6 * cv * expected**0.5) + 10)
    at = np.cumsum(gaps)
    return mix.draw(at[at < seconds], None, rng)


def until(arrivals: Arrivals, seconds: float) -> Arrivals:
    kept = arrivals.at_ns < seconds * SECOND
    return Arrivals(*(column[kept] for column in vars(arrivals).values()))


def texts_for(lengths: Sequence[int], vocabulary: Sequence[str], seed: int = 7) -> list[str]:
    """Words by Zipf's law, one token each; with the two special tokens of as many tokens as asked for."""
    rng = np.random.default_rng(seed)
    weights = 1 / np.arange(1, len(vocabulary) + 1)
    drawn: list[int] = rng.choice(len(vocabulary), int(sum(lengths)), p=weights / weights.sum()).tolist()
    ends = np.cumsum(lengths)
    return [
        " ".join(vocabulary[word] for word in drawn[end - length : end - 2]) for length, end in zip(lengths, ends, strict=True)
    ]
