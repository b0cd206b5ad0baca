"""`python -m research.papers tcb`: TCB's Figs. 9 to 13, 15 and 16, simulated with the server's scheduler (section 6.2).

TNB is the packing `naive` with a text in each of the B rows, TTB is `turbo`, TCB is `concat`. As in the paper, DAS fills the
batches of all three. With `slotted`, Slotted-DAS does. TCB does not state its deadlines, nor L in Figs. 9 to 12.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from bench.rows import Positive, Range, Rows, Whole, benchmark, rows_of
from hplm.arrays import Array
from hplm.engine.packing import end_to_end
from hplm.scheduling.columns import Columns
from hplm.scheduling.cost import Cost
from hplm.scheduling.limits import Limits
from hplm.scheduling.policy import Policy, policy
from hplm.scheduling.scheduler import Scheduler
from hplm.scheduling.selection import Capacity, Places, Selection
from hplm.simulate.arrivals import Lengths, Stream
from hplm.simulate.encoders import BatchTime, SimulatedEngine, one_stage, simulate_one
from research.papers.packings import Concat, GroupCost, Naive, Slotted, Turbo
from research.papers.packings import Rows as InRows

MEAN = 20
BY_RATE = (64, 100)  # B and L of Figs. 9 to 12
BY_AXIS = (16, 100)  # B and L of Fig. 15, where they do not vary
SLOTTED = (10, 400)  # B and L of Fig. 13
BY_VARIANCE = (20, 100)  # of Figs. 9 to 12
POLICIES = {"DAS": "das:rows={rows},row_tokens={row_tokens}", "SJF": "sjf", "FCFS": "fcfs", "EDF": "edf", "timely": "timely"}
SLOTTED_DAS = POLICIES["DAS"].replace("das", "slotted_das")
UNBOUNDED = Limits(10**7, 10**12)
# The highest throughput of TCB's `concat` over `naive` and `turbo`, as the paper states it.
STATED = {
    "DAS var20": {"naive": 2.22, "turbo": 1.48},
    "FCFS var20": {"naive": 3.33, "turbo": 1.52},
    "FCFS var100": {"turbo": 1.72},
}


# Texts have 3 to 100 tokens, normal with a mean of 20. The seed is that of the texts and their deadlines.
ROWS, ROW_TOKENS, SLOTS, VARIANCES = (4, 8, 16, 32, 64), (100, 200, 300, 400), (1, 2, 4, 8, 16), (5, 20, 50, 100, 200)
RATES = (0.5, 1.0, 1.5, 2.0, 3.0)  # multiples of the capacity without padding
RATE, SEED = 2.0, 1  # where another axis varies
# Nanoseconds of a batch (many, as on a device that small batches do not fill), of a token, and of a score as in BERT-base.
TOKEN_NS = 27e6 / 1280
COST = GroupCost(3e6, TOKEN_NS, 2.2e-4 * TOKEN_NS)
A_TENSOR = 10**6  # rows, more than a batch has
PACKINGS = ("naive", "turbo", "concat", "slotted", "packed")


@benchmark(seconds=0.1, numbers=2)
def tcb(*, seconds: Positive = 3.0, deadlines_ms: Range = (100.0, 1000.0), numbers: Whole = 5) -> Rows:
    """Simulates packings by request rate and variance of the lengths; policies by B, L and variance; slots of a row.

    :param seconds: to simulate for each figure
    :param deadlines_ms: the range from which the deadline of each text is drawn
    :param numbers: on each axis, at most
    """
    yield from rows_of(simulated(seconds, deadlines_ms, numbers))


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

    seconds: float
    deadlines_ms: tuple[float, float]
    rows: int
    row_tokens: int
    variance: float = 20
    rate: float = RATE  # a multiple of the capacity of full batches without padding and without scores
    slot_tokens: int = 0
    capacity_of: tuple[int, int] = BY_AXIS  # B and L of this capacity

    def run(self, name: str, packing: str) -> dict[str, float]:
        """Returns the figures of a policy and a packing. With `slotted`, Slotted-DAS takes the place of DAS."""
        given = SLOTTED_DAS if (name, packing) == ("DAS", "slotted") and not self.slot_tokens else POLICIES[name]
        chooses = Timed(policy(given.format(rows=self.rows, row_tokens=self.row_tokens)))
        tokens, full = self.rows * self.row_tokens, self.capacity_of[0] * self.capacity_of[1]
        capacity = Capacity(tokens, self.rows if packing == "naive" else tokens, tokens)
        texts_per_s = self.rate * full / MEAN / ((COST.call + COST.token * full) / 1e9)
        load = Stream(texts_per_s, self.seconds, Lengths(MEAN, self.variance), self.deadlines_ms).draw(SEED)
        scheduler = Scheduler(chooses, UNBOUNDED, commit_ns=0)
        stages = one_stage(batch_time(packing, self.row_tokens, self.slot_tokens))
        outcome = simulate_one(scheduler, SimulatedEngine(stages, capacity), load)
        return {
            "utility": outcome.utility,
            "on_time": float(outcome.on_time.mean()),
            "texts_per_s": float(outcome.answered.sum() / outcome.end_ns * 1e9),
            "choosing_share": chooses.seconds / (outcome.busy_ns / 1e9),
        }


def batch_time(packing: str, row_tokens: int, slot_tokens: int) -> BatchTime:
    """Returns the nanoseconds of a batch in a packing, where padded tokens and scores count. Its rows are one tensor."""
    lay = {
        "packed": lambda lengths, places: [end_to_end(lengths)],
        "naive": Naive().lay,
        "turbo": Turbo(COST).lay,
        "concat": Concat(A_TENSOR, row_tokens).lay,
        "slotted": Slotted(A_TENSOR, row_tokens, slot_tokens).lay,
    }[packing]

    def took_ns(lengths: Array, places: Places | None) -> float:
        laid = lay(lengths, places)
        scores = sum(one.rows * one.width if isinstance(one, InRows) else int((one.lengths**2).sum()) for one in laid)
        calls = len(laid) if packing == "turbo" else 1
        return COST.call * calls + COST.token * sum(one.rows for one in laid) + COST.score * scores

    return took_ns


def simulated(seconds: float, deadlines_ms: tuple[float, float], most: int) -> dict[str, Any]:
    """Returns the figures by axis (Figs. 9 to 13, 15 and 16), and the ratios beside those that TCB states."""
    setting = partial(Setting, seconds, deadlines_ms)
    usual, slotted = setting(*BY_AXIS), setting(*SLOTTED, capacity_of=SLOTTED)

    def by(axis: str, numbers: Sequence[float]) -> dict[str, dict[str, dict[str, float]]]:
        """Returns the figures of each policy on the engine `concat`."""
        settings = {str(number): replace(usual, **{axis: number}) for number in numbers[-most:]}
        return {number: {name: one.run(name, "concat") for name in POLICIES} for number, one in settings.items()}

    packings: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    for name, variance in product(("DAS", "FCFS"), BY_VARIANCE):
        by_rate = {str(rate): setting(*BY_RATE, variance, rate, capacity_of=BY_RATE) for rate in RATES[-most:]}
        found = {rate: {packing: one.run(name, packing) for packing in PACKINGS} for rate, one in by_rate.items()}
        packings[f"{name} var{variance}"] = found
    cut = {str(number): replace(slotted, slot_tokens=max(1, slotted.row_tokens // number)) for number in SLOTS[-most:]}
    slots = {number: {name: one.run(name, "slotted") for name in ("DAS", "FCFS")} for number, one in cut.items()}
    return {
        "packings": packings,
        "rows": by("rows", ROWS),
        "variances": by("variance", VARIANCES),
        "row_tokens": by("row_tokens", ROW_TOKENS),
        "slots": slots | {"chosen": {"Slotted-DAS": slotted.run("DAS", "slotted")}},
        "to_concat": {name: _ratios(name, by_rate) for name, by_rate in packings.items()},
    }


def _ratios(name: str, by_rate: dict[str, dict[str, dict[str, float]]]) -> dict[str, float]:
    """Returns the highest throughput of `concat` over that of `naive` and of `turbo`, beside what TCB states."""
    most = {packing: max(one[packing]["texts_per_s"] for one in by_rate.values()) for packing in PACKINGS}
    ratios = {f"to_{packing}": most["concat"] / most[packing] for packing in ("naive", "turbo")}
    return ratios | {f"to_{packing}_stated": ratio for packing, ratio in STATED.get(name, {}).items()}
