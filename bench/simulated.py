"""The simulated server beside a measured one: it has the same settings and requests, and takes the times of its journal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hplm.arrays import Array
from hplm.engine.service import capacity_of, scheduler_of
from hplm.engine.settings import EncoderSettings
from hplm.errors import HplmError
from hplm.scheduling.selection import Places
from hplm.simulate.arrivals import Arrivals
from hplm.simulate.encoders import SimulatedEngine, one_stage, simulate_one
from loadtest.load import Report

RUNS = 8  # of the simulated server, whose mean counts: one differs from another by some hundredths
NEAREST = 8  # measured batches, from which the time of a simulated one is drawn


def simulate(offered: Arrivals, report: Report, entries: Sequence[dict], settings: EncoderSettings) -> float:
    """Returns the share of the offered requests that a simulated server answers in time.

    `report`, `entries`: the client's and the journal's of the measured server. In the journal, only requests of the overload
    have deadlines. The scheduler learns from the batches before the overload. All times are those of the overload, when the
    server and the client use the same cores:

    - A batch takes as long for a token as a measured one with about as many tokens, drawn at random.
    - The engine's time between two batches is a mean, and staging a median.
    - A request's way to the engine, and the way of its answer to the client, are means.
    """
    requests = [entry for entry in entries if entry.get("deadline")]
    numbers = {request["batch"] for request in requests} - {0}  # 0: in no batch
    if len(numbers) < 2:
        raise HplmError("the overload had fewer than two batches: give --seconds more")
    batches = [entry for entry in entries if entry.get("stages")]
    counts = "batch", "tokens", "texts", "brought"
    number, tokens, texts, brought = np.array([[one[name] for name in counts] for one in batches]).T
    before, during = number < min(numbers), (min(numbers) <= number) & (number <= max(numbers))
    stages = [one["stages"] for one in batches]
    begun, staged, end = np.array([(own["prepare"][0], own["retrieve"][1], own["compute"][1]) for own in stages]).T
    took_ns = np.array([round(1e9 * one["computing"]) for one in batches])
    # A batch takes this long beyond its computing. It counts from the end of the one before, or from its own staging.
    turns = end - np.maximum(np.append(0.0, end[:-1]), staged) - 1e-9 * took_ns
    # The client's clock begins before the server's, by the way to lookup. That counts as a part of the way back.
    both_ways_s = report.latencies.mean() - np.mean([one["answered"] - one["arrived"] for one in requests])
    answering_s = both_ways_s + np.mean([one["answered"] - one["computed"] for one in requests if one["computed"]])
    taking_s = np.mean([one["taken"] - one["arrived"] for one in requests])
    taken = replace(offered, allowed_ns=np.maximum(1, offered.allowed_ns - round(1e9 * float(taking_s))))
    drawn, token_ns = tokens[during], (took_ns / tokens)[during]

    def on_time(seed: int) -> float:
        rng = np.random.default_rng(seed)

        def batch_ns(lengths: Array, places: Places | None) -> float:
            apart = np.abs(drawn - lengths.sum())
            return lengths.sum() * token_ns[rng.choice(np.flatnonzero(apart <= np.sort(apart)[:NEAREST][-1]))]

        scheduler = scheduler_of(settings)
        for known in zip(*(column[before].tolist() for column in (tokens, texts, brought, took_ns)), strict=True):
            scheduler.cost.observe(*known)
        machine = SimulatedEngine(
            one_stage(batch_ns),
            capacity_of(settings),
            staging_ns=round(1e9 * float(np.median((staged - begun)[during]))),
            answering_ns=round(1e9 * float(answering_s)),
            turn_ns=max(0, round(1e9 * float(turns[during].mean()))),
        )
        return float(simulate_one(scheduler, machine, taken).on_time.mean())

    return float(np.mean([on_time(seed) for seed in range(RUNS)]))
