"""Predicts when the next batch can pass all stages of the engine without a wait, and how long it is not in the slowest one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from hplm.scheduling.batch import Batch
from hplm.scheduling.columns import Columns
from hplm.scheduling.cost import Cost
from hplm.scheduling.waiting import Capacity


class Ended(NamedTuple):
    """The batch that was finished last."""

    at_ns: int = 0
    expected_ns: float = 0.0
    backbone: int = 0


def next_start(running: Iterable[Batch[Any]], ended: Ended, shares_of: Sequence[Sequence[float]], now_ns: int) -> float:
    """Returns when the next batch finds the first stage free, and each other one when it gets there.

    The next batch counts as if it were as large as the last one of those that run. `shares_of`: by backbone, the shares of a
    batch's time that each stage takes.
    """
    shares = shares_of[ended.backbone]
    # When each stage is done with the batches so far. The first stage tells it, by `released_ns`.
    free = float(now_ns)
    done = [ended.at_ns - ended.expected_ns * sum(shares[stage + 1 :]) for stage in range(len(shares))]
    start = free
    for batch in running:
        shares = shares_of[batch.backbone]
        left = batch.released_ns
        if left is None:
            started = free if batch.started_ns is None else batch.started_ns
            left = free = max(now_ns, started + batch.expected_ns * shares[0])
        start, passed = free, shares[0]
        for stage in range(1, len(shares)):
            left = done[stage] = max(left, done[stage]) + batch.expected_ns * shares[stage]
            if stage == len(shares) - 1:
                left = done[stage] = max(now_ns, left)  # it is not done yet
            start = max(start, left - batch.expected_ns * passed)
            passed += shares[stage]
    return start


def beside_ns(cost: Cost, columns: Columns, capacity: Capacity) -> int:
    """Returns how long the next batch will be in other stages than the slowest: nothing if there is one stage.

    Policies count batches as if each began so much later and only took the time of the slowest stage.
    """
    if cost.slowest == 1:
        return 0
    tokens = int(columns.demand.sum())
    share = min(1.0, capacity.tokens / tokens, capacity.texts / len(columns))
    return int((1 - cost.slowest) * cost.predict(tokens * share, len(columns) * share))
