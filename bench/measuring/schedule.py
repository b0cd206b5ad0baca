"""Simulates every policy on the same random requests, with the server's own scheduler and a virtual clock."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

import numpy as np

from bench.measuring import schedule_cascades
from bench.schedule import ScheduleBench
from hplm.errors import DeadlineMissed
from hplm.scheduling import columns as columns_of
from hplm.scheduling import timely
from hplm.scheduling.columns import Columns
from hplm.scheduling.cost import CostModel
from hplm.scheduling.limits import Limits
from hplm.scheduling.policy import DEFAULT, policy
from hplm.scheduling.scheduler import Scheduler
from hplm.scheduling.selection import Selection
from hplm.scheduling.simulation.arrivals import Arrivals, Lengths, Stream, read_trace
from hplm.scheduling.simulation.engines import PACKINGS, EngineCost, one_stage
from hplm.scheduling.simulation.server import REFUSED, Machine, Outcome, Simulation
from hplm.scheduling.waiting import Capacity

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
PACKED_WITH = ("default", "das", "slotted_das", "fcfs")  # DAS hands rows over to `concat`, Slotted-DAS slots to `slotted`
TOKENS, MEAN = 1280, 20
CAPACITY = Capacity(TOKENS, TOKENS, TOKENS)
BATCH_NS = 30e6
TEXTS_A_SECOND = TOKENS / MEAN / (BATCH_NS / 1e9)  # at a rate of 1.0
VARIANCES = (20, 100)
WAITING = 10_000
UNBOUNDED = Limits(10**7, 10**12)


def bench_schedule(case: ScheduleBench) -> dict:
    by_variance = {variance: _by_rate(case, variance) for variance in VARIANCES}
    overheads = {name: _overhead(given) for name, given in POLICIES.items()}
    return {
        "rates": by_variance[100],
        "rates_var20": by_variance[20],
        "overhead_share": overheads["default"],
        "overheads": overheads,
        "overhead_share_by_numpy": _overhead(DEFAULT, compiled=False),
        "overhead_share_of_1000": _overhead(DEFAULT, 1000),
        "offer_us": {str(tenants): _offering(tenants) for tenants in (1, WAITING)},
        "packings": {f"var{variance}": _by_packing(case, variance) for variance in VARIANCES},
        "fairness": _fairness(case),
        "admission": _admission(case),
        "cascades": _cascades(case),
        "cascade_latency": schedule_cascades.latency(case, UNBOUNDED),
        "commit": _commit(case),
        "targets": targets(by_variance),
    }


def replay(
    trace: Path, terms: tuple[float, float, float], given: str, batch_tokens: int, commit_ms: float | None, admission: bool
) -> dict:
    """Simulates recorded requests. `terms`: the server's learned cost of a batch, a token and a text, in nanoseconds."""
    batch, token, text = terms
    capacity = Capacity(batch_tokens, batch_tokens, batch_tokens)
    machine = Machine(one_stage(lambda lengths, places: batch + token * lengths.sum() + text * len(lengths)), capacity)
    return _figures(_run(given, machine, read_trace(trace), commit_ms, admission))


def targets(by_variance: dict[int, dict]) -> dict[str, bool]:
    every = [figures for by_rate in by_variance.values() for figures in by_rate.values()]
    heaviest = list(by_variance[100].values())[-1]
    return {
        "das_at_least_fcfs": all(f["das"]["utility"] >= f["fcfs"]["utility"] for f in every),
        "das_at_least_edf": all(f["das"]["utility"] >= f["edf"]["utility"] for f in every),
        "das_1.3_of_both": heaviest["das"]["utility"] >= 1.3 * max(heaviest[name]["utility"] for name in ("fcfs", "edf")),
        "default_at_least_sjf": all(f["default"]["utility"] >= f["sjf"]["utility"] for f in every),
        "default_best_on_time": all(f["default"]["on_time"] >= max(p["on_time"] for p in f.values()) for f in every),
    }


def _stream(case: ScheduleBench, rate: float, variance: float, tenants: Sequence[int] = (0,)) -> Stream:
    lengths = Lengths(MEAN, variance)
    return Stream(rate * TEXTS_A_SECOND, case.seconds, lengths, case.allowed_ms, case.cv, tenants)


def _run(given: str, machine: Machine, load: Arrivals, commit_ms: float | None, admission: bool = False) -> Outcome:
    commit_ns = None if commit_ms is None else int(commit_ms * 1e6)
    return Simulation(Scheduler(policy(given), UNBOUNDED, admission, commit_ns), machine, load).run()


