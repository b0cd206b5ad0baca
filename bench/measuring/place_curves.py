"""The curves of AlpaServe's Figs. 4 to 7, 12, 15 and 17, simulated with the paper's profiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bench.measuring.alpaserve import PAPER, models, problem_of
from bench.place import PlaceBench
from hplm.placement.baselines import baseline
from hplm.placement.problem import Problem
from hplm.placement.search import NothingFound, search
from hplm.placement.servers import Serving
from hplm.placement.simulation import simulate

Curves = dict[str, dict[str, dict[str, float | None]]]  # by picture, line and number
Line = Callable[[Problem], float | None]
EIGHT = ["BERT-2.7B"] * 8
MANY = ["BERT-2.7B"] * 24
NO_DEADLINE = 1e6
UNIFORM = [1 / 8] * 8


def curves_of(case: PlaceBench) -> Curves:
    return {**_motivation(case), **_end_to_end(case), **_batches(case), **_ablation(case)}


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
    lines: dict[str, Line], problem: Callable[[Any], Problem], numbers: Sequence[float]
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
    try:
        groups = search(problem)[0].groups
    except NothingFound:
        return 0.0
    serving = Serving(batch_tokens=8 * 2048, batch_texts=8, batch_ns=0)
    return simulate(groups, problem.profile, problem.trace, serving).share
