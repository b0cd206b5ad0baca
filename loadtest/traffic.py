"""The papers' workloads and recorded traces as columns of arrivals: time, length, tenant and deadline of each request.

The native generator, Locust and `hplm.simulate` all use them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hplm.errors import InvalidInput
from hplm.simulate.arrivals import MILLISECOND, SECOND, Arrivals, Lengths, Stream

HMI_PERIOD, HMI_REQUESTS = 20.0, 100  # of each tenant (HMI 7.4)
BURST_USERS, BURST_APART, BURST_PERIOD, BURST_REQUESTS = 250, 0.05, 1.2, 50  # HMI 7.4
TCB = Lengths(mean=20, variance=20, least=3, most=100)
LONGEST = 1_000_000  # tokens; more is a slip
ANSWERS = Lengths(mean=40, least=8, most=128)  # tokens of generated answers, geometrically distributed


@dataclass(frozen=True)
class Mix:
    """The distributions from which a request's tenant, length and deadline are drawn."""

    tenants: int = 1
    zipf: float = 0.0  # the k-th tenant sends 1 / k ** zipf as many requests as the first; 0: all send as many
    lengths: Lengths = TCB
    deadline_ms: tuple[float, float] = (0.0, 0.0)  # uniform between these; 0, 0: no deadline

    def draw_tenants(self, count: int, rng: np.random.Generator) -> np.ndarray:
        weights = 1 / np.arange(1, self.tenants + 1) ** self.zipf
        return rng.choice(self.tenants, count, p=weights / weights.sum())

    def draw(self, at: np.ndarray, tenant: np.ndarray | None, rng: np.random.Generator) -> Arrivals:
        """Draws requests that arrive at these seconds."""
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


def answer_lengths(count: int, seed: int = 0) -> list[int]:
    """Returns how many tokens the answers of decoders have."""
    drawn = ANSWERS.least + np.random.default_rng(seed).geometric(1 / (ANSWERS.mean - ANSWERS.least), count)
    return np.minimum(drawn, ANSWERS.most).tolist()


def lengths_of(given: str) -> Lengths:
    """Reads a distribution: `128` for one length, or `normal:MEAN,VARIANCE`, clipped to 3-100 as in TCB.

    `normal:20,100,3,512` clips to other bounds.
    """
    kind, _, numbers = given.partition(":")
    try:
        if not numbers:
            found = fixed(int(kind))
        else:
            mean, variance, *bounds = (float(number) for number in numbers.split(","))
            least, most = (int(bound) for bound in bounds) if bounds else (TCB.least, TCB.most)
            if kind != "normal" or not math.isfinite(mean) or not 0 <= variance < math.inf:
                raise ValueError
            found = Lengths(mean, variance, least, most)
        if not TCB.least <= found.least <= found.most <= LONGEST:
            raise ValueError
        return found
    except (ValueError, OverflowError):
        raise InvalidInput(
            f"lengths {given!r}: give a number of tokens from {TCB.least} to {LONGEST:,}, or normal:MEAN,VARIANCE[,LEAST,MOST]"
        ) from None


def steady(mix: Mix, seed: int = 0, period: float = HMI_PERIOD) -> Arrivals:
    """Each tenant sends a request once a period, at its own random moment of the period."""
    rng = np.random.default_rng(seed)
    begin = rng.uniform(0, period, mix.tenants)
    at = (begin[:, None] + period * np.arange(HMI_REQUESTS)).ravel()
    return mix.draw(at, np.repeat(np.arange(mix.tenants), HMI_REQUESTS), rng)


def burst(mix: Mix, seed: int = 0) -> Arrivals:
    """A user starts every 0.05 seconds. Each belongs to one tenant and sends a request every 1.2 seconds."""
    rng = np.random.default_rng(seed)
    at = (BURST_APART * np.arange(BURST_USERS)[:, None] + BURST_PERIOD * np.arange(BURST_REQUESTS)).ravel()
    return mix.draw(at, np.repeat(mix.draw_tenants(BURST_USERS, rng), BURST_REQUESTS), rng)


def gamma(mix: Mix, rate: float, seconds: float, cv: float = 1.0, seed: int = 0) -> Arrivals:
    """Draws `rate` requests a second on average. `cv` of the gaps: 1 is Poisson, with more they come in bursts."""
    # These gaps reach the end in all but one case of a million. Requests after the end are dropped.
    enough = seconds + 6 * cv * (seconds / rate) ** 0.5 + 10 / rate
    at = Stream(rate, enough, cv=cv).draw(seed).at_ns / SECOND
    return mix.draw(at[at < seconds], None, np.random.default_rng([seed, 1]))


def until(arrivals: Arrivals, seconds: float) -> Arrivals:
    kept = arrivals.at_ns < seconds * SECOND
    return Arrivals(*(column[kept] for column in vars(arrivals).values()))


def texts_for(lengths: Sequence[int], vocabulary: Sequence[str], seed: int = 7) -> list[str]:
    """Returns texts of these lengths, whose words follow Zipf's law. A word is one token; two special tokens are added."""
    rng = np.random.default_rng(seed)
    weights = 1 / np.arange(1, len(vocabulary) + 1)
    drawn: list[int] = rng.choice(len(vocabulary), int(sum(lengths)), p=weights / weights.sum()).tolist()
    ends = np.cumsum(lengths)
    return [
        " ".join(vocabulary[word] for word in drawn[end - length : end - 2]) for length, end in zip(lengths, ends, strict=True)
    ]


@dataclass(frozen=True)
class Recorded:
    arrivals: Arrivals
    texts: list[str | None]


def read_recorded(path: Path, tenants: Sequence[str]) -> Recorded:
    """Reads JSONL: `arrival` in seconds, `tokens` or `text`, and optionally `deadline_ms`, `tenant`, `priority`.

    A tenant that the server does not have is replaced by one that it has, always by the same one.
    """
    known = {name: number for number, name in enumerate(tenants)}
    strangers: dict[str, int] = {}
    rows, texts = [], []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            row = json.loads(line)
            name, text = str(row.get("tenant", "")), row.get("text")
            tenant = known[name] if name in known else strangers.setdefault(name, len(strangers) % len(tenants))
            tokens = int(row["tokens"]) if text is None else int(row.get("tokens", len(text.split()) + 2))
            allowed = int(float(row.get("deadline_ms", 0)) * MILLISECOND)
            if tokens < 1 or allowed < 0:
                raise ValueError(f"{tokens} tokens, {allowed / MILLISECOND:g} ms until the deadline")
            rows.append((int(float(row["arrival"]) * SECOND), tokens, allowed, tenant, int(row.get("priority", 0))))
            texts.append(text)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise InvalidInput(f"{path}, line {number} is not a recorded request ({error!r}): see docs/loadtest.md") from None
    if not rows:
        raise InvalidInput(f"{path} contains no requests: see docs/loadtest.md")
    try:
        columns = np.array(rows, dtype=np.int64)
    except OverflowError:
        raise InvalidInput(f"{path} has a number of more than 64 bits: correct it") from None
    columns[:, 0] -= columns[:, 0].min()
    order = np.argsort(columns[:, 0], kind="stable")
    return Recorded(Arrivals(*columns[order].T), [texts[i] for i in order.tolist()])