def _figures(outcome: Outcome) -> dict[str, float | None]:
    p99_ms = outcome.p99_ms()
    return {
        "utility": round(outcome.utility, 4),
        "scheduled": round(float(outcome.scheduled.mean()), 4),
        "on_time": round(float(outcome.on_time.mean()), 4),
        "p99_ms": p99_ms and round(p99_ms, 1),
        "refused": round(float((outcome.fate == REFUSED).mean()), 4),
    }


def _by_rate(case: ScheduleBench, variance: int) -> dict[str, dict]:
    machine = Machine(one_stage(EngineCost(score=0).packed), CAPACITY)
    return {
        str(rate): {
            name: _figures(_run(given, machine, load, case.commit_ms))
            for load in [_stream(case, rate, variance).draw(case.seed)]
            for name, given in POLICIES.items()
        }
        for rate in case.rates
    }


def _by_packing(case: ScheduleBench, variance: int) -> dict[str, dict]:
    """Returns the utility, and the number of texts answered in a second, in the order of the rates."""
    loads = [_stream(case, rate, variance).draw(case.seed) for rate in case.rates]
    figures: dict[str, dict] = {}
    for packing in PACKINGS:
        machine = Machine(one_stage(EngineCost().of(packing)), CAPACITY)
        for name in PACKED_WITH:
            outcomes = [_run(POLICIES[name], machine, load, case.commit_ms) for load in loads]
            figures.setdefault(packing, {})[name] = {
                "utility": [round(outcome.utility, 4) for outcome in outcomes],
                "answered_a_second": [round(float((outcome.answered).sum() / outcome.end_ns * 1e9)) for outcome in outcomes],
            }
    return figures


def _fairness(case: ScheduleBench) -> dict[str, dict]:
    """Simulates a tenant that uses a fifth of the capacity: alone, and beside a tenant that sends three times the capacity."""
    modest = _stream(case, 0.2, 20).draw(case.seed)
    long_texts = Stream(0.2 * TEXTS_A_SECOND / 2, case.seconds, Lengths(2 * MEAN, 20), case.allowed_ms).draw(case.seed)
    flood = _stream(case, 3.0, 20, tenants=(1,)).draw(case.seed + 1)
    machine = Machine(one_stage(EngineCost(score=0).packed), CAPACITY)
    loads = {
        "alone": modest,
        "beside_a_flood": Arrivals.together([modest, flood]),
        "long_texts_beside_a_flood": Arrivals.together([long_texts, flood]),
    }
    return {
        name: {
            load_name: _of_first_tenant(_run(POLICIES[name], machine, load, case.commit_ms))
            for load_name, load in loads.items()
        }
        for name in ("default", "fcfs", "sjf")
    }


def _of_first_tenant(outcome: Outcome) -> dict[str, float]:
    mine = outcome.arrivals.tenant == 0
    took = (outcome.answered_ns - outcome.arrivals.at_ns)[mine & outcome.answered]
    return {"on_time": round(float(outcome.on_time[mine].mean()), 4), "p99_ms": round(float(np.percentile(took, 99)) / 1e6, 1)}


def _admission(case: ScheduleBench) -> dict[str, dict]:
    """Simulates admission. Texts have 128 tokens; eight of them take 33 ms, with noise. Deadlines are 2 to 12 batch times."""
    machine = Machine(
        one_stage(lambda lengths, places: 3e6 + 30e6 / 1024 * lengths.sum()), Capacity(1024, 1024, 1024), noise=0.05
    )
    figures = {}
    for rate in case.rates:
        stream = Stream(rate * 8 / 0.033, 10 * case.seconds, Lengths(128, 0, 128, 128), (2 * 33.0, 12 * 33.0))
        outcome = _run(DEFAULT, machine, stream.draw(case.seed), case.commit_ms, admission=True)
        admitted = outcome.fate != REFUSED
        goodput = outcome.on_time.sum() / (outcome.end_ns / 1e9) / (8 / 0.033)
        figures[str(rate)] = {
            "admitted": round(float(admitted.mean()), 4),
            "on_time_of_admitted": round(float(outcome.on_time[admitted].mean()), 4),
            "goodput_of_capacity": round(float(goodput), 4),
        }
    return figures


def _cascades(case: ScheduleBench) -> dict[str, dict]:
    streams = {str(rate): _stream(case, rate, 20) for rate in case.rates}
    return schedule_cascades.in_time(case, streams, Machine(one_stage(EngineCost(score=0).packed), CAPACITY), UNBOUNDED)


