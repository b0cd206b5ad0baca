"""Simulates cascades: right answers in an overload, and what texts wait that go on within their batch or through the line."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hplm.arrays import Array
from hplm.scheduling.limits import Limits
from hplm.scheduling.policy import DEFAULT, policy
from hplm.scheduling.scheduler import Scheduler
from hplm.scheduling.selection import Places
from hplm.scheduling.simulation.arrivals import Lengths, Stream
from hplm.scheduling.simulation.cascades import SimulatedRung
from hplm.scheduling.simulation.engines import one_stage
from hplm.scheduling.simulation.server import Machine, Outcome, Simulation
from hplm.scheduling.waiting import Capacity

LADDER = (  # a stack of one layer of four: invented shares, as a tenant may have them
    SimulatedRung(1.0, right=0.92),
    SimulatedRung(0.25, 1.0, goes_on=0.4, right=0.915, right_in_hand=0.7),
    SimulatedRung(0.25, 1.0, goes_on=0.1, right=0.89, right_in_hand=0.75),
    SimulatedRung(0.25, right=0.84),
)
STRONG, CASCADE = LADDER[0], LADDER[1]
WAYS = {"strong": (STRONG, True), "through_the_line": (CASCADE, False), "within_the_batch": (CASCADE, True)}
LOAD = 0.7  # of the rate at which strong is saturated
TEXTS = 8000  # for each figure, with the default of three seconds


@dataclass(frozen=True)
class Engine:
    """The terms of the cost model, in nanoseconds, and what arrives."""

    batch: float  # of each sheet
    token: float  # through all layers
    text: float  # in each pass
    tokens: int  # of a batch
    lengths: Lengths

    def batch_ns(self, lengths: Array, places: Places | None) -> float:
        return self.batch + self.token * float(lengths.sum()) + self.text * len(lengths)

    def machine(self, within: bool) -> Machine:
        capacity = Capacity(self.tokens, self.tokens, self.tokens)
        return Machine(
            one_stage(self.batch_ns), capacity, staging_ns=1_500_000, answering_ns=1_000_000, noise=0.1, within=within
        )


ENGINES = {
    "short_batches": Engine(1e6, 60e3, 300e3, 1024, Lengths(30, 144, 5, 100)),  # as of MiniLM on two cores
    "long_batches": Engine(3e6, 27e6 / 1280, 0.0, 1280, Lengths(20, 64)),
}


def in_time(seed: int, streams: dict[str, Stream], machine: Machine, limits: Limits) -> dict[str, dict]:
    """Returns the shares of right answers in time, by rate: of the governor, and of the dearest rung for all texts."""
    figures = {}
    for rate, stream in streams.items():
        load, of = stream.draw(seed), {}
        for name, ladder in (("governed", LADDER), ("dearest", LADDER[:1])):
            scheduler = Scheduler(policy(DEFAULT), limits, admission=True, commit_ns=0)
            of[name] = Simulation(scheduler, machine, load, ladders={0: ladder}).run()
        right = {name: round(float((outcome.right & outcome.on_time).mean()), 4) for name, outcome in of.items()}
        figures[rate] = right | {
            "governed_over_dearest": round(right["governed"] / right["dearest"], 2),
            "steps": int(np.count_nonzero(np.diff([0, *of["governed"].rungs]))),
        }
    return figures


def latency(seconds: float, cv: float, seed: int, limits: Limits) -> dict[str, dict]:
    """Returns mean and p99 at a part of the rate at which the full stack alone is saturated, and the rate of saturation.

    All over those of the full stack alone.
    """
    return {name: _latency(seconds, cv, seed, limits, engine) for name, engine in ENGINES.items()}


def _latency(seconds: float, cv: float, seed: int, limits: Limits, engine: Engine) -> dict[str, dict]:
    texts = max(100, round(TEXTS * seconds / 3.0))

    def run(way: str, rate: float) -> Outcome:
        rung, within = WAYS[way]
        stream = Stream(rate, texts / rate, engine.lengths, (0.0, 0.0), cv)
        scheduler = Scheduler(policy(DEFAULT), limits, True, commit_ns=5_000_000, batch_ns=50_000_000)
        return Simulation(scheduler, engine.machine(within), stream.draw(seed), seed, {0: (rung,)}).run()

    saturated = {way: texts / run(way, 1e9).end_ns for way in WAYS}
    found = {}
    for way in WAYS:
        outcome = run(way, LOAD * saturated["strong"] * 1e9)
        took = outcome.answered_ns - outcome.arrivals.at_ns
        found[way] = np.array([took.mean(), np.percentile(took, 99), saturated[way]])
    names = "mean_over_strong", "p99_over_strong", "throughput_over_strong"
    return {
        way: dict(zip(names, np.round(own / found["strong"], 2).tolist(), strict=True))
        for way, own in found.items()
        if way != "strong"
    }
