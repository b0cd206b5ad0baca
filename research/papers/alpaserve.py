"""`python -m research.papers alpaserve`: AlpaServe's Table 2 and Figs. 2, 4 to 9 and 12 to 17, simulated with its profiles.

Of Figs. 8, 9 and 16, which say what cuts cost, no requests are simulated. AlpaServe cuts between operators. Here a model is cut
between attention and the other half of a layer. Its first and last parts take more time than others, by a guess (`ends` in
alpaserve_models.json): else every equal cut would be even.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Annotated, Any

import numpy as np

from bench.rows import ONLY_QUICK, Positive, Row, Rows, Whole, benchmark, rows_of
from bench.run import Curve
from hplm.placement.problem import Problem
from hplm.placement.profile import BackboneProfile, Cut, Shape, Terms, best_cut
from hplm.placement.search import NothingFound, search
from hplm.placement.selection import GroupSelection
from research.papers.alpaserve_models import ASSUMED, EXPONENT, PAPER, TOKENS, backbone_of, models, problem_of
from research.papers.placements import Baseline, clockwork, equal_cut, greedy, manual, replication, round_robin, screened
from testing.random_trace import power_law

Line = Callable[[Any], float | None]
BIG = "BERT-2.7B"
NO_DEADLINE = 1e6  # an SLO scale at which nothing is refused
TABLE2 = "Table 2: in time by deadline"
DEVICES = (1, 2, 4, 8)  # of a cut
SHAPE = Shape(TOKENS, TOKENS**2, 1)
HOP, NO_HOP = Terms(ASSUMED["hop_ms"] * 1e6), Terms()
AXES = {"rate": "rate", "cv": "CV", "slo_scale": "deadline", "devices": "devices", "room": "memory, in models a device"}


@dataclass(frozen=True)
class Figure:
    title: str
    setting: Callable[..., Any]  # the problem at a number of an axis
    lines: Mapping[str, Line]
    axes: Mapping[str, Sequence[float]]

    def curves(self, most: int, axes: int | None = None) -> dict[str, dict[str, Curve]]:
        """Returns the lines over at most so many numbers of each axis, or of the first axes."""
        found: dict[str, dict[str, Curve]] = {}
        for axis, numbers in islice(self.axes.items(), axes):
            problems = {f"{number:g}": self.setting(**{axis: number}) for number in numbers[-most:]}
            curves = {name: {number: line(own) for number, own in problems.items()} for name, line in self.lines.items()}
            found[f"{self.title} by {AXES[axis]}"] = curves
        return found


@benchmark(seconds=5.0, numbers=2, axes=1)
def alpaserve(*, seconds: Positive = 200.0, numbers: Whole = 8, axes: Annotated[int | None, ONLY_QUICK] = None) -> Rows:
    """Simulates the curves of AlpaServe's Table 2 and Figs. 2, 4 to 9 and 12 to 17. No V100 was used.

    :param seconds: of requests in each simulation
    :param numbers: on each axis, at most
    """
    simulated = {title: curves for figure in figures_of(seconds) for title, curves in figure.curves(numbers, axes).items()}
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
    # Two models on two devices: a device each, beside two stages for both.
    pair = partial(problem_of, ["BERT-6.7B"] * 2, 2, 3.0, slo_scale=NO_DEADLINE, seconds=10 * seconds)
    both = {"a device a model over two stages": times_as_long}
    # 8 models with equal rates on 8 devices: replicas beside eight stages.
    eight = partial(problem_of, [BIG] * 8, 8, rate=20.0, cv=3.0, slo_scale=NO_DEADLINE, seconds=seconds, shares=[1 / 8] * 8)
    ways = {"replication": manual(1, 1), "8 stages": manual(8, 1)}
    means, shares = ({name: of(way) for name, way in ways.items()} for of in (mean_of, share_of))
    # As Table 2. No trace of Azure's functions is needed.
    many = partial(problem_of, [BIG] * 24, devices=16, rate=20.0, cv=4.0, slo_scale=5.0, seconds=seconds)
    placed = {"search": share_of(searched), "clockwork": share_of(clockwork(20)), "replication": share_of(replication)}
    # 4 models of 104B, which fit on 16 devices each: all ways to cut them, beside a search on machines of 32 devices.
    large = partial(problem_of, models(PAPER["sets"]["S4"]), 64, rate=8.0, cv=4.0, slo_scale=5.0, seconds=seconds, a_machine=32)
    cut = {f"{a},{b} each": share_of(manual(a, b)) for a, b in ((16, 1), (8, 2), (4, 4), (2, 8))}
    # 8 models on 8 devices with batches.
    small = partial(problem_of, ["BERT-1.3B"] * 8, 8, rate=32.0, cv=4.0, seconds=seconds, shares=[1 / 8] * 8)
    batched = {f"batches of {most}": batches_of(most) for most in (1, 2, 8)}
    # The 60 models of S3 on 64 devices.
    sixty = partial(problem_of, models(PAPER["sets"]["S3"]), 64, rate=80.0, cv=4.0, slo_scale=5.0, seconds=seconds / 4)

    def with_memory(room: float) -> Problem:
        return eight(device_bytes=room * PAPER["models"][BIG]["bytes"] * 1.001)

    def two(**axis: Any) -> list[Problem]:
        """Returns what a placement is made for, and what comes: each model's rate is drawn anew around the power law."""
        return [many(**axis, seed=seed, shares=_drawn_shares(24, seed)) for seed in (1, 2)]

    return [
        Figure(
            "Table 2: in time", partial(many, rate=40.0), {name: placed[name] for name in ("replication", "search")},
            {"slo_scale": PAPER["table2"]["scales"]},
        ),
        Figure("Fig. 2, equal rates: mean latency,", partial(pair, shares=(0.5, 0.5)), both, {"cv": (1, 3)}),
        Figure("Fig. 2, 20 and 80 %: mean latency,", partial(pair, shares=(0.2, 0.8)), both, {"cv": (1, 3)}),
        Figure(
            "Fig. 4: mean s", with_memory, {"replication": mean_of(round_robin(1)), "pipelines": mean_of(shortest_pipelines)},
            {"room": (1, 2, 3, 4, 6, 8)},
        ),
        Figure("Fig. 5: mean s", eight, means, {"rate": (5, 10, 15, 20, 25, 30)}),
        Figure("Fig. 6: mean s", eight, means, {"cv": (1, 2, 3, 4, 6, 8)}),
        Figure("Fig. 7: in time", eight, shares, {"slo_scale": (1.5, 2, 3, 5, 8, 12, 20)}),
        Figure(
            "Fig. 12: in time", many, placed,
            {
                "devices": (8, 12, 16, 24, 32), "rate": (5, 10, 20, 40, 60), "cv": (1, 2, 4, 6, 8),
                "slo_scale": (1, 2, 3, 5, 10),
            },
        ),
        Figure(
            "Fig. 13: in time", large, {"search": share_of(searched), **cut},
            {"rate": (2, 4, 8, 12, 16), "cv": (1, 2, 4, 6, 8), "slo_scale": (0.5, 1, 2.5, 5, 7.5)},
        ),
        Figure(
            "Fig. 14: other requests come,", two,  # Clockwork++ knows those that come
            {"search": later(searched), "clockwork": lambda of: placed["clockwork"](of[1]), "replication": later(replication)},
            {"rate": (5, 10, 20, 40), "cv": (1, 2, 4, 6), "slo_scale": (1, 2, 3, 5, 10)},
        ),
        Figure("Fig. 15: in time, with batches,", small, batched, {"slo_scale": (2, 3, 5, 8, 12)}),
        Figure(
            "Fig. 17: in time", sixty,
            {"search": placed["search"], "greedy, 4 stages": share_of(greedy(4)), "round robin": share_of(round_robin(4))},
            {"rate": (40, 80, 120, 160, 200), "cv": (1, 2, 4, 6, 8)},
        ),
    ]  # fmt: skip


