"""Simulates decoders under overload: the same random requests with every policy, on a virtual clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from bench.measuring.decoders import lengths_of
from bench.promises import PromisesBench
from hplm.errors import DeadlineMissed, QueueFull
from hplm.generation.promise import Promise
from hplm.generation.service import Settings
from hplm.generation.simulation import Answer, Simulation, StepCost
from hplm.options import SLOTTED
from hplm.scheduling.policy import DEFAULT

PROMPTS, GAPS = 1, 2  # seeds beside the case's, so that neither goes with the lengths of answers
LEARNING = 5  # one part in so many of the requests comes first and is not counted: the forecasts learn from their answers
TARGET, OVERLOAD = 0.9, 2.0  # of what is admitted at this rate, in time


@dataclass(frozen=True)
class Asked:
    """A request before it arrives."""

    prompt: int
    wanted: int
    tenant: int


def bench_promises(case: PromisesBench) -> dict:
    asked = _asked(case)
    capacity = _capacity(case, asked)
    by_rate = {str(rate): {name: _figures(case, name, asked, rate * capacity) for name in case.policies} for rate in case.rates}
    return {
        "capacity_per_s": round(capacity, 2),
        "rates": by_rate,
        "without_admission": {
            str(rate): _figures(case, DEFAULT, asked, rate * capacity, admission=False) for rate in case.rates
        },
        "targets": {
            f"{name}_in_time_at_{rate:g}": by_rate[str(rate)][name]["on_time_of_admitted"] >= TARGET
            for rate in case.rates
            for name in case.policies
            if rate == OVERLOAD
        },
        "case": asdict(case),
    }


def _asked(case: PromisesBench) -> list[Asked]:
    chance = np.random.default_rng([case.seed, PROMPTS])
    prompts, tenants = chance.integers(10, 61, case.requests), chance.integers(case.tenants, size=case.requests)
    lengths = lengths_of(case.requests, case.seed)
    return [Asked(*one) for one in zip(prompts.tolist(), lengths, tenants.tolist(), strict=True)]


def _simulation(case: PromisesBench, name: str, admission: bool) -> Simulation:
    settings = Settings(seats=case.seats, cache_tokens=case.cache_tokens, cache=SLOTTED, policy=name, admission=admission)
    return Simulation(settings, StepCost(*(1e6 * milliseconds for milliseconds in case.cost_ms)))


def _most(case: PromisesBench, one: Asked) -> int:
    """Returns the `max_tokens` of a request."""
    return round(one.wanted / case.share)


def _capacity(case: PromisesBench, asked: Sequence[Asked]) -> float:
    """Returns how many requests a second are answered if all are there from the start."""
    simulation = _simulation(case, "fcfs", admission=False)
    for one in asked:
        simulation.ask(one.prompt, one.wanted, _most(case, one))
    simulation.finish()
    return len(asked) * 1e9 / simulation.now_ns


def _figures(case: PromisesBench, name: str, asked: Sequence[Asked], rate: float, admission: bool = True) -> dict[str, float]:
    """Simulates the requests with a policy, at so many a second."""
    simulation = _simulation(case, name, admission)
    first, whole = (int(1e6 * milliseconds) for milliseconds in case.promise_ms)
    promise = Promise(whole_ns=whole, first_token_ns=first)
    gaps = np.random.default_rng([case.seed, GAPS]).exponential(1e9 / rate, len(asked))
    taken: list[Answer | None] = []  # None: refused
    for when, one in zip(np.cumsum(gaps).astype(np.int64).tolist(), asked, strict=True):
        simulation.until(when)
        try:
            taken.append(simulation.ask(one.prompt, one.wanted, _most(case, one), promise, one.tenant))
        except (DeadlineMissed, QueueFull):
            taken.append(None)
    simulation.finish()
    counted = taken[len(taken) // LEARNING :]
    admitted = [answer for answer in counted if answer is not None]
    on_time = sum(answer.on_time for answer in admitted)
    return {
        "refused": round(1 - len(admitted) / len(counted), 4),
        "on_time_of_admitted": round(on_time / max(1, len(admitted)), 4),
        "on_time": round(on_time / len(counted), 4),
    }


def table_of(figures: dict) -> str:
    """Returns a row for each rate. A cell is the share refused / in time of the others / in time of all, in percent."""
    names = [*next(iter(figures["rates"].values())), "not admitting"]
    rows = [f"{'rate':>6}" + "".join(f"{name:>22}" for name in names)]
    for rate, by_policy in figures["rates"].items():
        cells = [*by_policy.values(), figures["without_admission"][rate]]
        shown = (" / ".join(f"{100 * value:.1f}" for value in cell.values()) for cell in cells)
        rows.append(f"{rate:>6}" + "".join(f"{cell:>22}" for cell in shown))
    targets = (f"{name}: {'met' if met else 'missed'}" for name, met in figures["targets"].items())
    return "\n".join([*rows, "refused / in time of the others / in time of all, %", *targets])
