"""TCB's figures, simulated with the server's own scheduler and modelled engines (section 6.2).

TNB is the packing `naive` with a text in each of the B rows, TTB is `turbo`, TCB is `concat`. As in the paper, DAS fills the
batches of all three. With `slotted`, Slotted-DAS does. TCB does not state its deadlines, nor L in Figs. 9 to 12.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

import numpy as np

from bench.curves import Curve
from hplm.errors import InvalidInput
from hplm.scheduling.columns import Columns
from hplm.scheduling.cost import Cost
from hplm.scheduling.limits import Limits
from hplm.scheduling.policy import Policy, policy
from hplm.scheduling.scheduler import Scheduler
from hplm.scheduling.selection import Selection
from hplm.scheduling.simulation.arrivals import Lengths, Stream
from hplm.scheduling.simulation.engines import PACKINGS, EngineCost, one_stage
from hplm.scheduling.simulation.server import Machine, Simulation
from hplm.scheduling.waiting import Capacity
from research.options import FLAG, SEVERAL, expect_numbers_above_zero

MEAN = 20
BY_RATE = (64, 100)  # B and L of Figs. 9 to 12
BY_AXIS = (16, 100)  # B and L of Fig. 15, where they do not vary
SLOTTED = (10, 400)  # B and L of Fig. 13
VARIANCES = (20, 100)
POLICIES = {"DAS": "das:rows={rows},row_tokens={row_tokens}", "SJF": "sjf", "FCFS": "fcfs", "EDF": "edf", "timely": "timely"}
SLOTTED_DAS = POLICIES["DAS"].replace("das", "slotted_das")
UNBOUNDED = Limits(10**7, 10**12)
# The highest throughput of TCB's `concat` over `naive` and `turbo`, as the paper states it.
STATED = {"DAS var20": (2.22, 1.48), "FCFS var20": (3.33, 1.52), "FCFS var100": (None, 1.72)}


@dataclass(frozen=True)
class Axes:
    """The numbers of each axis. Texts have 3 to 100 tokens, normal with a mean of 20."""

    seconds: float = 3.0
    "Seconds to simulate for each figure."
    rows: Annotated[tuple[int, ...], SEVERAL] = (4, 8, 16, 32, 64)
    "Rows of a batch, B."
    row_tokens: Annotated[tuple[int, ...], SEVERAL] = (100, 200, 300, 400)
    "Tokens of a row, L."
    slots: Annotated[tuple[int, ...], SEVERAL] = (1, 2, 4, 8, 16)
    "Slots of a row."
    variances: Annotated[tuple[int, ...], SEVERAL] = (5, 20, 50, 100, 200)
    "Variances of the lengths."
    rates: Annotated[tuple[float, ...], SEVERAL] = (0.5, 1.0, 1.5, 2.0, 3.0)
    "Request rates, as multiples of the capacity without padding."
    rate: float = 2.0
    "The request rate where another axis varies."
    deadlines_ms: Annotated[tuple[float, float], FLAG] = (100.0, 1000.0)
    "The range from which the deadline of each text is drawn."
    batch_ms: float = 3.0
    "The time of a batch beside that of its tokens: large for a device that small batches do not fill."
    seed: int = 1
    "Seed of the texts and their deadlines."

    def __post_init__(self) -> None:
        least, most = self.deadlines_ms
        if not 0 < least <= most:
            raise InvalidInput(f"--deadlines-ms {least} {most}: give the least and the most, both above 0")
        expect_numbers_above_zero(self)

    def quick(self) -> Axes:
        return replace(self, seconds=0.1, rows=(4, 16), row_tokens=(100,), slots=(1, 4), variances=(20,))


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

    axes: Axes
    rows: int
    row_tokens: int
    variance: float = 20
    rate: float | None = None  # a multiple of the capacity of full batches without padding and without scores
    slot_tokens: int = 0
    capacity_of: tuple[int, int] = BY_AXIS  # B and L of this capacity

    def run(self, given: str, packing: str) -> dict[str, float]:
        cost = EngineCost(1e6 * self.axes.batch_ms, row_tokens=self.row_tokens, slot_tokens=self.slot_tokens)
        tokens = self.rows * self.row_tokens
        capacity = Capacity(tokens, self.rows if packing == "naive" else tokens, tokens)
        lengths = Lengths(MEAN, self.variance)
        load = Stream(self._texts_per_s, self.axes.seconds, lengths, self.axes.deadlines_ms).draw(self.axes.seed)
        chooses = Timed(policy(given.format(rows=self.rows, row_tokens=self.row_tokens)))
        scheduler = Scheduler(chooses, UNBOUNDED, commit_ns=0)
        outcome = Simulation(scheduler, Machine(one_stage(cost.of(packing)), capacity), load).run()
        return {
            "utility": round(outcome.utility, 4),
            "on_time": round(float(outcome.on_time.mean()), 4),
            "texts_per_s": round(float(outcome.answered.sum() / outcome.end_ns * 1e9), 1),
            "choosing_share": round(chooses.seconds / (outcome.busy_ns / 1e9), 5),
        }

    @property
    def _texts_per_s(self) -> float:
        tokens = self.capacity_of[0] * self.capacity_of[1]
        capacity = tokens / MEAN / (self.axes.batch_ms / 1e3 + EngineCost.token / 1e9 * tokens)
        return (self.axes.rate if self.rate is None else self.rate) * capacity

    def policies(self) -> dict[str, dict[str, float]]:
        """Returns the figures of each policy on the engine `concat`."""
        return {name: self.run(given, "concat") for name, given in POLICIES.items()}

    def packings(self, name: str) -> dict[str, dict[str, float]]:
        """Returns the figures of each packing under a policy."""
        slotted = SLOTTED_DAS if name == "DAS" else POLICIES[name]
        return {packing: self.run(slotted if packing == "slotted" else POLICIES[name], packing) for packing in PACKINGS}


def simulated(axes: Axes) -> dict[str, Any]:
    """Returns the figures by axis (Figs. 9 to 13, 15 and 16), and the ratios beside those that TCB states."""
    packings = {
        f"{name} var{variance}": {
            str(rate): Setting(axes, *BY_RATE, variance, rate, capacity_of=BY_RATE).packings(name) for rate in axes.rates
        }
        for name in ("DAS", "FCFS")
        for variance in VARIANCES
    }
    rows, row_tokens = BY_AXIS
    usual, slotted = Setting(axes, rows, row_tokens), Setting(axes, *SLOTTED, capacity_of=SLOTTED)
    slots = {
        str(number): {
            name: replace(slotted, slot_tokens=max(1, slotted.row_tokens // number)).run(POLICIES[name], "slotted")
            for name in ("DAS", "FCFS")
        }
        for number in axes.slots
    }
    return {
        "packings": packings,
        "rows": {str(number): replace(usual, rows=number).policies() for number in axes.rows},
        "variances": {str(number): replace(usual, variance=number).policies() for number in axes.variances},
        "row_tokens": {str(number): replace(usual, row_tokens=number).policies() for number in axes.row_tokens},
        "slots": slots | {"chosen": {"Slotted-DAS": slotted.run(SLOTTED_DAS, "slotted")}},
        "to_concat": {name: _ratios(name, by_rate) for name, by_rate in packings.items()},
        "case": asdict(axes),
    }


def _ratios(name: str, by_rate: dict[str, dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Returns the highest throughput of `concat` over that of `naive` and of `turbo`, beside what TCB states."""
    most = {packing: max(one[packing]["texts_per_s"] for one in by_rate.values()) for packing in PACKINGS}
    ratios = {f"to_{packing}": round(most["concat"] / most[packing], 2) for packing in ("naive", "turbo")}
    return ratios | {"stated": STATED.get(name)}


def curves_of(figures: dict[str, Any]) -> dict[str, dict[str, Curve]]:
    """Returns the figures as curves: utility where an axis of the batch varies, texts a second where the load does."""
    curves = {f"{name}: texts a second by rate": _lines(one, "texts_per_s") for name, one in figures["packings"].items()}
    curves |= {f"utility by {axis}": _lines(figures[axis], "utility") for axis in ("rows", "variances", "row_tokens")}
    by_rate = figures["packings"]["DAS var20"]
    choosing = {rate: {"DAS": one["concat"], "Slotted-DAS": one["slotted"]} for rate, one in by_rate.items()}
    slots = {number: one for number, one in figures["slots"].items() if number != "chosen"}
    return curves | {
        "choosing, share of a batch's time by rate": _lines(choosing, "choosing_share"),
        "texts a second by slots": _lines(slots, "texts_per_s"),
    }


def _lines(by_axis: dict[str, dict[str, dict[str, float]]], what: str) -> dict[str, Curve]:
    names = next(iter(by_axis.values()))
    return {name: {number: one[name][what] for number, one in by_axis.items()} for name in names}