def searched(problem: Problem) -> GroupSelection:
    """Returns the best placement; no groups where none is in time."""
    try:
        return search(problem)[0]
    except NothingFound:
        return screened(problem, ())


def shortest_pipelines(problem: Problem) -> GroupSelection:
    """Returns the pipelines with the fewest stages that hold all models (Fig. 3b)."""
    tried = (round_robin(stages)(problem) for stages in (1, 2, 4, 8))
    whole = (one for one in tried if all(len(group.units) == len(problem.units) for group in one.groups))
    return next(whole, screened(problem, ()))


def share_of(place: Baseline) -> Line:
    return lambda problem: place(problem).attained.share


def mean_of(place: Baseline) -> Line:
    """Returns the mean latency in seconds; None where nothing is in time."""
    return lambda problem: None if (ms := place(problem).attained.mean_ms()) is None else ms / 1e3


def later(place: Baseline) -> Line:
    """Returns the share of the second problem's requests, on a placement for those of the first."""
    return lambda given: given[1].screen.attained(place(given[0]).groups).share


def times_as_long(problem: Problem) -> float | None:
    """Returns the mean latency of a device a model over that of two stages for both."""
    alone, piped = (manual(stages, 1)(problem).attained.mean_ms() for stages in (1, 2))
    return alone / piped if alone and piped else None


