"""`python -m research.papers alpaserve`: AlpaServe's Table 2 and Figs. 2, 4 to 9 and 12 to 17, simulated with its profiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from bench.curves import Curve
from bench.rows import Positive, Row, Rows, Whole, benchmark, rows_of
from hplm.placement.attained import Attained
from hplm.placement.partition import Parallel, groups_of
from hplm.placement.problem import Groups, Problem
from hplm.placement.search import NothingFound, search
from hplm.placement.servers import Serving
from hplm.placement.simulation import simulate
from research.papers.alpaserve_cuts import cut_curves
from research.papers.alpaserve_models import ASSUMED, EXPONENT, PAPER, TOKENS, models, problem_of
from research.papers.placements import Baseline, clockwork, greedy, manual, replication, round_robin
from testing.random_trace import power_law

Line = Callable[[Any], float | None]
BIG = "BERT-2.7B"
NO_DEADLINE = 1e6  # an SLO scale at which nothing is refused
TABLE2 = "Table 2: in time by deadline"
UNIFORM = [1 / 8] * 8
AXES = {"rate": "rate", "cv": "CV", "slo_scale": "deadline", "devices": "devices"}


@dataclass(frozen=True)
class Figure:
    title: str
    given: Callable[[Any], Any]  # the problem with this number on the axis
    numbers: Sequence[float]
    lines: Mapping[str, Line]

    def curves(self, most: int) -> dict[str, Curve]:
        """Returns the lines over at most so many numbers."""
        problems = {f"{number:g}": self.given(number) for number in self.numbers[-most:]}
        return {name: {number: line(problem) for number, problem in problems.items()} for name, line in self.lines.items()}


@benchmark(seconds=5.0, numbers=2)
def alpaserve(*, seconds: Positive = 200.0, numbers: Whole = 8) -> Rows:
    """Simulates the curves of AlpaServe's Table 2 and Figs. 2, 4 to 9 and 12 to 17. No V100 was used.

    :param seconds: of requests in each simulation
    :param numbers: on each axis, at most
    """
    simulated = {one.title: one.curves(numbers) for one in figures_of(seconds)}
    simulated[TABLE2] |= stated()
    yield Row("source", f"simulated, with profiles of {PAPER['source']}")
    for title, curves in (simulated | cut_curves()).items():
        yield from rows_of(curves, at=f"curves/{title}/")


def stated() -> dict[str, Curve]:
    """Returns Table 2 as the paper states it."""
    paper = PAPER["table2"]
    numbers = [f"{scale:g}" for scale in paper["scales"]]
    lines = {"replication, the paper's": paper["replication"], "search, the paper's": paper["alpaserve"]}
    return {name: dict(zip(numbers, shares, strict=True)) for name, shares in lines.items()}


def figures_of(seconds: float) -> list[Figure]:
    def figures(name: str, setting: Callable[..., Any], lines: Mapping[str, Line], **axes: Sequence[float]) -> list[Figure]:
        """Returns the figure over each of these axes."""
        return [
            Figure(f"{name} by {AXES[axis]}", lambda number, axis=axis: setting(**{axis: number}), numbers, lines)
            for axis, numbers in axes.items()
        ]

    # Two models on two devices: a device each, beside two stages for both.
    two_models = partial(problem_of, ["BERT-6.7B"] * 2, 2, 3.0, slo_scale=NO_DEADLINE, seconds=10 * seconds)
    both = {"a device a model over two stages": times_as_long}
    # 8 models with equal rates on 8 devices: replicas beside eight stages.
    eight = partial(problem_of, [BIG] * 8, 8, rate=20.0, cv=3.0, slo_scale=NO_DEADLINE, seconds=seconds, shares=UNIFORM)
    ways = {"replication": manual(1, 1), "8 stages": manual(8, 1)}
    means, shares = ({name: of(way) for name, way in ways.items()} for of in (_mean_of, _share_of))
    pipelines = {"replication": _mean_of(round_robin(1)), "pipelines": _mean_of_the_shortest_pipelines}
    # As Table 2. No trace of Azure's functions is needed.
    many = partial(problem_of, [BIG] * 24, devices=16, rate=20.0, cv=4.0, slo_scale=5.0, seconds=seconds)
    placed = {"search": _searched, "clockwork": _share_of(clockwork(20)), "replication": _share_of(replication)}
    searched: dict[str, Line] = {name: placed[name] for name in ("replication", "search")}
    # 4 models of 104B, which fit on 16 devices each: all ways to cut them, beside a search on machines of 32 devices.
    large = partial(problem_of, models(PAPER["sets"]["S4"]), 64, rate=8.0, cv=4.0, slo_scale=5.0, seconds=seconds)
    large = partial(large, a_machine=32)
    cut = {"search": _searched} | {f"{a},{b} each": _share_of(manual(a, b)) for a, b in ((16, 1), (8, 2), (4, 4), (2, 8))}
    # Other requests come than those that placements were made for. Clockwork++ knows those that come.
    changed = {
        "search": lambda given: given[1].screen.attained(_placed(given[0])).share,
        "clockwork": lambda given: placed["clockwork"](given[1]),
        "replication": lambda given: given[1].screen.attained(replication(given[0]).groups).share,
        "search, timely": lambda given: _served(given[1], _placed(given[0]), 1),
    }
    # 8 models on 8 devices with batches, and our own scheduler on the placement without batches.
    small = partial(problem_of, ["BERT-1.3B"] * 8, 8, rate=32.0, cv=4.0, seconds=seconds, shares=UNIFORM)
    batched: dict[str, Line] = {f"batches of {most}": _batched(most) for most in (1, 2, 8)}
    batched["timely, batches of 8"] = lambda problem: _served(problem, _placed(problem), 8)
    # The 60 models of S3 on 64 devices.
    kinds = models(PAPER["sets"]["S3"])
    sixty = partial(problem_of, kinds, 64, rate=80.0, cv=4.0, slo_scale=5.0, seconds=seconds / 4)
    ablated = {"search": _searched, "greedy, 4 stages": _share_of(greedy(4)), "round robin": _share_of(round_robin(4))}

    def with_memory(models_a_device: float) -> Problem:
        return eight(device_bytes=models_a_device * PAPER["models"][BIG]["bytes"] * 1.001)

    def two(**axis: Any) -> list[Problem]:
        """Returns what a placement is made for, and what comes: each model's rate is drawn anew around the power law."""
        return [many(**axis, seed=seed, shares=_drawn_shares(24, seed)) for seed in (1, 2)]

    return [
        Figure(TABLE2, lambda scale: many(rate=40.0, slo_scale=scale), PAPER["table2"]["scales"], searched),
        *figures("Fig. 2, equal rates: mean latency,", partial(two_models, shares=(0.5, 0.5)), both, cv=(1, 3)),
        *figures("Fig. 2, 20 and 80 %: mean latency,", partial(two_models, shares=(0.2, 0.8)), both, cv=(1, 3)),
        Figure("Fig. 4: mean s by memory, in models a device", with_memory, (1, 2, 3, 4, 6, 8), pipelines),
        *figures("Fig. 5: mean s", eight, means, rate=(5, 10, 15, 20, 25, 30)),
        *figures("Fig. 6: mean s", eight, means, cv=(1, 2, 3, 4, 6, 8)),
        *figures("Fig. 7: in time", eight, shares, slo_scale=(1.5, 2, 3, 5, 8, 12, 20)),
        *figures("Fig. 12: in time", many, placed, devices=(8, 12, 16, 24, 32), rate=(5, 10, 20, 40, 60)),
        *figures("Fig. 12: in time", many, placed, cv=(1, 2, 4, 6, 8), slo_scale=(1, 2, 3, 5, 10)),
        *figures("Fig. 13: in time", large, cut, rate=(2, 4, 8, 12, 16), cv=(1, 2, 4, 6, 8), slo_scale=(0.5, 1, 2.5, 5, 7.5)),
        *figures(
            "Fig. 14: other requests come,", two, changed, rate=(5, 10, 20, 40), cv=(1, 2, 4, 6), slo_scale=(1, 2, 3, 5, 10)
        ),
        *figures("Fig. 15: in time, with batches,", small, batched, slo_scale=(2, 3, 5, 8, 12)),
        *figures("Fig. 17: in time", sixty, ablated, rate=(40, 80, 120, 160, 200), cv=(1, 2, 4, 6, 8)),
    ]


