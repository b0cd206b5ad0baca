"""The curves of AlpaServe's Figs. 4 to 9 and 12 to 17, simulated with the paper's profiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from bench.measuring.alpaserve import ASSUMED, EXPONENT, PAPER, TOKENS, models, problem_of
from bench.measuring.place_cuts import cut_curves, partition_curves
from bench.place import PlaceBench
from hplm.placement.baselines import baseline
from hplm.placement.problem import Groups, Problem
from hplm.placement.search import NothingFound, search
from hplm.placement.servers import Serving
from hplm.placement.simulation import simulate
from hplm.placement.workload import power_law

Curves = dict[str, dict[str, dict[str, float | None]]]  # by picture, line and number
Line = Callable[[Problem], float | None]
Two = tuple[Problem, Problem]  # what a placement is made for, and what comes
Given = TypeVar("Given")
Numbers = Sequence[float]
EIGHT = ["BERT-2.7B"] * 8
MANY = ["BERT-2.7B"] * 24
NO_DEADLINE = 1e6
UNIFORM = [1 / 8] * 8
RATES, CVS, SCALES = (2, 4, 8, 12, 16), (1, 2, 4, 6, 8), (0.5, 1, 2.5, 5, 7.5)  # of Fig. 13


def curves_of(case: PlaceBench) -> Curves:
    return {
        **_motivation(case), **cut_curves(), **_end_to_end(case), **_large(case), **_changed(case), **_batches(case),
        **partition_curves(), **_ablation(case),
    }  # fmt: skip


def _motivation(case: PlaceBench) -> Curves:
    """8 devices, 8 models of 2.7B with equal rates, 20 requests a second in all, CV 3: replicas beside eight stages."""
    lines = {"replication": _mean_of("manual:1,1"), "8 stages": _mean_of("manual:8,1")}
    shares = {"replication": _share_of("manual:1,1"), "8 stages": _share_of("manual:8,1")}

    def problem(rate: float = 20.0, cv: float = 3.0, scale: float = NO_DEADLINE) -> Problem:
        return problem_of(EIGHT, 8, rate, cv, scale, case.seconds, 0, UNIFORM)

    def with_memory(models_a_device: float) -> Problem:
        room = models_a_device * PAPER["models"]["BERT-2.7B"]["bytes"] * 1.001
        return problem_of(EIGHT, 8, 20.0, 3.0, NO_DEADLINE, case.seconds, 0, UNIFORM, room)

    pipelines = {"replication": _mean_of("round-robin:1"), "pipelines": _mean_of_the_shortest_pipelines}
    return {
        "Fig. 4: mean s by memory, in models a device": _curve(pipelines, with_memory, (1, 2, 3, 4, 6, 8)),
        "Fig. 5: mean s by rate": _curve(lines, lambda rate: problem(rate=rate), (5, 10, 15, 20, 25, 30)),
        "Fig. 6: mean s by CV": _curve(lines, lambda cv: problem(cv=cv), (1, 2, 3, 4, 6, 8)),
        "Fig. 7: in time by deadline": _curve(shares, lambda scale: problem(scale=scale), (1.5, 2, 3, 5, 8, 12, 20)),
    }


def _end_to_end(case: PlaceBench) -> Curves:
    """As Table 2: 24 models of 2.7B, 16 devices, 20 requests a second, CV 4. No trace of Azure's functions is needed."""
    lines = {"search": _searched, "clockwork": _share_of("clockwork:20"), "replication": _share_of("replication")}

    def problem(devices: int = 16, rate: float = 20.0, cv: float = 4.0, scale: float = 5.0) -> Problem:
        return problem_of(MANY, devices, rate, cv, scale, case.seconds, 0)

    return {
        "Fig. 12: in time by devices": _curve(lines, lambda devices: problem(devices=int(devices)), (8, 12, 16, 24, 32)),
        "Fig. 12: in time by rate": _curve(lines, lambda rate: problem(rate=rate), (5, 10, 20, 40, 60)),
        "Fig. 12: in time by CV": _curve(lines, lambda cv: problem(cv=cv), (1, 2, 4, 6, 8)),
        "Fig. 12: in time by deadline": _curve(lines, lambda scale: problem(scale=scale), (1, 2, 3, 5, 10)),
    }


def _large(case: PlaceBench, rates: Numbers = RATES, cvs: Numbers = CVS, scales: Numbers = SCALES) -> Curves:
    """The 4 models of 104B, which fit on 16 devices each: all ways to cut these, beside a search on machines of 32 devices."""
    kinds = models(PAPER["sets"]["S4"])
    manual = {f"{cut} each": _share_of(f"manual:{cut}") for cut in ("16,1", "8,2", "4,4", "2,8")}

    def problem(rate: float = 8.0, cv: float = 4.0, scale: float = 5.0) -> Problem:
        return problem_of(kinds, 64, rate, cv, scale, case.seconds, 0, a_machine=32)

    lines = {"search": _searched, **manual}
    return {
        "Fig. 13: in time by rate": _curve(lines, lambda rate: problem(rate=rate), rates),
        "Fig. 13: in time by CV": _curve(lines, lambda cv: problem(cv=cv), cvs),
        "Fig. 13: in time by deadline": _curve(lines, lambda scale: problem(scale=scale), scales),
    }


