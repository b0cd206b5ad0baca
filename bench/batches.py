"""`hplm bench batches`: how long texts wait for answers in batches that are bounded in three ways, on a virtual clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import numpy as np

from bench.rows import Positive, Row, Rows, benchmark
from hplm.scheduling.limits import Limits
from hplm.scheduling.policy import DEFAULT, policy
from hplm.scheduling.queue import LEAST_TOKENS
from hplm.scheduling.scheduler import Scheduler
from hplm.scheduling.selection import Capacity
from hplm.simulate.arrivals import Arrivals, Lengths, Stream
from hplm.simulate.encoders import SimulatedEngine, one_stage, simulate_one

TOKENS = 128  # of a text
BATCH_MS, TEXT_MS = 15.0, 21.0  # of BERT-base in bf16 on two cores: what a batch takes, and each text in it
BOUND_NS = 50_000_000  # as exports have it
LOADS = 0.3, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9  # of what batches without an end would answer
HEAVY = 0.9
CAPACITY = Capacity(32 * TOKENS, 32, 32)
TEXTS_A_SECOND = 1e3 / TEXT_MS
LENGTHS = Lengths(TOKENS, 0.0, TOKENS, TOKENS)
QUIET, QUIET_LOAD = 9, 0.1  # a tenant, and its load
BURST = 16  # texts that the others send at once
PERCENTILES = 50, 99
UNLIMITED = Limits(10**7, 10**12)
SEED = 1


class Fixed(Scheduler):
    """Bounds batches without a look at the line."""

    def bounded(self, capacity: Capacity, batch_ns: int, start_ns: int) -> Capacity:
        if not self.known:
            return capacity
        mean = self.columns.all_tokens / len(self.columns)
        return replace(capacity, tokens=max(LEAST_TOKENS, self.cost.tokens_within(batch_ns, mean, self.loaded)))


WAYS: dict[str, Callable[[], Scheduler]] = {
    "follows_line": lambda: Scheduler(policy(DEFAULT), UNLIMITED, commit_ns=0, batch_ns=BOUND_NS),
    "fixed": lambda: Fixed(policy(DEFAULT), UNLIMITED, commit_ns=0, batch_ns=BOUND_NS),
    "no_bound": lambda: Scheduler(policy(DEFAULT), UNLIMITED, commit_ns=0),
}


@benchmark(seconds=10.0)
def batches(*, seconds: Positive = 100.0) -> Rows:
    """Simulates the server's own scheduler with a bound on batches that follows the line, a fixed one, and none.

    Prints p50 and p99 over the load, of texts without deadlines: of 16 tenants alike, and of a quiet tenant beside three that
    send many texts at once. Batches take as long as BERT-base's on two cores, longer than the bound from two texts on.

    :param seconds: of arrivals, for each load and bound
    """
    machine = SimulatedEngine(one_stage(lambda lengths, places: 1e6 * (BATCH_MS + TEXT_MS * lengths.sum() / TOKENS)), CAPACITY)
    heavy: dict[tuple[str, str], list[float]] = {}
    for load in LOADS:
        for who, arrivals in (("all", _alike(load, seconds)), ("quiet", _beside_bursts(load, seconds))):
            for way, scheduler in WAYS.items():
                outcome = simulate_one(scheduler(), machine, arrivals)
                took_ms = (outcome.answered_ns - arrivals.at_ns) / 1e6
                found = np.percentile(took_ms[(arrivals.tenant == QUIET) | (who == "all")], PERCENTILES).tolist()
                yield from (Row(f"{who}_p{part}/{load}/{way}", ms, "ms") for part, ms in zip(PERCENTILES, found, strict=True))
                if load == HEAVY:
                    heavy[who, way] = found
    for who, other in (("all", "fixed"), ("quiet", "no_bound")):
        for part, ours, theirs in zip(PERCENTILES, heavy[who, "follows_line"], heavy[who, other], strict=True):
            yield Row(f"{who}_p{part}_over_{other}", ours / theirs, most=1.0)


def _alike(load: float, seconds: float) -> Arrivals:
    return Stream(load * TEXTS_A_SECOND, seconds, LENGTHS, (0.0, 0.0), tenants=range(16)).draw(SEED)


def _beside_bursts(load: float, seconds: float) -> Arrivals:
    """Returns a quiet tenant's texts, and in all as many as `load` says."""
    quiet = Stream(QUIET_LOAD * TEXTS_A_SECOND, seconds, LENGTHS, (0.0, 0.0), tenants=(QUIET,)).draw(SEED)
    rate = (load - QUIET_LOAD) * TEXTS_A_SECOND / BURST
    first = Stream(rate, seconds, LENGTHS, (0.0, 0.0), tenants=range(3)).draw(SEED + 1)
    columns = (getattr(first, field.name).repeat(BURST) for field in fields(first))
    return Arrivals.together([quiet, Arrivals(*columns)])
