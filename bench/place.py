"""`hplm bench place`: placement by search beside replication and other baselines, on simulators or beside real servers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import mean

import numpy as np

from bench.alpaserve import PAPER, cluster_of, models, problem_of, profile_of
from bench.place_served import ServedBench, measured_rows, shared_rows
from bench.rows import EngineDtype, Positive, Row, Rows, Size, Whole, benchmark
from hplm.errors import HplmError, InvalidInput
from hplm.placement.attained import Attained
from hplm.placement.baselines import baseline
from hplm.placement.partition import Parallel, groups_of
from hplm.placement.problem import Groups, Problem
from hplm.placement.profile import Terms
from hplm.placement.search import NothingFound, search
from hplm.placement.selection import beam, fast
from hplm.placement.servers import Serving
from hplm.placement.simulation import simulate
from hplm.placement.units import units_of
from hplm.placement.workload import synthetic
from hplm.scheduling.simulation.arrivals import Lengths

ATTAINED = 0.99
STEPS = 7  # of a bisection
NO_DEADLINE = 1e6  # an SLO scale at which nothing is refused
FIG2 = {"poisson": (1.0, (0.5, 0.5)), "cv3": (3.0, (0.5, 0.5)), "skew": (1.0, (0.2, 0.8))}
BATCHES = Serving(batch_tokens=1280)
DAY_S, DAY_REQUESTS = 86_400.0, 3_500_000
SCALES = (1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 20.0)  # deadlines: multiples of a text's time on one core


@dataclass(frozen=True)
class PlaceBench:
    seconds: float  # of requests in each simulation
    seeds: int


@benchmark(seconds=20.0, seeds=1, size="minilm", measured_seconds=3.0, scales=(4.0,), tenants=2, rounds=1)
def place(
    *,
    seconds: Positive = 200.0,
    seeds: Whole = 3,
    day: bool = False,
    measured: bool = False,
    shared: bool = False,
    size: Size = "bert-base",
    dtype: EngineDtype = "auto",
    measured_seconds: Positive = 25.0,
    scales: tuple[Positive, ...] = SCALES,
    tenants: Whole = 8,
    rounds: Whole = 5,
) -> Rows:
    """Simulates AlpaServe's models, from the paper's tables, on simulated devices. No model runs.

    Table 2, Fig. 2, the highest rates with 99 % of the requests in time, and the speed of the search, the screen and the full
    simulator. `python -m research.papers alpaserve` has the curves. --measured compares the simulators with real servers
    instead, and --shared measures Fig. 2 with real servers: stop other work on the machine first.

    :param seconds: of requests in each simulation
    :param seeds: loads to average over
    :param day: also search for 3.5 million requests of a day on 64 devices
    :param measured: only serve two placements on two cores of this machine, beside their simulation
    :param shared: only serve two backbones on two cores of this machine, a core each and in two stages
    :param size: of the served model
    :param dtype: precision of the served model
    :param measured_seconds: of requests for each deadline or load, and placement
    :param scales: with --measured: deadlines, as multiples of a text's time on one core
    :param tenants: of each served repository
    :param rounds: of the profile, or of the loads
    """
    if measured and shared:
        raise InvalidInput("--measured and --shared are two measurements: give one of them")
    if measured:
        yield from measured_rows(ServedBench(size, dtype, tenants, measured_seconds, rounds), scales)
    elif shared:
        yield from shared_rows(ServedBench(size, dtype, tenants, measured_seconds, rounds))
    else:
        yield from _simulated(PlaceBench(seconds, seeds))
        if day:
            yield from _day()


def _simulated(case: PlaceBench) -> Rows:
    table = _table2(case)
    for scale, row in table.items():
        for name, share in row.items():
            yield Row(f"simulated_table2/{scale}/{name}", share)
    yield Row("table2_error", max(abs(row["replication"] - row["paper_replication"]) for row in table.values()))
    for name, given in FIG2.items():
        yield Row(f"simulated_fig2_{name}", _fig2(case, *given))
    heuristic = [_heuristic(case, seed) for seed in range(case.seeds)]
    yield Row("heuristic_attainment", mean(own["attained"] for own in heuristic))
    yield Row("heuristic_time", mean(own["time"] for own in heuristic))
    yield Row("rate_over_replication", mean(_rates(case, seed) for seed in range(case.seeds)))
    yield Row("rate_over_unpartitioned", mean(_unpartitioned(case, seed) for seed in range(case.seeds)))
    for name, rate in _speeds(case).items():
        yield Row(name, rate, "/s")


def share_of(problem: Problem, most_stages: int | None = None) -> float:
    """Returns the share of a search; 0 where no placement is ever in time."""
    try:
        return search(problem, most_stages=most_stages)[0].attained.share
    except NothingFound:
        return 0.0


def highest_rate(share_at: Callable[[float], float], first: float) -> float:
    """Returns the highest rate at which enough requests are in time, within 1.5 %. `first`: a guess."""
    low = high = first
    while share_at(low) < ATTAINED:
        low, high = low / 2, low
    while high == low or share_at(high) >= ATTAINED:
        low, high = high, high * 2
    for _ in range(STEPS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if share_at(middle) >= ATTAINED else (low, middle)
    return low


def table2_problem(case: PlaceBench, seed: int, scale: float = 5.0, rate: float = 40.0) -> Problem:
    return problem_of(["BERT-2.7B"] * 24, 16, rate, 4.0, scale, case.seconds, seed)


def _table2(case: PlaceBench) -> dict[str, dict[str, float]]:
    paper, rows = PAPER["table2"], {}
    for scale, replication, alpaserve in zip(paper["scales"], paper["replication"], paper["alpaserve"], strict=True):
        problems = [table2_problem(case, seed, scale) for seed in range(case.seeds)]
        rows[f"{scale:g}"] = {
            "replication": mean(baseline("replication", problem).attained.share for problem in problems),
            "paper_replication": replication,
            "search": mean(map(share_of, problems)),
            "paper_alpaserve": alpaserve,
        }
    return rows


def _fig2(case: PlaceBench, cv: float, shares: tuple[float, float]) -> float:
    """Returns the mean latency of a device a model over that of two stages for both, with 3 requests a second in all."""
    problem = problem_of(["BERT-6.7B"] * 2, 2, 3.0, cv, NO_DEADLINE, 100 * case.seconds, 0, shares)
    simple, pipelined = (_filled(problem, Parallel(stages, 1)) for stages in (1, 2))
    alone, piped = simple.mean_ms(), pipelined.mean_ms()
    if alone is None or piped is None:
        raise HplmError("Fig. 2: a placement answered no request, so there is no mean latency: give more --seconds")
    return alone / piped


def _filled(problem: Problem, parallel: Parallel) -> Attained:
    """Gives each unit to the first group that has room for it."""
    groups = groups_of(problem, parallel)
    for unit in problem.units:
        grown = (problem.room.added(groups, at, unit.name) for at in range(len(groups)))
        groups = next((own for own in grown if own is not None), groups)
    return problem.screen.attained(groups)


def _heuristic(case: PlaceBench, seed: int) -> dict[str, float]:
    """Compares both ways of Algorithm 1, on pipelines of four stages."""
    problem = table2_problem(case, seed, rate=60.0)
    groups = groups_of(problem, Parallel(4, 1))
    problem.screen.attained(groups)  # loads the kernel
    timed = []
    for select in (fast, beam):
        begins = time.perf_counter()
        timed.append((select(problem, groups).share, time.perf_counter() - begins))
    return {"attained": timed[0][0] / timed[1][0], "time": timed[0][1] / timed[1][1]}


def _rates(case: PlaceBench, seed: int) -> float:
    """Returns the highest rate of a search over that of replication, for the models and devices of Table 2."""
    ours = highest_rate(lambda rate: share_of(table2_problem(case, seed, rate=rate)), 20.0)
    others = highest_rate(lambda rate: baseline("replication", table2_problem(case, seed, rate=rate)).attained.share, 4.0)
    return ours / others


def _unpartitioned(case: PlaceBench, seed: int) -> float:
    """Returns the highest rate of a search over that of four-stage pipelines everywhere, for the 60 models of S3 (Fig. 17)."""
    kinds = models(PAPER["sets"]["S3"])

    def problem(rate: float) -> Problem:
        return problem_of(kinds, 64, rate, 4.0, 5.0, case.seconds / 4, seed)

    ours = highest_rate(lambda rate: share_of(problem(rate)), 80.0)
    return ours / highest_rate(lambda rate: baseline("greedy:4", problem(rate)).attained.share, 60.0)


def _speeds(case: PlaceBench) -> dict[str, float]:
    """Times the simulators: the full one with our texts in batches of dozens, and with the paper's, where each is a batch."""
    problem = problem_of(["BERT-2.7B"] * 24, 16, 40.0, 4.0, 5.0, 50 * case.seconds, 0)
    found = baseline("greedy:4", problem.on(problem.trace.sampled(20_000)))
    alone = problem.trace.sampled(10_000, 1)
    groups, batched = _batched(case)
    return {
        "screen_texts_per_s": len(problem.trace) / _timed(lambda: problem.screen.attained(found.groups)),
        "full_texts_per_s": len(batched.trace) / _timed(lambda: simulate(groups, batched.profile, batched.trace, BATCHES)),
        "full_texts_per_s_alone": len(alone) / _timed(lambda: simulate(found.groups, problem.profile, alone, Serving())),
    }