def _changed(
    case: PlaceBench, rates: Numbers = (5, 10, 20, 40), cvs: Numbers = (1, 2, 4, 6), scales: Numbers = (1, 2, 3, 5, 10)
) -> Curves:
    """As Fig. 12, but other requests come than those that placements were made for. Clockwork++ knows those that come.

    Each model's rate is drawn anew around the power law, and so are the arrivals.
    """

    def replication(problem: Problem) -> Groups:
        return baseline("replication", problem).groups

    def two(rate: float = 20.0, cv: float = 4.0, scale: float = 5.0) -> Two:
        planned, actual = (
            problem_of(MANY, 16, rate, cv, scale, case.seconds, seed, _drawn_shares(len(MANY), seed)) for seed in (1, 2)
        )
        return planned, actual

    lines: dict[str, Callable[[Two], float | None]] = {
        "search": lambda given: given[1].screen.attained(_groups(given[0])).share,
        "clockwork": lambda given: _share_of("clockwork:20")(given[1]),
        "replication": lambda given: given[1].screen.attained(replication(given[0])).share,
        "search, timely": lambda given: _served(given[1], _groups(given[0]), 1),
    }
    return {
        "Fig. 14: other requests come, by rate": _curve(lines, lambda rate: two(rate=rate), rates),
        "Fig. 14: other requests come, by CV": _curve(lines, lambda cv: two(cv=cv), cvs),
        "Fig. 14: other requests come, by deadline": _curve(lines, lambda scale: two(scale=scale), scales),
    }


def _drawn_shares(count: int, seed: int) -> list[float]:
    drawn = power_law(count, EXPONENT) * np.random.default_rng(seed).lognormal(0, 0.5, count)
    return (drawn / drawn.sum()).tolist()


def _batches(case: PlaceBench) -> Curves:
    """8 models of 1.3B on 8 devices, and our own scheduler on the same placement."""

    def problem(most: int) -> Callable[[float], Problem]:
        return lambda scale: problem_of(["BERT-1.3B"] * 8, 8, 32.0, 4.0, scale, case.seconds, 0, UNIFORM, most_texts=most)

    scales = (2, 3, 5, 8, 12)
    lines = {f"batches of {most}": _curve({"": _searched}, problem(most), scales)[""] for most in (1, 2, 8)}
    lines["timely, batches of 8"] = _curve({"": _timely}, problem(1), scales)[""]
    return {"Fig. 15: in time by deadline, with batches": lines}


def _ablation(case: PlaceBench) -> Curves:
    """The 60 models of S3 on 64 devices."""
    kinds = models(PAPER["sets"]["S3"])
    lines = {"search": _searched, "greedy, 4 stages": _share_of("greedy:4"), "round robin": _share_of("round-robin:4")}

    def problem(rate: float = 80.0, cv: float = 4.0) -> Problem:
        return problem_of(kinds, 64, rate, cv, 5.0, case.seconds / 4, 0)

    return {
        "Fig. 17: in time by rate": _curve(lines, lambda rate: problem(rate=rate), (40, 80, 120, 160, 200)),
        "Fig. 17: in time by CV": _curve(lines, lambda cv: problem(cv=cv), (1, 2, 4, 6, 8)),
    }


def _curve(
    lines: Mapping[str, Callable[[Given], float | None]], problem: Callable[[Any], Given], numbers: Sequence[float]
) -> dict[str, dict[str, float | None]]:
    curve: dict[str, dict[str, float | None]] = {name: {} for name in lines}
    for number in numbers:
        given = problem(number)
        for name, line in lines.items():
            curve[name][f"{number:g}"] = line(given)
    return curve


def _share_of(name: str) -> Line:
    return lambda problem: baseline(name, problem).attained.share


def _mean_of(name: str) -> Line:
    return lambda problem: _seconds(baseline(name, problem).attained.mean_ms())


def _mean_of_the_shortest_pipelines(problem: Problem) -> float | None:
    """Returns the mean of the pipelines with the fewest stages that hold all models (Fig. 3b)."""
    for stages in (1, 2, 4, 8):
        found = baseline(f"round-robin:{stages}", problem)
        if all(len(group.units) == len(problem.units) for group in found.groups):
            return _seconds(found.attained.mean_ms())
    return None


def _seconds(ms: float | None) -> float | None:
    return None if ms is None else ms / 1e3


def _searched(problem: Problem) -> float:
    try:
        return search(problem)[0].attained.share
    except NothingFound:
        return 0.0


def _timely(problem: Problem) -> float:
    return _served(problem, _groups(problem), 8)


def _groups(problem: Problem) -> Groups:
    """Returns no groups where no placement is in time."""
    try:
        return search(problem)[0].groups
    except NothingFound:
        return ()


def _served(problem: Problem, groups: Groups, most_texts: int) -> float:
    """Returns the share of our scheduler and policy, with batches of so many texts."""
    answering_ns = int(ASSUMED["dispatch_ms"] * 1e6)
    serving = Serving(batch_tokens=most_texts * TOKENS, batch_texts=most_texts, batch_ns=0, answering_ns=answering_ns)
    return simulate(groups, problem.profile, problem.trace, serving).share
