"""`hplm bench schedule`: every policy on the same simulated requests, on a virtual clock, or on a trace."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from bench.rows import NotNegative, Positive, Range, Row, Rows, Whole, benchmark, rows_of
from hplm.scheduling.columns import Columns
from hplm.scheduling.cost import CostModel
from hplm.scheduling.limits import Limits
from hplm.scheduling.policy import DEFAULT
from hplm.scheduling.policy import policy as policy_of
from hplm.scheduling.scheduler import Scheduler
from hplm.scheduling.selection import Capacity, Selection
from hplm.simulate.arrivals import Arrivals, Lengths, Stream
from hplm.simulate.encoders import REFUSED, Machine, Outcome, one_stage, simulate_one
from loadtest.traffic import read_recorded

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
CAPACITY = Capacity(TOKENS, TOKENS, TOKENS)
BATCH_NS = 30e6
TEXTS_A_SECOND = TOKENS / MEAN / (BATCH_NS / 1e9)  # at a rate of 1.0
VARIANCES = {"rates_var20": 20, "rates": 100}
WAITING = 10_000
UNBOUNDED = Limits(10**7, 10**12)
SEED = 1


@benchmark(seconds=0.05)
def schedule(
    *,
    seconds: Positive = 3.0,
    deadlines_ms: Range = (50.0, 300.0),
    trace: Path | None = None,
    cost: tuple[NotNegative, NotNegative, NotNegative] = (3e6, 21e3, 0.0),
    policy: str = DEFAULT,
    batch_tokens: Whole = TOKENS,
    commit_ms: NotNegative | None = None,
    admission: bool = False,
) -> Rows:
    """Simulates the server's own scheduler for every policy and rate, in multiples of the capacity.

    Prints the utility (as in TCB: 1 / length of each text that starts in time) and the share of texts answered in time. With
    --trace, arrivals that were recorded from a server are replayed instead.

    :param seconds: of arrivals, for each rate and policy
    :param deadlines_ms: least and most, from which the deadline of each text is drawn
    :param trace: JSONL of arrival (s), tokens, deadline_ms, tenant
    :param cost: with --trace: nanoseconds of a batch, a token and a text, as learned by the server
    :param policy: with --trace: of scheduling
    :param batch_tokens: with --trace: most tokens of a batch
    :param commit_ms: with --trace: how long before the engine is free a batch is chosen; without it, a whole batch ahead
    :param admission: with --trace: refuse requests that cannot be answered in time
    """
    if trace is not None:
        batch, token, text = cost
        machine = Machine(
            one_stage(lambda lengths, places: batch + token * lengths.sum() + text * len(lengths)),
            Capacity(batch_tokens, batch_tokens, batch_tokens),
        )
        outcome = _run(policy, machine, read_recorded(trace).arrivals, commit_ms, admission)
        yield Row("utility", outcome.utility)
        yield Row("scheduled", float(outcome.scheduled.mean()))
        yield Row("on_time", float(outcome.on_time.mean()))
        yield Row("p99_ms", outcome.p99_ms(), "ms")
        yield Row("refused", float((outcome.fate == REFUSED).mean()))
        return
    yield from _encoders(seconds, deadlines_ms)


def _encoders(seconds: float, deadlines_ms: tuple[float, float]) -> Rows:
    machine = Machine(one_stage(lambda lengths, places: 0.1 * BATCH_NS + 0.9 * BATCH_NS * lengths.sum() / TOKENS), CAPACITY)
    every: list[dict[str, dict[str, float]]] = []
    for key, variance in VARIANCES.items():
        for rate in RATES:
            load = Stream(rate * TEXTS_A_SECOND, seconds, Lengths(MEAN, variance), deadlines_ms).draw(SEED)
            outcomes = {name: _run(given, machine, load, 0.0) for name, given in POLICIES.items()}
            every.append({name: {"utility": o.utility, "on_time": float(o.on_time.mean())} for name, o in outcomes.items()})
            yield from rows_of(every[-1], at=f"{key}/{rate}/")
    heaviest = every[-1]
    better = max(heaviest[name]["utility"] for name in ("fcfs", "edf"))
    yield Row("das_over_fcfs_and_edf", heaviest["das"]["utility"] / better if better else None, least=1.3)
    every_best = [(found["default"]["on_time"], max(own["on_time"] for own in found.values())) for found in every]
    yield Row("default_on_time_over_best", min((ours / best for ours, best in every_best if best), default=None), least=1.0)
    yield Row("overhead_share", _overhead(DEFAULT), most=0.02)


def _run(given: str, machine: Machine, load: Arrivals, commit_ms: float | None, admission: bool = False) -> Outcome:
    commit_ns = None if commit_ms is None else int(commit_ms * 1e6)
    return simulate_one(Scheduler([policy_of(given)], UNBOUNDED, admission, commit_ns), machine, load)


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