def _commit(case: ScheduleBench) -> dict[str, float]:
    """Returns the on-time share for several times at which a batch is chosen before the engine is free. Staging takes 3 ms."""
    machine = Machine(one_stage(EngineCost(score=0).packed), CAPACITY, staging_ns=3_000_000, noise=0.05)
    load = _stream(case, 1.0, 20).draw(case.seed)
    return {
        "a batch ahead" if early is None else f"{early:g} ms": round(
            float(_run(DEFAULT, machine, load, early).on_time.mean()), 4
        )
        for early in (0.0, 1.0, 2.0, 5.0, 10.0, None)
    }


def _overhead(given: str, count: int = WAITING, compiled: bool = True) -> float:
    """Returns the least time of choosing and removing a batch from `count` texts, as a share of the batch's computing time."""
    if not compiled:
        with patch.object(timely, "kernel", lambda: None), patch.object(columns_of, "kernel", lambda: None):
            return _overhead(given, count)
    load = Stream(count, 1.0, Lengths(MEAN, 100), tenants=range(16)).draw(0)
    waiting = [load.text(i) for i in range(count)]
    cost = CostModel()
    for _ in range(20):
        cost.observe(TOKENS, TOKENS // MEAN, 0, int(BATCH_NS))
    chooses, least = policy(given), np.inf
    for _ in range(20):
        columns = Columns(waiting)
        start = time.perf_counter()
        columns.remove(Selection.of(chooses.select(columns, 10**9, CAPACITY, cost)).indexes)
        least = min(least, time.perf_counter() - start)
    return round(least / (BATCH_NS / 1e9), 4)


def _offering(tenants: int) -> dict[str, float]:
    """Returns the median microseconds of a request at a queue with admission that was offered `WAITING` texts.

    The baseline `alone` finds the queue empty. `compared` fits only if it may displace others, so all that wait are looked at.
    """
    scheduler, generator, now = Scheduler(policy(DEFAULT), UNBOUNDED, admission=True), np.random.default_rng(0), int(BATCH_NS)
    capacity = Capacity(4096, 4096, 4096)  # the default of `hplm export`
    full = capacity.tokens // MEAN

    def arrivals(count: int, allowed: tuple[float, float]) -> Arrivals:
        allowed_ns = (generator.uniform(*allowed, count) * BATCH_NS).astype(np.int64)
        lengths = Lengths(MEAN, 20).draw(count, generator)
        return Arrivals(np.full(count, now), lengths, allowed_ns, np.arange(count) % tenants, np.zeros(count, np.int64))

    def offer(load: Arrivals, ends: bool = False) -> float:
        took = []
        for i in range(len(load)):
            text = load.text(i)
            start = time.perf_counter()
            with suppress(DeadlineMissed):
                scheduler.offer([text], now)
            took.append(time.perf_counter() - start)
            if ends:
                scheduler.abandon()
        return round(float(np.median(took)) * 1e6, 1)

    for _ in range(20):  # learns that a batch takes 30 ms
        offer(arrivals(2 * full, (10**6, 10**6)))
        batch = scheduler.choose(capacity, now)
        assert batch
        scheduler.started(batch, now)
        now += int(BATCH_NS)
        scheduler.finished(batch, now)
        scheduler.abandon()
    alone = offer(arrivals(200, (10**6, 10**6)), ends=True)
    batches = 0.8 * WAITING / full  # fewer than the texts need
    offer(arrivals(WAITING, (1, batches)))
    compared = offer(arrivals(200, (3, batches)))
    return {"alone": alone, "taken": offer(arrivals(200, (10**6, 10**6))), "compared": compared, "waiting": len(scheduler)}


def table_of(figures: dict) -> str:
    lines = []
    for key, variance in (("rates_var20", 20), ("rates", 100)):
        lines.append(f"variance {variance}: utility / answered in time, by rate in multiples of capacity")
        names = list(next(iter(figures[key].values())))
        lines.append("  rate " + "".join(f"{name:>15}" for name in names))
        for rate, by_policy in figures[key].items():
            lines.append(f"{rate:>6} " + "".join(f"{f['utility']:>8.3f}/{f['on_time']:.3f} " for f in by_policy.values()))
    shares = f"{figures['overhead_share']:.1%} of a batch's time, by numpy alone {figures['overhead_share_by_numpy']:.1%}"
    lines.append(f"choosing among {WAITING:,} texts: {shares}")
    for tenants, took in figures["offer_us"].items():
        shown = ", ".join(f"{name} {took[name]} us" for name in ("alone", "taken", "compared"))
        lines.append(f"a request beside {took['waiting']:,} waiting texts of up to {int(tenants):,} tenants: {shown}")
    for title in ("fairness", "admission", "cascades", "cascade_latency", "commit", "targets"):
        lines += [title, *(f"  {name}: {value}" for name, value in figures[title].items())]
    return "\n".join(lines)