def _batched(case: PlaceBench) -> tuple[Groups, Problem]:
    """Returns four devices at 0.8 of what they can: texts of 20 tokens, batches of 1,280 tokens in 30 ms."""
    usual = profile_of(["BERT-1.3B"])
    times = {1: (Terms(1.5e6, 27e6 / 1280 / 2),) * 2}
    small = replace(usual.backbones["model-0"], layers=2, layer_bytes=(1, 1), times=times)
    profile = replace(usual, backbones={"model-0": small})
    units = units_of(profile)
    trace = synthetic({units[0].name: 0.8 * 4 * 1280 / 20 / 0.030}, case.seconds / 20, 1.0, Lengths(20, 100))
    trace = trace.with_timeouts(np.random.default_rng(0).uniform(50e6, 300e6, len(trace)))
    problem = Problem(cluster_of(4), profile, units, trace)
    groups = groups_of(problem, Parallel(1, 1))
    for at in range(len(groups)):
        groups = problem.room.added(groups, at, units[0].name) or groups
    return groups, problem


def _timed(run: Callable[[], object]) -> float:
    """Returns seconds of processor time: other processes do not count."""
    begins = time.process_time()
    run()
    return time.process_time() - begins


def _day() -> Rows:
    """Searches with all of a day's requests: as many as AlpaServe's day, in Gamma processes."""
    rate = DAY_REQUESTS / DAY_S
    problem = problem_of(models(PAPER["sets"]["S2"]), 64, rate, 6.0, 3.0, DAY_S, 0)
    begins = time.perf_counter()
    found = search(problem)
    yield Row("day/requests", len(problem.trace))
    yield Row("day/devices", problem.cluster.devices)
    yield Row("day/screened", found[0].screened)
    yield Row("day/attained", found[0].attained.share)
    yield Row("day/minutes", (time.perf_counter() - begins) / 60, "min")