def batches_of(most: int) -> Line:
    return lambda problem: searched(replace(problem, most_texts=most)).attained.share


def _drawn_shares(count: int, seed: int) -> list[float]:
    drawn = power_law(count, EXPONENT) * np.random.default_rng(seed).lognormal(0, 0.5, count)
    return (drawn / drawn.sum()).tolist()


def cut_curves() -> dict[str, dict[str, Curve]]:
    """Returns the lines of each figure. In Fig. 9, devices are stages, or share a stage, or are replicas."""
    small, model = (backbone_of(kind, pieces=2, ends=ASSUMED["ends"]) for kind in ("BERT-1.3B", "BERT-2.7B"))

    def seconds(n: int) -> float:
        """Returns the time of a request whose layers so many devices compute together."""
        return model.terms(n).ns(*SHAPE) / 1e9

    def stages(n: int) -> list[float]:
        return [ns / 1e9 for ns in stage_times(model, HOP, best_cut(model, HOP, 1, n, SHAPE))]

    def best(own: BackboneProfile, n: int, hop: Terms = HOP) -> float:
        return overhead(own, hop, best_cut(own, HOP, 1, n, SHAPE))

    def equal(own: BackboneProfile, n: int) -> float:
        return overhead(own, HOP, equal_cut(own.layers, n))

    lines: dict[str, dict[str, Callable[[int], float]]] = {
        "Fig. 8a: overhead of stages": {
            "uneven cut": lambda n: best(model, n, NO_HOP),
            "hops": lambda n: best(model, n) - best(model, n, NO_HOP),
        },
        "Fig. 8b: overhead of devices a stage": {"communication": lambda n: n * seconds(n) / seconds(1) - 1},
        "Fig. 9a: seconds of a request by devices": {
            "stages": lambda n: sum(stages(n)),
            "devices a stage": seconds,
            "replicas": lambda n: seconds(1),
        },
        "Fig. 9b: requests a second by devices": {
            "stages": lambda n: 1 / max(stages(n)),
            "devices a stage": lambda n: 1 / seconds(n),
            "replicas": lambda n: n / seconds(1),
        },
    }
    for kind, own in (("BERT-1.3B", small), ("BERT-2.7B", model)):
        lines[f"Fig. 16: overhead by stages, {kind}"] = {"equal cut": partial(equal, own), "best cut": partial(best, own)}
    return {title: {name: {str(n): of(n) for n in DEVICES} for name, of in own.items()} for title, own in lines.items()}


def overhead(own: BackboneProfile, hop: Terms, cut: Cut) -> float:
    """Returns the overhead of AlpaServe 3.3: stages times the slowest one, above the time of a single stage, relative to it."""
    (whole,) = stage_times(own, hop, equal_cut(own.layers, 1))
    return len(cut) * max(stage_times(own, hop, cut)) / whole - 1


def stage_times(own: BackboneProfile, hop: Terms, cut: Cut) -> list[float]:
    return [terms.ns(*SHAPE) for terms in own.stages(hop, 1, cut)]