def _drawn_shares(count: int, seed: int) -> list[float]:
    drawn = power_law(count, EXPONENT) * np.random.default_rng(seed).lognormal(0, 0.5, count)
    return (drawn / drawn.sum()).tolist()


def _share_of(place: Baseline) -> Line:
    return lambda problem: place(problem).attained.share


def _mean_of(place: Baseline) -> Line:
    return lambda problem: _seconds(place(problem).attained)


def _mean_of_the_shortest_pipelines(problem: Problem) -> float | None:
    """Returns the mean of the pipelines with the fewest stages that hold all models (Fig. 3b)."""
    tried = (round_robin(stages)(problem) for stages in (1, 2, 4, 8))
    whole = (one for one in tried if all(len(group.units) == len(problem.units) for group in one.groups))
    return next((_seconds(one.attained) for one in whole), None)


def times_as_long(problem: Problem) -> float | None:
    """Returns the mean latency of a device a model over that of two stages for both."""
    alone, piped = (_filled(problem, Parallel(stages, 1)).mean_ms() for stages in (1, 2))
    return alone / piped if alone and piped else None


def _filled(problem: Problem, parallel: Parallel) -> Attained:
    """Gives each unit to the first group that has room for it."""
    groups = groups_of(problem, parallel)
    for unit in problem.units:
        grown = (problem.room.added(groups, at, unit.name) for at in range(len(groups)))
        groups = next((own for own in grown if own is not None), groups)
    return problem.screen.attained(groups)


def _seconds(attained: Attained) -> float | None:
    ms = attained.mean_ms()
    return None if ms is None else ms / 1e3


def _placed(problem: Problem) -> Groups:
    """Returns no groups where no placement is in time."""
    try:
        return search(problem)[0].groups
    except NothingFound:
        return ()


def _searched(problem: Problem) -> float:
    return problem.screen.attained(_placed(problem)).share


def _batched(most: int) -> Line:
    return lambda problem: _searched(replace(problem, most_texts=most))


def _served(problem: Problem, groups: Groups, most_texts: int) -> float:
    """Returns the share of our scheduler and policy, with batches of so many texts."""
    answering_ns = int(ASSUMED["dispatch_ms"] * 1e6)
    serving = Serving(batch_tokens=most_texts * TOKENS, batch_texts=most_texts, batch_ns=0, answering_ns=answering_ns)
    return simulate(groups, problem.profile, problem.trace, serving).share
