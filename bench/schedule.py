"""`hplm bench schedule`: every policy on the same simulated requests, on a virtual clock."""

from __future__ import annotations

import time

import numpy as np

from bench.rows import Positive, Row, Rows, benchmark, rows_of
from hplm.scheduling.columns import Columns
from hplm.scheduling.cost import CostModel
from hplm.scheduling.limits import Limits
from hplm.scheduling.policy import DEFAULT
from hplm.scheduling.policy import policy as policy_of
from hplm.scheduling.scheduler import Scheduler
from hplm.scheduling.selection import Capacity, Selection
from hplm.simulate.arrivals import Arrivals, Lengths, Stream
from hplm.simulate.encoders import Outcome, SimulatedEngine, one_stage, simulate_one

POLICIES = {
    "default": DEFAULT,
    "das": "das",
    "slotted_das": "slotted_das",
    "fcfs": "fcfs",
    "sjf": "sjf",
    "sjf_in_time": "sjf:in_time=1",
    "edf": "edf",
    "length_aware": "length_aware",
}
RATES = (0.5, 0.8, 1.0, 1.5, 2.0, 3.0)  # multiples of the capacity
TOKENS, MEAN = 1280, 20
DEADLINES_MS = 50.0, 300.0  # least and most, from which the deadline of each text is drawn
CAPACITY = Capacity(TOKENS, TOKENS, TOKENS)
BATCH_NS = 30e6
TEXTS_A_SECOND = TOKENS / MEAN / (BATCH_NS / 1e9)  # at a rate of 1.0
VARIANCES = {"rates_var20": 20, "rates": 100}
WAITING = 10_000
UNBOUNDED = Limits(10**7, 10**12)
SEED = 1


@benchmark(seconds=0.05)
def schedule(*, seconds: Positive = 3.0) -> Rows:
    """Simulates the server's own scheduler for every policy and rate, in multiples of the capacity.

    Prints the utility (as in TCB: 1 / length of each text that starts in time) and the share of texts answered in time.
    `hplm place simulate` replays a server's journal.

    :param seconds: of arrivals, for each rate and policy
    """
    machine = SimulatedEngine(
        one_stage(lambda lengths, places: 0.1 * BATCH_NS + 0.9 * BATCH_NS * lengths.sum() / TOKENS), CAPACITY
    )
    every: list[dict[str, dict[str, float]]] = []
    for key, variance in VARIANCES.items():
        for rate in RATES:
            load = Stream(rate * TEXTS_A_SECOND, seconds, Lengths(MEAN, variance), DEADLINES_MS).draw(SEED)
            outcomes = {name: _run(given, machine, load) for name, given in POLICIES.items()}
            every.append({name: {"utility": o.utility, "on_time": float(o.on_time.mean())} for name, o in outcomes.items()})
            yield from rows_of(every[-1], at=f"{key}/{rate}/")
    heaviest = every[-1]
    better = max(heaviest[name]["utility"] for name in ("fcfs", "edf"))
    yield Row("das_over_fcfs_and_edf", heaviest["das"]["utility"] / better if better else None, least=1.3)
    every_best = [(found["default"]["on_time"], max(own["on_time"] for own in found.values())) for found in every]
    yield Row("default_on_time_over_best", min((ours / best for ours, best in every_best if best), default=None), least=1.0)
    yield Row("overhead_share", _overhead(DEFAULT), most=0.02)


def _run(given: str, machine: SimulatedEngine, load: Arrivals) -> Outcome:
    return simulate_one(Scheduler(policy_of(given), UNBOUNDED, commit_ns=0), machine, load)


def _overhead(given: str) -> float:
    """Returns the least time of choosing and removing a batch of `WAITING` texts, as a share of the batch's computing time."""
    load = Stream(WAITING, 1.0, Lengths(MEAN, 100), tenants=range(16)).draw(0)
    waiting, cost = [load.text(i) for i in range(WAITING)], CostModel()
    for _ in range(20):
        cost.observe(TOKENS, TOKENS // MEAN, 0, int(BATCH_NS))
    chooses, least = policy_of(given), np.inf
    for _ in range(20):
        columns = Columns(waiting)
        assert len(columns.rows) == WAITING  # reads them once: only then texts get their rows
        start = time.perf_counter()
        columns.remove(Selection.of(chooses.select(columns, 10**9, CAPACITY, cost)).indexes)
        least = min(least, time.perf_counter() - start)
    return least / (BATCH_NS / 1e9)
