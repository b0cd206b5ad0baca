"""Predicts when a request would get its first token and its last, and how many tokens the next step may have."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from hplm.generation.running import Running
from hplm.scheduling.cost import FIRST, Cost, CostModel

LEAST_CHUNK = 16  # tokens of prompts in a step, even if a promise for single tokens is broken by it: prompts must get on
SLOWER = 3  # so many times as long may a step take because of prompts, if sequences grow beside them


class Ahead(NamedTuple):
    """Counts what waits before a request."""

    sequences: float = 0
    tokens: float = 0  # of prompts
    places: float = 0

    def plus(self, other: Ahead, times: float = 1) -> Ahead:
        return Ahead(*(own + times * its for own, its in zip(self, other, strict=True)))


class Load:
    """The sequences that run after a step. By it the queue refuses at once what cannot be in time."""

    def __init__(self, running: Running, cost: Cost) -> None:
        """`cost`: of a step. Tokens and places are those of the cache."""
        sequences, share = running.sequences, running.learned.share
        self.running, self.cost = running, cost
        self.free = running.spare  # places that no running sequence is expected to need
        self.uncomputed = running.uncomputed  # tokens of prompts that have started
        # The tenants of those that run: whether a prompt is still read.
        self.tenants = {one.tenant: one.uncomputed > 1 for one in sorted(sequences, key=lambda one: one.uncomputed)}
        # Tokens left, and places in the end, of each that runs; the next end first.
        self.ends = sorted((one.expected(share), running.places(one)) for one in sequences)
        lengths = [one.request.sampling.max_tokens for one in sequences]
        self.mean_tokens = share * sum(lengths) / len(lengths) if lengths else 1.0  # of an answer
        # Further answers to requests that have started.
        self.further = Ahead(len(running.further), 0, sum(map(running.places, running.further)))

    @property
    def token_ns(self) -> float:
        """The time that another token of a prompt adds to a step."""
        return float(self.cost.terms[1])

    def decoding_ns(self, sequences: float) -> float:
        """Returns how long a step takes that adds a token to so many sequences."""
        return self.cost.predict(sequences, sequences)

    def fair_ns(self, sequences: int, tenants: int, reading: int) -> float:
        """Returns how long a step takes in which each tenant that only reads a prompt has an equal share of the time.

        `sequences`: those that it adds a token to. `tenants`: all that have sequences in it.
        """
        growing_ns = self.decoding_ns(sequences)
        return min(growing_ns * tenants / (tenants - reading), growing_ns + self.running.step_tokens * self.token_ns)

    def steps_until(self, places: float, seats: float) -> float:
        """Returns after how many steps there are so many free places and seats."""
        all_places, all_seats = self.running.cache.tokens, self.running.seats
        places -= self.free
        seats -= all_seats - len(self.ends)
        steps = 0.0
        for left, size in self.ends:
            if places <= 0 and seats <= 0:
                return steps
            steps, places, seats = left, places - size, seats - 1
        rounds = max(0, ceil(places / all_places), ceil(seats / all_seats))
        return steps + rounds * self.mean_tokens


def forecast(load: Load, ahead: Ahead, prompt: int, places: int) -> tuple[float, float]:
    """Returns when a request would get its first token, from now on, and the time between two tokens.

    Its prompt has so many tokens, and it needs so many places to start.
    """
    together = min(load.running.seats, len(load.ends) + ahead.sequences + 1)
    step_ns = load.decoding_ns(together)
    waits = load.steps_until(ahead.places + places, ahead.sequences + 1) * step_ns
    reading = (load.uncomputed + ahead.tokens + prompt) * load.token_ns
    return waits + reading + step_ns, step_ns


def most_tokens(running: Running, cost: CostModel) -> int:
    """Returns how many tokens a step may have, so that pieces of prompts do not hold up sequences that grow.

    They may take the fair share of their tenants, or SLOWER times what the step takes without them. A promise for the time
    between tokens lowers the second one.
    """
    sequences = running.sequences
    growing = [one for one in sequences if one.uncomputed == 1]
    if not growing or len(growing) == len(sequences) or cost.observed < FIRST:
        return running.step_tokens
    load, promised = Load(running, cost), [one for one in growing if one.request.promise.token_ns]
    reading = {one.tenant for one in sequences if one.uncomputed > 1} - {one.tenant for one in promised or growing}
    fair_ns = load.fair_ns(len(growing), len({one.tenant for one in sequences}), len(reading))
    without = load.decoding_ns(len(growing))
    bound = max(fair_ns, min([SLOWER * without, *(one.request.promise.token_ns for one in promised)]))
    allowed = len(growing) + int((bound - without) / max(load.token_ns, 1e-9))
    return min(running.step_tokens, max(allowed, len(growing) + LEAST_CHUNK))
