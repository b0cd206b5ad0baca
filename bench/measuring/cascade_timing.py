"""Compares the ways of answering in turns: latency below saturation, throughput, and right answers in time in an overload."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from bench.measuring.cascade_material import CascadeBench
from bench.measuring.cascade_traffic import (
    ALLOWED,
    CASCADE,
    LADDER,
    LOAD,
    OVERLOAD,
    STRONG,
    Asked,
    Poisson,
    Sent,
    Target,
    level_way,
)
from hplm.errors import HplmError

SMALL = level_way(0)


def timed(target: Target, asked: Sequence[Asked], batch_texts: float, case: CascadeBench) -> dict[str, Any]:
    """`batch_texts`: of a full batch."""
    for way in (STRONG, CASCADE, LADDER):
        target.saturated(way, case.seconds / 4)  # warms up
    rates = _rates(target, case)
    capacity = float(np.mean(rates[STRONG]))
    found: dict[str, list[Sent]] = {}
    for turn in tqdm(range(case.rounds), desc="arriving at random, in turns"):
        load = Poisson.of(LOAD * capacity, case.seconds, len(asked), turn)
        for way in (STRONG, CASCADE, SMALL):
            found.setdefault(way, []).append(target.open_loop([way], load))
    latencies = {name: _described(sent) for name, sent in found.items()}
    in_time = _in_time(target, asked, capacity, batch_texts / capacity, case)
    after = target.saturated(STRONG, case.seconds / 2)
    return {
        "latency_over_strong": _ratio(latencies[CASCADE]["mean_ms"], latencies[STRONG]["mean_ms"]),
        "p99_over_strong": _ratio(latencies[CASCADE]["p99_ms"], latencies[STRONG]["p99_ms"]),
        "throughput_over_strong": _ratio(float(np.mean(rates[CASCADE])), capacity),
        "overload_ratio": _ratio(in_time[LADDER], in_time[STRONG]),
        "strong_per_s": round(capacity, 2),
        "drift": _ratio(after, capacity),
        "latencies": latencies,
        "right_in_time": in_time,
    }


def _rates(target: Target, case: CascadeBench) -> dict[str, list[float]]:
    rates: dict[str, list[float]] = {STRONG: [], CASCADE: []}
    for _ in tqdm(range(case.rounds), desc="at saturation, in turns"):
        for way, own in rates.items():
            own.append(target.saturated(way, case.seconds / 2))
    return rates


def _in_time(target: Target, asked: Sequence[Asked], capacity: float, batch_s: float, case: CascadeBench) -> dict[str, float]:
    """Returns the shares of requests that are answered rightly and in time, at a multiple of strong's rate."""
    shares: dict[str, list[float]] = {STRONG: [], LADDER: []}
    for turn in tqdm(range(case.rounds), desc="overload, in turns"):
        load = Poisson.of(OVERLOAD * capacity, case.seconds, len(asked), turn)
        allowed = np.random.default_rng(turn).uniform(ALLOWED[0] * batch_s, ALLOWED[1] * batch_s, len(load.due))
        wanted = [asked[number].label for number in load.asked.tolist()]
        for way, own in shares.items():
            sent = target.open_loop([way], load, allowed)
            right = np.array([found == label for found, label in zip(sent.labels, wanted, strict=True)])
            own.append(float((right & (sent.latencies <= allowed)).mean()))
    return {way: round(float(np.mean(own)), 4) for way, own in shares.items()}


def _described(sent: Sequence[Sent]) -> dict[str, float]:
    latencies = 1e3 * np.concatenate([one.latencies for one in sent])
    unanswered = int((~np.isfinite(latencies)).sum())
    if unanswered:
        raise HplmError(f"{unanswered} of {len(latencies)} requests have no answer: read the messages above, then try again")
    mean, tail = float(latencies.mean()), float(np.percentile(latencies, 99))
    return {"mean_ms": round(mean, 3), "p99_ms": round(tail, 3)}


def _ratio(one: float, other: float) -> float | None:
    """None: the other one has nothing, not a right answer in time."""
    return round(one / other, 3) if other else None
