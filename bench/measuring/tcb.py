"""Simulates the settings of TCB's evaluation (section 6.2) with the server's own scheduler and modelled engines.

TNB is the packing `naive` with a text in each of the B rows, TTB is `turbo`, TCB is `concat`. As in the paper, DAS fills the
batches of all three. With `slotted`, Slotted-DAS does. TCB does not state its deadlines, nor L in Figs. 9 to 12.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

import numpy as np

from bench.tcb import TcbBench
from hplm.scheduling.columns import Columns
from hplm.scheduling.cost import Cost
from hplm.scheduling.limits import Limits
from hplm.scheduling.policy import Policy, policy
from hplm.scheduling.scheduler import Scheduler
from hplm.scheduling.selection import Selection
from hplm.scheduling.simulation.arrivals import Lengths, Stream
from hplm.scheduling.simulation.engines import PACKINGS, EngineCost, one_stage
from hplm.scheduling.simulation.server import Machine, Outcome, Simulation
from hplm.scheduling.waiting import Capacity

MEAN = 20
BY_RATE = (64, 100)  # B and L of Figs. 9 to 12
BY_AXIS = (16, 100)  # B and L of Fig. 15, where they do not vary
SLOTTED = (10, 400)  # B and L of Fig. 13
VARIANCES = (20, 100)
POLICIES = {"DAS": "das:rows={rows},row_tokens={row_tokens}", "SJF": "sjf", "FCFS": "fcfs", "EDF": "edf", "timely": "timely"}
UNBOUNDED = Limits(10**7, 10**12)
# The highest throughput of TCB's `concat` over `naive` and `turbo`, as the paper states it.
STATED = {"DAS var20": (2.22, 1.48), "FCFS var20": (3.33, 1.52), "FCFS var100": (None, 1.72)}


@dataclass
class Timed:
    """A policy, and the CPU time of its choices. Other work on the machine does not count."""

    policy: Policy
    seconds: float = 0.0

    def select(self, columns: Columns, start_ns: int, capacity: Capacity, cost: Cost) -> np.ndarray | Selection:
        start = time.thread_time()
        try:
            return self.policy.select(columns, start_ns, capacity, cost)
        finally:
            self.seconds += time.thread_time() - start


@dataclass(frozen=True)
class Setting:
    """A batch of `rows` rows, and the load of a simulation."""

    case: TcbBench
    rows: int
    row_tokens: int
    variance: float
    rate: float  # texts a second
    slot_tokens: int = 0

    def run(self, given: str, packing: str) -> dict[str, float]:
        cost = EngineCost(1e6 * self.case.batch_ms, row_tokens=self.row_tokens, slot_tokens=self.slot_tokens)
        tokens = self.rows * self.row_tokens
        capacity = Capacity(tokens, self.rows if packing == "naive" else tokens, tokens)
        load = Stream(self.rate, self.case.seconds, Lengths(MEAN, self.variance), self.case.deadlines_ms).draw(self.case.seed)
        chooses = Timed(policy(given.format(rows=self.rows, row_tokens=self.row_tokens)))
        scheduler = Scheduler(chooses, UNBOUNDED, commit_ns=0)
        return _figures(Simulation(scheduler, Machine(one_stage(cost.of(packing)), capacity), load).run(), chooses)


def _figures(outcome: Outcome, chooses: Timed) -> dict[str, float]:
    return {
        "utility": round(outcome.utility, 4),
        "on_time": round(float(outcome.on_time.mean()), 4),
        "texts_per_s": round(float(outcome.answered.sum() / outcome.end_ns * 1e9), 1),
        "choosing_share": round(chooses.seconds / (outcome.busy_ns / 1e9), 5),
    }


def capacity_of(case: TcbBench, rows: int, row_tokens: int) -> float:
    """Returns the texts a second of full batches without padding and without scores."""
    tokens = rows * row_tokens
    return tokens / MEAN / (case.batch_ms / 1e3 + EngineCost.token / 1e9 * tokens)


def bench_tcb(case: TcbBench) -> dict:
    figures = {"packings": _packings(case)}
    rate = case.rate * capacity_of(case, *BY_AXIS)
    rows, row_tokens = BY_AXIS
    print("policies by B, variance and L", file=sys.stderr, flush=True)
    figures["rows"] = _policies((str(axis), Setting(case, axis, row_tokens, 20, rate)) for axis in case.rows)
    figures["variances"] = _policies((str(axis), Setting(case, rows, row_tokens, axis, rate)) for axis in case.variances)
    figures["row_tokens"] = _policies((str(axis), Setting(case, rows, axis, 20, rate)) for axis in case.row_tokens)
    figures["slots"] = _slots(case)
    return figures | {"to_concat": ratios(figures["packings"]), "case": asdict(case)}


def _packings(case: TcbBench) -> dict[str, dict]:
    """Returns the figures of each policy and variance, by rate and packing: Figs. 9 to 12 and 16."""
    figures: dict[str, dict] = {}
    capacity = capacity_of(case, *BY_RATE)
    for name, given in (("DAS", POLICIES["DAS"]), ("FCFS", "fcfs")):
        for variance in VARIANCES:
            print(f"packings under {name}, variance {variance}", file=sys.stderr, flush=True)
            figures[f"{name} var{variance}"] = {
                str(rate): {
                    packing: Setting(case, *BY_RATE, variance, rate * capacity).run(
                        given.replace("das", "slotted_das") if packing == "slotted" else given, packing
                    )
                    for packing in PACKINGS
                }
                for rate in case.rates
            }
    return figures


def _policies(settings: Iterable[tuple[str, Setting]]) -> dict[str, dict]:
    """Returns the figures of each policy on the engine `concat`, by setting: Fig. 15."""
    return {axis: {name: setting.run(given, "concat") for name, given in POLICIES.items()} for axis, setting in settings}


def _slots(case: TcbBench) -> dict[str, dict]:
    """Returns the figures of rows that are cut into so many slots, and of the slots that Slotted-DAS chooses."""
    rows, row_tokens = SLOTTED
    rate = case.rate * capacity_of(case, *SLOTTED)
    figures = {}
    for slots in case.slots:
        setting = Setting(case, rows, row_tokens, 20, rate, max(1, row_tokens // slots))
        figures[str(slots)] = {name: setting.run(POLICIES[name], "slotted") for name in ("DAS", "FCFS")}
    chosen = POLICIES["DAS"].replace("das", "slotted_das")
    return figures | {"chosen": {"Slotted-DAS": Setting(case, rows, row_tokens, 20, rate).run(chosen, "slotted")}}


def ratios(packings: dict[str, dict]) -> dict[str, dict]:
    """Returns the highest throughput of `concat` over that of `naive` and of `turbo`, beside what TCB states."""

    def most(by_rate: dict, packing: str) -> float:
        return max(by_packing[packing]["texts_per_s"] for by_packing in by_rate.values())

    return {
        name: {
            "to_naive": round(most(by_rate, "concat") / most(by_rate, "naive"), 2),
            "to_turbo": round(most(by_rate, "concat") / most(by_rate, "turbo"), 2),
            "stated": STATED.get(name),
        }
        for name, by_rate in packings.items()
    }


def table_of(figures: dict) -> str:
    lines: list[str] = []
    for name, by_rate in figures["packings"].items():
        title = f"{name}, B {BY_RATE[0]}, L {BY_RATE[1]}: utility / texts a second, by rate in multiples of the capacity"
        lines += _table(title, by_rate, lambda one: f"{one['utility']:.3f}/{one['texts_per_s']:.0f}")
        ratio = figures["to_concat"][name]
        stated = "; TCB states {} and {}".format(*(one or "no figure" for one in ratio["stated"])) if ratio["stated"] else ""
        lines.append(f"  highest texts a second of concat: {ratio['to_naive']} x naive, {ratio['to_turbo']} x turbo{stated}")
    for axis, of in (("rows", "B"), ("variances", "variance"), ("row_tokens", "L")):
        title = f"policies on the engine concat, by {of}: utility / answered in time"
        lines += _table(title, figures[axis], lambda one: f"{one['utility']:.3f}/{one['on_time']:.3f}")
    lines.append(f"slots of a row, B {SLOTTED[0]}, L {SLOTTED[1]}: texts a second")
    for slots, by_policy in figures["slots"].items():
        lines.append(f"{slots:>7} " + "".join(f"  {name} {one['texts_per_s']:.0f}" for name, one in by_policy.items()))
    lines.append("share of a batch's time that a choice takes, by rate (variance 20)")
    for name, packing in (("DAS", "concat"), ("DAS", "slotted"), ("FCFS", "concat")):
        shares = (f"{rate}: {one[packing]['choosing_share']:.2%}" for rate, one in figures["packings"][f"{name} var20"].items())
        lines.append(f"{'Slotted-DAS' if packing == 'slotted' else name:>12}  " + "  ".join(shares))
    return "\n".join(lines)


def _table(title: str, by_axis: dict, shown: Callable[[dict], str]) -> list[str]:
    names = list(next(iter(by_axis.values())))
    lines = [title, " " * 8 + "".join(f"{name:>14}" for name in names)]
    return lines + [
        f"{axis:>7} " + "".join(f"{shown(one):>14}" for one in by_name.values()) for axis, by_name in by_axis.items()
    ]
